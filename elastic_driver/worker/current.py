"""This process's place in its current world: the numbers that scripts ask for.

`world` writes them when it enters or leaves a round; samplers, scripts and `elastic.rank()` read
them. Reading sends nothing and imports no torch: it costs an attribute lookup. The numbers have
Horovod's meaning. They are counted anew each round; only `slot()` stays. All raise
`NotInitializedError`, a `UsageError`, before the first world.

A process that a worker starts, such as one of a `DataLoader`, is in no world itself. It has the
numbers of that worker (`place_file`), whatever the start method.
"""

import os
import sys

from elastic_driver import contract
from elastic_driver.errors import UsageError
from elastic_driver.words.world import SlotInfo
from elastic_driver.worker import place_file


class NotInitializedError(UsageError):
    """A script asked about the world before this process was in one."""


class _Current:
    """The mutable fields of this module; a class, so that no `global` statement is needed."""

    place: SlotInfo | None = None
    round: int = 0
    inherited: bool = False  # the place is that of the worker that has forked this process


def enter(place: SlotInfo, round_id: int) -> None:
    """Record the place of this process in round `round_id`."""
    _Current.place, _Current.round, _Current.inherited = place, round_id, False
    place_file.write(place, round_id)


def forget() -> None:
    """Record that this process is in no world any more."""
    if _Current.place is not None and not _Current.inherited:
        place_file.remove()
    _Current.place, _Current.round, _Current.inherited = None, 0, False


def inherit() -> None:
    """Record, in a forked child, that the place is that of its parent."""
    _Current.inherited = _Current.place is not None


def has_parent_in_world() -> bool:
    """Return whether this process was started by a worker that is in a world."""
    return _Current.inherited or (_Current.place is None and place_file.read() is not None)


def is_initialized() -> bool:
    """Return whether `elastic.init()` or `@elastic.run` has put this process into a world."""
    return _find() is not None


def place() -> SlotInfo:
    """Return all numbers of this process's place."""
    return _found()[0]


def _found() -> tuple[SlotInfo, int]:
    if (found := _find()) is None:
        raise NotInitializedError(
            "rank and size were asked for before this process joined a world; "
            "call elastic.init() first, or ask inside the function decorated with @elastic.run"
        )
    return found


def _find() -> tuple[SlotInfo, int] | None:
    """Return the place and the round of this process, or of the worker that has started it."""
    place = _Current.place
    if place is not None and not _Current.inherited:
        return place, _Current.round
    told = place_file.read()
    if told is not None:
        return told.place, told.round
    if place is None or place_file.is_used():
        return None
    return place, _Current.round


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
    return _found()[1]


def rank_and_size() -> tuple[int, int]:
    """Return (rank, size) in the elastic world, else in torch's default group, else (0, 1).

    So the same script runs under `elasticrun`, under another launcher, and alone. Raises
    `NotInitializedError` in a process of `elasticrun` that is in no world: it would take all
    data for its own.
    """
    if (found := _find()) is not None:
        return found[0].rank, found[0].size
    dist = sys.modules.get("torch.distributed")  # a group exists only where it was imported
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if os.environ.get(contract.WORKER_ID):
        _found()  # raises
    return 0, 1
