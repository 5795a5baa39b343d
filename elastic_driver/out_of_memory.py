"""Recognises the output of a process that ended because it had too little memory.

The last exception that it printed decides: one that was caught and followed by another one is not
the cause of its end. Pure.
"""

import re
from typing import Literal

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
