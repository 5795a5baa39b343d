"""Whether a failed process fell only because one of its peers was lost.

When one rank dies, the collectives of all others break, and an unmodified script lets that
exception end it too. Such a *victim* must not be taken for the cause: the job is judged by
the process that failed first. The agent asks this about a worker's last words; code inside a
worker may ask it about an exception's text. Pure text in, verdict out.
"""

from __future__ import annotations

# Only torch.distributed's own transports and stores, and TensorFlow's collectives, say these.
SURE_SIGNS = (
    "gloo/transport/",  # every failed read, write and time-out of gloo's pairs names this path
    "connectFullMesh failed",  # gloo, building a group
    "Application timeout caused pair closure",  # gloo
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "remote process exited or there was a network error",  # ncclRemoteError, spelled out
    "socketPollConnect",  # NCCL
    "socketProgress",  # NCCL
    "Watchdog caught collective operation timeout",  # ProcessGroupNCCL
    "DistNetworkError",  # TCPStore: the store's host is gone
    "DistStoreError",  # a key that a lost peer never wrote
    "Collective ops is aborted by",  # TensorFlow, whatever broke the collective
    "WorldBrokenError",  # ours
)

# Any program may say these; they count only beside a sign of torch.distributed.
COMMON_SIGNS = (
    "Connection closed by peer",
    "Connection closed by remote peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Socket Timeout",
)
CONTEXT_SIGNS = (
    "torch/distributed/",
    "torch.distributed",
    "DistBackendError",
    "ProcessGroup",
    "TCPStore",
    "c10d",
    "gloo",
    "NCCL",
)


def looks_like_peer_loss(text: str) -> bool:
    """True where `text` (an exception, the tail of a log) tells of a broken group."""
    if any(sign in text for sign in SURE_SIGNS):
        return True
    return any(sign in text for sign in COMMON_SIGNS) and any(
        sign in text for sign in CONTEXT_SIGNS
    )
