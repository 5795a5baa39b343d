from __future__ import annotations

import pytest

from elastic_driver.peer_loss import looks_like_peer_loss


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "
        "Connection closed by peer [127.0.0.1]:30121",
        "torch.distributed.DistNetworkError: The client socket has failed to connect",
        '  File "/x/torch/distributed/distributed_c10d.py", line 1\nRuntimeError: Broken pipe',
        "torch.distributed.DistBackendError: NCCL error ... ncclRemoteError: A call failed",
        "elastic_driver.errors.WorldBrokenError: a peer is gone",
        "tensorflow.python.framework.errors_impl.UnavailableError: {{function_node x}} Collective "
        "ops is aborted by: recvmsg:Connection reset by peer",
    ],
)
def test_a_broken_group_is_recognised(text: str) -> None:
    assert looks_like_peer_loss(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ValueError: shapes do not match",
        "requests.exceptions.ConnectionError: Connection reset by peer",  # the user's own download
        "BrokenPipeError: [Errno 32] Broken pipe",
        "torch.OutOfMemoryError: CUDA out of memory",
        "NCCL error: invalid usage, Duplicate GPU detected : rank 0 and rank 1",
    ],
)
def test_other_failures_are_the_workers_own(text: str) -> None:
    assert not looks_like_peer_loss(text)
