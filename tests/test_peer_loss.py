from __future__ import annotations

import pytest

from elastic_driver.failure_causes import in_short, looks_like_peer_loss


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


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (
            "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
            "[127.0.0.1]:14514: Connection reset by peer. This is typically caused by a remote "
            "worker hanging or bugs in the application. Check the logs. GLHF! 🏖️",
            "Read error [127.0.0.1]:14514: Connection reset by peer",
        ),
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled "
            "system error, NCCL version 2.27.5\nncclSystemError: System call failed",
            "NCCL error unhandled system error, NCCL version 2.27.5",
        ),
        ("The client socket has failed ✨ to connect", "The client socket has failed  to connect"),
        ("größer als erlaubt: 東京", "größer als erlaubt: 東京"),
        ("", ""),
    ],
)
def test_an_error_of_a_library_is_shown_without_its_place_advice_and_pictures(
    text: str, short: str
) -> None:
    assert in_short(text) == short
