"""Recognises why a process failed by the last lines that it printed. Pure.

When one rank dies, the collectives of all others break, and that exception ends an unmodified
script too. Such a *victim* must not count as the cause: the job is judged by the process that
failed first. The agent checks the last lines of a worker's output, a worker the text of an
exception (`looks_like_peer_loss`).

Of a process that had too little memory, the last exception that it printed decides: one that was
caught and followed by another one is not the cause of its end (`lacks_memory`).
"""

import re
import unicodedata
from typing import Literal

# ---- a lost peer -------------------------------------------------------------------------

# Only torch.distributed's own transports and stores, and TensorFlow's collectives, write these.
_CERTAIN = (
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

# Any program may write these; they count only beside one of `_OF_TORCH`.
_AMBIGUOUS = (
    "Connection closed by peer",
    "Connection closed by remote peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Socket Timeout",
)
_OF_TORCH = (
    "torch/distributed/",
    "torch.distributed",
    "DistBackendError",
    "ProcessGroup",
    "TCPStore",
    "c10d",
    "gloo",
    "NCCL",
)
_PLACE = re.compile(  # in a C++ library
    r"\[?(?:in: )?\S*/\S+\.(?:cc|cpp|cu|cuh|h|hpp|cxx):\d+\]?,? ?"
)
_ADVICE = re.compile(r"[.,;]? ?(?:This is typically|This may indicate|Check the logs|GLHF).*")


def in_short(text: str) -> str:
    """Return the first line of a library's error, without its place, advice and pictures."""
    line = _ADVICE.sub("", _PLACE.sub("", text.strip().partition("\n")[0]))
    return "".join(c for c in line if unicodedata.category(c) != "So" and c != "\ufe0f").strip()


def looks_like_peer_loss(text: str) -> bool:
    """Return whether `text` (an exception, the tail of a log) reports a broken group."""
    ambiguous = any(phrase in text for phrase in _AMBIGUOUS)
    return any(phrase in text for phrase in (*_CERTAIN, *(_OF_TORCH if ambiguous else ())))


# ---- too little memory -------------------------------------------------------------------

# A line that begins an exception as Python prints it, perhaps after the rank that torch puts there.
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w+)(?::|$)", re.MULTILINE)
_ENDINGS = ("Error", "Exception", "Interrupt", "Exit", "Iteration")
_OF_HOST = ("MemoryError", "_ArrayMemoryError")  # Python's own, numpy's
_OF_DEVICE = re.compile(r"torch\.(\w+\.)?OutOfMemoryError")
# Torch has no exception of its own for the memory of a host.
_ALLOCATION = "you tried to allocate"
_ALLOCATOR = "DefaultCPUAllocator"
_BAD_ALLOC = "terminate called after throwing an instance of 'std::bad_alloc'"
# A process that loads data for the worker was killed; torch names the signal.
_LOADER_KILLED = re.compile(r"^RuntimeError: DataLoader worker .*killed by signal: Killed", re.M)


def lacks_memory(tail: str) -> Literal["host", "device"] | None:
    """Return whose memory was too small, by the last lines of a process that failed; None: none."""
    if _BAD_ALLOC in tail:
        return "host"
    last = None
    for match in _EXCEPTION.finditer(tail):
        if match[1].endswith(_ENDINGS):
            last = match
    if last is None:
        return None
    if _OF_DEVICE.fullmatch(last[1]):
        return "device"
    text = tail[last.start() :]
    allocation = _ALLOCATOR in text and _ALLOCATION in text
    return "host" if allocation or last[1].rpartition(".")[2] in _OF_HOST else None


def lost_a_loader(tail: str) -> bool:
    """Return whether a process that loads data for this one was killed."""
    return _LOADER_KILLED.search(tail) is not None
