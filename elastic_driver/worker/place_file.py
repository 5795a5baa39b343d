"""What a worker tells the processes that it starts: its place in the present world, in a file.

The processes of a `DataLoader` and their like ask for rank and size to take their part of the data.
A forked one has the numbers of the moment of the fork; one that was spawned has none; and one that
outlives a world (`persistent_workers=True`) has those of an earlier world. So the worker writes
the numbers of each world into the agent's scratch folder, and these processes read them there.
A worker without such a folder tells nothing.
"""

import contextlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from elastic_driver import contract
from elastic_driver.words.world import SlotInfo
from elastic_driver.worker.worker_log import say

_LONGEST = 2000  # bytes


class ToldPlace(Struct, frozen=True):
    """The place of a worker, and the process that has it."""

    pid: int
    round: int
    place: SlotInfo


def write(place: SlotInfo, round_id: int) -> None:
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


def remove() -> None:
    """Tell them that this worker is in no world any more."""
    path = _path()
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def read() -> ToldPlace | None:
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


def is_used() -> bool:
    """Return whether this worker tells its place at all."""
    return _path() is not None


def _path() -> Path | None:
    folder, worker = os.environ.get(contract.SCRATCH), os.environ.get(contract.WORKER_ID)
    return Path(folder, f"place-{worker}") if folder and worker and "/" not in worker else None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
