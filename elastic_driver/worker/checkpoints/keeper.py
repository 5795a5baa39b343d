"""Durable checkpoints of a state, for when every process that held it is gone.

`state` owns one `Checkpoints` where `checkpoint_dir=` is given. At every `every`-th commit each
rank copies its share of the tensors (the pause), and the background thread of `writer` writes it.
When a world starts in which nobody holds a trained state, the rank that the others will receive
from loads the newest complete checkpoint. Units: bytes, committed steps, seconds.
"""

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
from elastic_driver.worker.checkpoints.staging import Staging
from elastic_driver.worker.checkpoints.writer import CheckpointShare, Writer, describe
from elastic_driver.worker.state_sync.sharing import Envelope, IncomingState, LiveState, split
from elastic_driver.worker.state_sync.values import TensorKind
from elastic_driver.worker.worker_log import say

KEEP = 3
MAX_WAIT_S = 30.0  # longest that training waits for the previous checkpoint
LOGGED_WAIT_S = 3.0  # a shorter wait is not logged
CONSEQUENCE = "training goes on, and every later checkpoint is tried again"


class _WriterGroup(Struct, frozen=True):
    """The world that writes together, and this process's rank in it.

    `attempt` is a name that all its members compute alike, and no other world.
    """

    rank: int
    size: int
    attempt: str

    @classmethod
    def of(cls, rank: int, members: Sequence[str], what: str) -> "_WriterGroup":
        names = [os.environ.get(contract.RUN_ID, ""), *members]
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
        return cls(rank, len(members), f"{what}-{digest}")


class Checkpoints:
    """The checkpoints of one state, in a folder of their own that every host sees.

    Args:
        root: the folder of all checkpoints.
        every: committed steps from one checkpoint to the next.
        keep: how many complete ones stay.

    Raises `UsageError` unless `every` and `keep` are whole numbers of at least 1.
    """

    def __init__(self, root: Path, every: int, keep: int = KEEP) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} is {value!r}; give a whole number of at least 1")
        self._root, self._every = root, every
        self._writer = Writer(root, keep)
        self._group: _WriterGroup | None = None
        self._staging: Staging | None = None
        self._late = False  # training had to wait for the disk, and that was logged
        self._stuck = False  # the disk has not answered within MAX_WAIT_S

    # ---- taking --------------------------------------------------------------------------

    def entered(self, world: World, rank: int) -> None:
        """From now on the members of `world` write together, this process as `rank`."""
        self._group = _WriterGroup.of(rank, [m.worker for m in world.members], f"{world.round}")

    def due(self, version: int) -> bool:
        """Return whether the state after `version` steps is to be kept."""
        return self._group is not None and version % self._every == 0

    def take(self, state: LiveState, version: int) -> None:
        """Copy this rank's share of the state at a commit, and have it written.

        Every rank of the world must call it after the same steps. Returns as soon as the share is
        copied. Only while the previous checkpoint is being written, training waits: otherwise
        ranks with slower disks would skip other checkpoints than ranks with faster ones.
        """
        if self._group is not None and self._is_ready(version):
            self._stage(state, version, self._group, CONSEQUENCE)

    def take_last(self, state: LiveState, request: SaveRequest, rank: int) -> Path:
        """Do the same for workers that are about to leave and write together; return the folder.

        Raises `ElasticError` where the disk does not answer within the request's time.
        """
        if not self._writer.is_free(request.seconds):
            raise ElasticError(f"{self._root} has not answered for {request.seconds:.0f} s")
        group = _WriterGroup.of(rank, request.members, f"last{request.number}")
        return self._stage(state, request.step, group, "")

    def outcome(self, folder: Path) -> str | None:
        """Return "" for a complete checkpoint, why the newest one failed, or None while pending."""
        return self._writer.outcome(folder)

    def _stage(self, state: LiveState, version: int, group: _WriterGroup, consequence: str) -> Path:
        contents = split(state)
        kinds = {name: TensorKind.of(tensor) for name, tensor in contents.tensors.items()}
        layout = (kinds, group.rank, group.size)
        if self._staging is None or self._staging.layout != layout:
            self._staging = Staging(*layout)
        self._staging.copy(contents.tensors)
        values = (contents.detached(), state.random.portable()) if group.rank == 0 else None
        folder = self._root / folders.folder_name(version, group.attempt)
        self._writer.submit(CheckpointShare(folder, version, self._staging, values, consequence))
        return folder

    def _is_ready(self, version: int) -> bool:
        """Return whether the previous checkpoint is written, after a bounded wait for it."""
        started = time.monotonic()
        if not self._writer.is_free(0.0 if self._stuck else MAX_WAIT_S):
            if not self._stuck:
                say(
                    f"step {version}: {self._root} has not answered for {MAX_WAIT_S:g} s; training "
                    "goes on without checkpoints until it does"
                )
            self._stuck = True
            return False
        self._stuck = False
        waited = time.monotonic() - started
        if waited > LOGGED_WAIT_S and not self._late:
            self._late = True
            say(
                f"step {version}: training waited {waited:.1f} s for the previous checkpoint; "
                f"raise every= (now {self._every}) or use a faster disk"
            )
        return True

    def drain(self) -> bool:
        """Wait, within bounds, for pending checkpoints; return whether all are written."""
        return self._writer.drain()

    # ---- loading -------------------------------------------------------------------------

    def load_newest(self, state: LiveState) -> int | None:
        """Load the newest complete, undamaged checkpoint; return its step, or None without one.

        For the one rank from which the others receive, before any rank writes. Deletes half-written
        checkpoints; logs and renames damaged ones. Raises `UsageError` where the state is built
        differently from the one in the checkpoint.
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
                _restore(state, path, manifest)
                say(f"going on from step {manifest.version}, read from {path}")
                return manifest.version
        if candidates:
            say(f"no checkpoint in {self._root} can be used: training starts from the beginning")
        return None


def _restore(state: LiveState, path: Path, manifest: Manifest) -> None:
    from elastic_driver.worker.checkpoints.format import read_into  # noqa: PLC0415 - see there

    envelope = msgspec.msgpack.decode((path / folders.VALUES).read_bytes(), type=Envelope)
    try:
        incoming = IncomingState(state, envelope)
    except UsageError as error:
        raise UsageError(f"{path} does not fit this script's state: {error}") from error
    read_into(path, manifest, incoming.tensors)
    incoming.take_over(with_random=True)
