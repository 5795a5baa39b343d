"""The index of a checkpoint that `torch.distributed.checkpoint` reads."""

from typing import Any

from torch.distributed.checkpoint import filesystem


def place_in(file: str, start: int, length: int) -> Any:
    """Return the entry of an index that says where a chunk is: bytes `start` … of `file`."""
    return filesystem._StorageInfo(file, start, length)
