"""Durable checkpoints of a state: for the day when every process that held it is gone.

`state` owns one where `checkpoint_dir=` is given. At every `every`-th commit each rank copies its
share of the tensors (the pause), and the background thread of `writer` does the rest.
When a world starts in which nobody holds a trained state, the rank that the others will
receive from loads the newest complete checkpoint here. Bytes, steps (committed ones) and seconds.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from elastic_driver import contract
from elastic_driver.core.documents import SaveRequest, World
from elastic_driver.errors import ElasticError, UsageError
from elastic_driver.worker.checkpoints import folder as folders
from elastic_driver.worker.checkpoints.folder import DamagedError, Manifest
from elastic_driver.worker.checkpoints.staging import Staging, kinds_of
from elastic_driver.worker.checkpoints.writer import GOES_ON, Share, Values, Writer, describe
from elastic_driver.worker.state_sync.sharing import Envelope, Shared, make_room, taken_apart
from elastic_driver.worker.worker_log import say

KEEP = 3
HOLD_UP_S = 30.0  # longest that training waits for the checkpoint before
WORTH_SAYING_S = 3.0  # a shorter wait is not reported


class Schedule(Struct, frozen=True):
    """Where checkpoints go, and how often; raises `UsageError` for what makes no sense."""

    root: Path
    every: int
    keep: int = KEEP

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("keep", self.keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} is {value!r}; give a whole number of at least 1")


class _Place(Struct, frozen=True):
    """This process's part in the world it writes with, and a name all its members agree on."""

    rank: int
    size: int
    attempt: str


class Checkpoints:
    """The checkpoints of one state, in a folder of their own that every host sees."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._root = schedule.root
        self._writer = Writer(self._root, schedule.keep)
        self._place: _Place | None = None
        self._staging: Staging | None = None
        self._late = False  # training had to wait for the disk, and that was said
        self._stuck = False  # the disk has not answered within HOLD_UP_S

    # ---- taking --------------------------------------------------------------------------

    def entered(self, world: World, rank: int) -> None:
        """From now on the members of `world` write together, this process as `rank`."""
        self._place = _place(rank, [m.worker for m in world.members], f"{world.round}")

    def due(self, version: int) -> bool:
        """Whether the state after `version` steps is to be kept."""
        return self._place is not None and version % self._schedule.every == 0

    def take(self, shared: Shared, version: int) -> None:
        """Stage this rank's share of the state at a commit, and have it written.

        Every rank of the world must call it after the same steps. Returns as soon as the share is
        copied; only while the checkpoint before is not written yet, training waits, lest ranks
        with slower disks leave out others than those with faster ones.
        """
        place = self._place
        if place is not None and self._is_ready(version):
            self._stage(shared, version, place, GOES_ON)

    def take_last(self, shared: Shared, request: SaveRequest, rank: int) -> Path:
        """As `take`, for workers that are about to go and write together; the folder.

        Raises `ElasticError` where the disk does not answer in the time there is.
        """
        if not self._writer.is_free(request.seconds):
            raise ElasticError(f"{self._root} has not answered for {request.seconds:.0f} s")
        place = _place(rank, request.members, f"last{request.number}")
        return self._stage(shared, request.step, place, "")

    def outcome(self, folder: Path) -> str | None:
        """What became of this process's newest checkpoint: "" complete, else why not; None: yet."""
        return self._writer.outcome(folder)

    def _stage(self, shared: Shared, version: int, place: _Place, then: str) -> Path:
        contents = taken_apart(shared)
        kinds = kinds_of(contents.tensors)
        old = self._staging
        if old is None or (old.kinds, old.rank, old.size) != (kinds, place.rank, place.size):
            self._staging = old = Staging(kinds, place.rank, place.size)
        old.copy(contents.tensors)
        values = None
        if place.rank == 0:
            values = Values(contents.without_ties(), shared.random.portable())
        folder = self._root / folders.folder_name(version, place.attempt)
        self._writer.submit(Share(folder, version, old, values, then))
        return folder

    def _is_ready(self, version: int) -> bool:
        """Whether the checkpoint before is written; training waits for it, but not for ever."""
        started = time.monotonic()
        if not self._writer.is_free(0.0 if self._stuck else HOLD_UP_S):
            if not self._stuck:
                say(
                    f"step {version}: {self._root} has not answered for {HOLD_UP_S:g} s; training "
                    "goes on without checkpoints until it does"
                )
            self._stuck = True
            return False
        self._stuck = False
        waited = time.monotonic() - started
        if waited > WORTH_SAYING_S and not self._late:
            self._late = True
            say(
                f"step {version}: training waited {waited:.1f} s for the checkpoint before; raise "
                f"every= (now {self._schedule.every}) or use a faster disk"
            )
        return True

    def drain(self) -> bool:
        """Wait, within bounds, for what is under way; whether all of it is written."""
        return self._writer.drain()

    # ---- loading -------------------------------------------------------------------------

    def load_newest(self, shared: Shared) -> int | None:
        """Put the newest complete, undamaged checkpoint into the state; its step, None: none there.

        For the one rank from which the others receive, before anyone writes. Half-written
        checkpoints are deleted, damaged ones named and left aside. Raises `UsageError` where the
        state is built differently from the one in the checkpoint.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            for path in folders.sweep(self._root):
                say(f"{path} was half written when its job ended; deleted")
            candidates = folders.checkpoints(self._root)
        except OSError as error:
            say(f"checkpoint_dir {self._root} cannot be used: {describe(error)}; training goes on")
            return None
        for path in candidates:
            try:
                manifest = folders.verified(path)
            except DamagedError as error:
                say(f"{folders.set_aside(path)} is damaged: {error}; trying the one before")
            except OSError as error:
                say(f"{path} cannot be read: {describe(error)}; trying the one before")
            else:
                _restore(shared, path, manifest)
                say(f"going on from step {manifest.version}, read from {path}")
                return manifest.version
        if candidates:
            say(f"no checkpoint in {self._root} can be used: training starts from the beginning")
        return None


def _place(rank: int, members: Sequence[str], what: str) -> _Place:
    names = [os.environ.get(contract.RUN_ID, ""), *members]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return _Place(rank, len(members), f"{what}-{digest}")


def _restore(shared: Shared, path: Path, manifest: Manifest) -> None:
    from elastic_driver.worker.checkpoints.format import read_into  # noqa: PLC0415 - see there

    envelope = msgspec.msgpack.decode((path / folders.VALUES).read_bytes(), type=Envelope)
    try:
        room = make_room(shared, envelope)
    except UsageError as error:
        raise UsageError(f"{path} does not fit this script's state: {error}") from error
    read_into(path, manifest, room.tensors())
    room.take_over(shared, with_random=True)
