"""This process's place in the world it is in right now: the six numbers scripts ask for.

`world` writes here when a round is entered or left; samplers, scripts and `elastic.rank()` read.
Nothing here talks to anybody, and torch is never imported, so asking costs an attribute lookup.
The numbers have Horovod's meaning; they are counted anew each round, only `slot()` stays.
"""

from __future__ import annotations

import sys

from elastic_driver.core.documents import SlotInfo
from elastic_driver.errors import UsageError

__all__ = [
    "NotInitializedError",
    "cross_rank",
    "cross_size",
    "enter",
    "forget",
    "is_initialized",
    "local_rank",
    "local_size",
    "place",
    "rank",
    "rank_and_size",
    "round_id",
    "size",
    "slot",
]


class NotInitializedError(UsageError):
    """A question about the world was asked before the process was in one."""


class _Current:
    """The one mutable cell of this module; a class so that no `global` statement is needed."""

    place: SlotInfo | None = None
    round: int = 0


def enter(place: SlotInfo, round_id: int) -> None:
    """Note the place this process has from now on, in round `round_id`."""
    _Current.place, _Current.round = place, round_id


def forget() -> None:
    """Note that this process is in no world any more."""
    _Current.place, _Current.round = None, 0


def is_initialized() -> bool:
    """Whether `elastic.init()` or the first `@elastic.run` has put this process into a world."""
    return _Current.place is not None


def place() -> SlotInfo:
    """All numbers at once; raises `NotInitializedError` before the first world."""
    if _Current.place is None:
        raise NotInitializedError(
            "rank and size were asked for before this process joined a world; "
            "call elastic.init() first, or ask inside the function decorated with @elastic.run"
        )
    return _Current.place


def rank() -> int:
    """This process's rank in the world, 0 … size − 1."""
    return place().rank


def size() -> int:
    """Number of processes in the world."""
    return place().size


def local_rank() -> int:
    """Rank among the processes of this host, 0 … local size − 1, counted anew each round."""
    return place().local_rank


def local_size() -> int:
    """Number of this world's processes on this host."""
    return place().local_size


def cross_rank() -> int:
    """Index of this host among the hosts that have a process with this local rank."""
    return place().cross_rank


def cross_size() -> int:
    """Number of hosts that have a process with this local rank."""
    return place().cross_size


def slot() -> int:
    """The slot this process was born in: it names the device and never changes."""
    return place().slot


def round_id() -> int:
    """The membership round this process is in; it grows with every change of the world."""
    place()
    return _Current.round


def rank_and_size() -> tuple[int, int]:
    """Return (rank, size) in the elastic world, else in torch's default group, else (0, 1).

    So the same script runs under `elasticrun`, under another launcher, and alone.
    """
    if is_initialized():
        return rank(), size()
    dist = sys.modules.get("torch.distributed")  # a group exists only where it was imported
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
