"""This process's place in its current world: the numbers that scripts ask for.

`world` writes them when it enters or leaves a round; samplers, scripts and `elastic.rank()` read
them. Reading sends nothing and imports no torch: it costs an attribute lookup. The numbers have
Horovod's meaning. They are counted anew each round; only `slot()` stays. All raise
`NotInitializedError`, a `UsageError`, before the first world.
"""

import sys

from elastic_driver.core.members import SlotInfo
from elastic_driver.errors import UsageError


class NotInitializedError(UsageError):
    """A script asked about the world before this process was in one."""


class _Current:
    """The mutable fields of this module; a class, so that no `global` statement is needed."""

    place: SlotInfo | None = None
    round: int = 0


def enter(place: SlotInfo, round_id: int) -> None:
    """Record the place of this process in round `round_id`."""
    _Current.place, _Current.round = place, round_id


def forget() -> None:
    """Record that this process is in no world any more."""
    _Current.place, _Current.round = None, 0


def is_initialized() -> bool:
    """Return whether `elastic.init()` or `@elastic.run` has put this process into a world."""
    return _Current.place is not None


def place() -> SlotInfo:
    """Return all numbers of this process's place."""
    if _Current.place is None:
        raise NotInitializedError(
            "rank and size were asked for before this process joined a world; "
            "call elastic.init() first, or ask inside the function decorated with @elastic.run"
        )
    return _Current.place


def rank() -> int:
    """Return this process's rank in the world, 0 … size − 1."""
    return place().rank


def size() -> int:
    """Return the number of processes in the world."""
    return place().size


def local_rank() -> int:
    """Return the rank among the processes of this host, 0 … local size − 1."""
    return place().local_rank


def local_size() -> int:
    """Return the number of this world's processes on this host."""
    return place().local_size


def cross_rank() -> int:
    """Return the index of this host among those that have a process with this local rank."""
    return place().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank."""
    return place().cross_size


def slot() -> int:
    """Return the slot this process was started in: it names the device and never changes."""
    return place().slot


def round_id() -> int:
    """Return the current round; it grows with every change of the world."""
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
