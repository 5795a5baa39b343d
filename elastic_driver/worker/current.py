"""This process's place in its current world: the numbers that scripts ask for; its lines on stderr.

`world` writes the numbers when it enters or leaves a round; samplers, scripts and `elastic.rank()`
read them. Reading sends nothing and imports no torch: it costs an attribute lookup. The numbers
have Horovod's meaning. They are counted anew each round; only `slot()` stays. All raise
`NotInitializedError`, a `UsageError`, before the first world.

A process that a worker starts, such as one of a `DataLoader`, is in no world itself, and asks for
rank and size to take its part of the data. It has the numbers of that worker, whatever the start
method. A forked process would have those of the moment of the fork, a spawned one none, and one
that outlives a world (`persistent_workers=True`) those of an earlier world. So the worker writes
the numbers of each world into a file in the agent's scratch folder, and these processes read them
there. A worker without such a folder tells nothing.

Lines that a worker writes about itself (`say`) are few, and each is a whole sentence.
"""

import contextlib
import os
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from elastic_driver import contract
from elastic_driver.errors import UsageError
from elastic_driver.words import printable
from elastic_driver.words.world import SlotInfo


def say(message: str) -> None:
    """Write one line, marked as ours, in one piece."""
    sys.stderr.write(f"elastic: {printable(message)}\n")
    sys.stderr.flush()


class NotInitializedError(UsageError):
    """A script asked about the world before this process was in one."""


class _Current:
    """The mutable fields of this module; a class, so that no `global` statement is needed."""

    place: SlotInfo | None = None
    round: int = 0
    inherited: bool = False  # the place is that of the worker that has forked this process


def enter(place: SlotInfo, round_id: int) -> None:
    """Record the place of this process in round `round_id`."""
    _Current.place = place
    _Current.round = round_id
    _Current.inherited = False
    tell_place(place, round_id)


def forget() -> None:
    """Record that this process is in no world any more."""
    if _Current.place is not None and not _Current.inherited:
        remove_told_place()
    _Current.place = None
    _Current.round = 0
    _Current.inherited = False


def inherit() -> None:
    """Record, in a forked child, that the place is that of its parent."""
    _Current.inherited = _Current.place is not None


def has_parent_in_world() -> bool:
    """Return whether this process was started by a worker that is in a world."""
    return _Current.inherited or (_Current.place is None and read_told_place() is not None)


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
    told = read_told_place()
    if told is not None:
        return told.place, told.round
    if place is None or _path() is not None:  # the file would name it
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


# ---- the place as the processes of a worker read it ------------------------------------

_LONGEST = 2000  # bytes


class ToldPlace(Struct, frozen=True):
    """The place of a worker, and the process that has it."""

    pid: int
    round: int
    place: SlotInfo


def tell_place(place: SlotInfo, round_id: int) -> None:
    """Tell the processes of this worker its place; where that fails, they know none."""
    path = _path()
    if path is None:
        return
    draft = path.with_suffix(".new")
    try:
        draft.write_bytes(msgspec.json.encode(ToldPlace(os.getpid(), round_id, place)))
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        say(f"the processes that this worker starts do not know its rank and size: {error}")


def remove_told_place() -> None:
    """Tell them that this worker is in no world any more."""
    path = _path()
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def read_told_place() -> ToldPlace | None:
    """Return what the worker has told that has started this process; None where there is none."""
    path = _path()
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            told = msgspec.json.decode(file.read(_LONGEST), type=ToldPlace)
    except (OSError, msgspec.DecodeError):
        return None
    return None if told.pid == os.getpid() or not _lives(told.pid) else told


def _path() -> Path | None:
    folder = os.environ.get(contract.SCRATCH)
    worker = os.environ.get(contract.WORKER_ID)
    return Path(folder, f"place-{worker}") if folder and worker and "/" not in worker else None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
