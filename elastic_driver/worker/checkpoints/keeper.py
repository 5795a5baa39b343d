"""Durable checkpoints of a state, for when every process that held it is gone.

`state` owns one `Checkpoints` where `checkpoint_dir=` is given. At every `every`-th commit each
rank copies its share of the tensors (the pause), and a background thread of `writer` writes it.
When a world starts in which no rank holds a trained state, the rank that the others will receive
from loads the newest complete checkpoint. Units: bytes, committed steps, seconds.
"""

import atexit
import hashlib
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from elastic_driver import contract
from elastic_driver.core.documents import SaveRequest, World
from elastic_driver.errors import ElasticError, UsageError
from elastic_driver.worker.checkpoints import folder as folders
from elastic_driver.worker.checkpoints.folder import DamagedError
from elastic_driver.worker.checkpoints.tensors import Staging, read_into
from elastic_driver.worker.checkpoints.writer import CheckpointRoot, CheckpointWriter, describe
from elastic_driver.worker.state_sync import sharing
from elastic_driver.worker.state_sync.sharing import LiveState
from elastic_driver.worker.state_sync.values import TensorSpec, copied
from elastic_driver.worker.worker_log import say

KEEP = 3
MAX_WAIT_S = 30.0  # longest that training waits for the previous checkpoint
LOGGED_WAIT_S = 3.0  # a shorter wait is not logged
EXIT_S = 60.0  # a process that ends waits this long for its own share …
EXIT_OTHERS_S = 10.0  # … and this long for the others'
Group = tuple[int, Sequence[str], str]
"""The rank of this process, the workers that write together, and their name of the attempt."""


