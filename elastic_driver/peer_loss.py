"""Recognises the output of a process that failed only because one of its peers was lost.

When one rank dies, the collectives of all others break, and that exception ends an unmodified
script too. Such a *victim* must not count as the cause: the job is judged by the process that
failed first. The agent checks the last lines of a worker's output, a worker the text of an
exception. Pure.
"""

import re
import unicodedata

# Only torch.distributed's own transports and stores, and TensorFlow's collectives, write these.
CERTAIN = (
    "gloo/transport/",  # in every failed read, write and time-out of gloo's pairs
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
    "a collective was not ended by the loss of its peer",  # ours too, as torch quotes it
)

# Any program may write these; they count only beside a word of `TORCH`.
AMBIGUOUS = (
    "Connection closed by peer",
    "Connection closed by remote peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Socket Timeout",
)
TORCH = (
    "torch/distributed/",
    "torch.distributed",
    "DistBackendError",
    "ProcessGroup",
    "TCPStore",
    "c10d",
    "gloo",
    "NCCL",
)


_PLACE = re.compile(
    r"\[?(?:in: )?\S*/\S+\.(?:cc|cpp|cu|cuh|h|hpp|cxx):\d+\]?,? ?"
)  # of a C++ library
_ADVICE = re.compile(r"[.,;]? ?(?:This is typically|This may indicate|Check the logs|GLHF).*")


def in_short(text: str) -> str:
    """Return the first line of a library's error, without its place, advice and pictures."""
    line = _ADVICE.sub("", _PLACE.sub("", text.strip().partition("\n")[0]))
    return "".join(c for c in line if unicodedata.category(c) != "So" and c != "\ufe0f").strip()


def looks_like_peer_loss(text: str) -> bool:
    """Return whether `text` (an exception, the tail of a log) reports a broken group."""
    ambiguous = any(phrase in text for phrase in AMBIGUOUS)
    return any(phrase in text for phrase in (*CERTAIN, *(TORCH if ambiguous else ())))