class Checkpoints:
    """The checkpoints of one state, in a folder of their own that every host sees.

    Args:
        root: the folder of all checkpoints.
        every: committed steps from one checkpoint to the next.
        keep: how many complete ones stay.

    Raises `UsageError` unless `every` and `keep` are whole numbers of at least 1.
    """

    def __init__(self, root: Path, every: int | None, keep: int | None = None) -> None:
        self._every = _at_least_1("every", every)
        self._root = CheckpointRoot(root, _at_least_1("keep", KEEP if keep is None else keep))
        self._world: Group | None = None
        self._staging: Staging | None = None
        self._writers: list[CheckpointWriter] = []  # the newest last; earlier ones wait for reports
        self._late = False  # training had to wait for the disk, and that was logged
        self._stuck = False  # the disk has not answered within MAX_WAIT_S

    # ---- taking --------------------------------------------------------------------------

    def entered(self, world: World, rank: int) -> None:
        """From now on the members of `world` write together, this process as `rank`."""
        self._world = rank, [member.worker for member in world.members], f"{world.round}"

    def take_if_due(self, state: LiveState, version: int) -> None:
        """At every `every`-th commit, copy this rank's share of the state and have it written.

        Every rank of the world must call it after the same steps. Returns as soon as the share is
        copied. Only while the previous checkpoint is being written, training waits: otherwise
        ranks with slower disks would skip other checkpoints than ranks with faster ones.
        """
        if version % self._every == 0 and self._world is not None and self._is_ready(version):
            self._take(state, version, self._world)

    def take_last(self, state: LiveState, request: SaveRequest, rank: int) -> Path:
        """Do the same for workers that are about to leave and write together; return the folder.

        Raises `ElasticError` where the disk does not answer within the request's time.
        """
        if not self._is_free(request.seconds):
            raise ElasticError(f"{self._root.path} has not answered for {request.seconds:.0f} s")
        group = rank, request.members, f"last{request.number}"
        return self._take(state, request.step, group, is_last=True)

    def outcome(self, folder: Path) -> str | None:
        """Return, on rank 0, "" for a complete checkpoint, why it failed, or None while pending."""
        for writer in self._writers:
            if writer.folder == folder and writer.is_alive():
                return None
            if writer.folder == folder and writer.problem:
                return writer.problem
        return "" if folders.is_complete(folder) else "it was given up for another one"

    def _take(self, state: LiveState, version: int, group: Group, is_last: bool = False) -> Path:
        (rank, members, attempt), contents = group, sharing.split(state)
        tensors: dict[str, Tensor] = {}
        for path, tensor in (pair for _, own in contents.values() for pair in own):
            name = path
            while name in tensors:  # keys with dots in them can make two paths look alike
                name += "+"
            tensors[name] = tensor
        kinds = {name: TensorSpec.of(tensor)[:2] for name, tensor in tensors.items()}
        layout = (kinds, rank, len(members))
        if self._staging is None:
            atexit.register(self.drain)
        if self._staging is None or self._staging.layout != layout:
            self._staging = Staging(*layout)
        self._staging.copy(tensors)
        pack = None
        if rank == 0:
            held = {name: (copied(document), own) for name, (document, own) in contents.items()}
            parts, random = frozenset(state.parts), state.random.portable()
            pack = partial(sharing.make_envelope, held, parts, random)
        # All members compute the same name, and no other world does.
        names = "\n".join([os.environ.get(contract.RUN_ID, ""), *members])
        digest = hashlib.sha256(names.encode()).hexdigest()[:8]
        folder = self._root.path / folders.folder_name(version, f"{attempt}-{digest}")
        before = [writer for writer in self._writers if writer.is_alive()]
        writer = CheckpointWriter(self._root, folder, version, self._staging, pack, is_last, before)
        self._writers = [*before, writer]
        writer.start()
        return folder

    def _is_free(self, within: float) -> bool:
        """Return whether the last share is written, after waiting up to `within` seconds for it."""
        # In a forked child there is no thread, and nothing to wait for.
        alive = bool(self._writers) and self._writers[-1].is_alive()
        return not alive or self._writers[-1].written.wait(within)

    def _is_ready(self, version: int) -> bool:
        """Return whether the previous checkpoint is written, after a bounded wait for it."""
        started = time.monotonic()
        if not self._is_free(0.0 if self._stuck else MAX_WAIT_S):
            if not self._stuck:
                say(
                    f"step {version}: {self._root.path} has not answered for {MAX_WAIT_S:g} s; "
                    "training goes on without checkpoints until it does"
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
        """Wait, within bounds, for pending checkpoints; return whether all are written.

        Called when the process ends, so that the checkpoint of its last step is not lost.
        """
        if not self._is_free(EXIT_S):
            return False
        deadline = time.monotonic() + EXIT_OTHERS_S
        for writer in self._writers:
            writer.join(max(0.0, deadline - time.monotonic()))
        return not any(writer.is_alive() for writer in self._writers)

    # ---- loading -------------------------------------------------------------------------

    def load_newest(self, state: LiveState) -> int | None:
        """Load the newest complete, undamaged checkpoint; return its step, or None without one.

        For the one rank from which the others receive, before any rank writes. Deletes half-written
        checkpoints; logs and renames damaged ones. Raises `UsageError` where the state is built
        differently from the one in the checkpoint.
        """
        root = self._root.path
        try:
            root.mkdir(parents=True, exist_ok=True)
            for path in folders.sweep(root):
                say(f"{path} was half written when its job ended; deleted")
            candidates = folders.checkpoints(root)
        except OSError as error:
            say(f"checkpoint_dir {root} cannot be used: {describe(error)}; training goes on")
            return None
        for path in candidates:
            try:
                manifest = folders.verified(path)
            except DamagedError as error:
                say(f"{folders.set_aside(path)} is damaged: {error}; trying the one before")
                continue
            except OSError as error:
                say(f"{path} cannot be read: {describe(error)}; trying the one before")
                continue
            values, fill = (path / folders.VALUES).read_bytes(), partial(read_into, path, manifest)
            try:
                sharing.take_over(state, sharing.unpack(values), fill, with_random=True)
            except UsageError as error:
                raise UsageError(f"{path} does not fit this script's state: {error}") from error
            say(f"going on from step {manifest.version}, read from {path}")
            return manifest.version
        if candidates:
            say(f"no checkpoint in {root} can be used: training starts from the beginning")
        return None


def _at_least_1(name: str, value: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"checkpoint_dir= needs a whole number from 1 as {name}=, not {value!r}")
    return value
