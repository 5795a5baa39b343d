"""Durable checkpoints of a state, for when every process that held it is gone.

`state` owns one `Checkpoints` where `checkpoint_dir=` is given. At every `every`-th commit each
rank copies its share of the tensors (the pause). A background thread writes the copy and reports
it; the thread of rank 0 waits for all reports and completes the checkpoint. When a world starts in
which no rank holds a trained state, the rank that the others will receive from loads the newest
complete checkpoint.

An attribute of a state may have the two methods of `Durable`, to add to checkpoints what the other
ranks need not have. They are called on rank 0: at the commit that is written, in the thread that
writes it, and when a checkpoint is loaded.

The last checkpoint of workers that have to leave: the driver names the step and the workers that
write it (`job.preemption`). While no driver lives they agree through the folder of the checkpoints,
which all of them see (`save_together`): each notes the step that it holds. As soon as all members
of the last world have done so, or after a wait, one of them writes the request, and only the first
one counts. Then those that hold the newest step write it together. A worker that was killed is not
waited for long.

Units: bytes, committed steps, seconds.
"""

import atexit
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from elastic_driver import contract
from elastic_driver.errors import ElasticError, UsageError
from elastic_driver.words.orders import SaveRequest, World
from elastic_driver.worker.checkpoints import folder as folders
from elastic_driver.worker.checkpoints.folder import Age, DamagedError, Manifest, Report
from elastic_driver.worker.current import say
from elastic_driver.worker.state_sync import sharing
from elastic_driver.worker.state_sync.contents import TensorSpec
from elastic_driver.worker.state_sync.sharing import Envelope, LiveState
from elastic_driver.worker.state_sync.values import first_line
from rendezvous.own_files import open_plain, shown_folder
from rendezvous.wire import UNREADABLE

Notes: TypeAlias = Mapping[str, Callable[[], bytes]]  # by attribute
KEEP = 3
PATIENCE_S = 600.0  # for the other ranks' reports: as long as a slow disk may take
FIRST_POLL_S = 0.02  # the first pause between two checks for the other ranks' reports
LONGEST_POLL_S = 1.0
GROWTH = 1.5  # each pause is so many times longer than the one before
MAX_WAIT_S = 30.0  # longest that training waits for the previous checkpoint
LOGGED_WAIT_S = 3.0  # a shorter wait is not logged
EXIT_S = 60.0  # a process that ends waits this long for its own share …
EXIT_OTHERS_S = 10.0  # … and this long for the others'
_ALONE = uuid.uuid4().hex  # the run of a process that was not started by elasticrun
# The rank of this process, the workers that write together, and the name of their attempt.
Group = tuple[int, Sequence[str], str]


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
        self.root = root
        self.keep = _at_least_1("keep", KEEP if keep is None else keep)
        self.in_trouble = False  # the last attempt failed, and that was logged
        self.disk = Lock()  # held while a rank writes its share, or completes a checkpoint
        self.history = History()  # used by the writers, with the disk's lock
        self.run = os.environ.get(contract.RUN_ID, "") or _ALONE
        self._world: Group | None = None
        self._staging: folders.Staging | None = None
        self._writers: list[CheckpointWriter] = []  # the newest last; earlier ones wait for reports
        self._late = False  # training has had to wait for the disk, and that was logged
        self._stuck = False  # the disk has not answered within MAX_WAIT_S
        self._told = False  # that others write into the same folder
        self._began = folders.next_order(())

    # ---- taking --------------------------------------------------------------------------

    def enter(self, world: World, rank: int) -> None:
        """Record the world whose members write together from now on, and this process's rank."""
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
        """Copy this rank's share of the last checkpoint, have it written, and return the folder.

        The workers of the request write it together before they leave. Raises `ElasticError` where
        the disk does not answer within the request's time.
        """
        if not self._is_free(request.seconds):
            raise ElasticError(f"{self.root} has not answered for {request.seconds:.0f} s")
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
        live: dict[str, Tensor] = {}
        for path, tensor in (pair for _, own in contents.values() for pair in own):
            name = path
            while name in live:  # keys with dots in them can make two paths look alike
                name += "+"
            live[name] = tensor
        kinds = {name: TensorSpec.of(tensor)[:2] for name, tensor in live.items()}
        layout = (kinds, rank, len(members))
        if self._staging is None:
            atexit.register(self.drain)
        if self._staging is None or self._staging.layout != layout:
            self._staging = folders.Staging(*layout)
        self._staging.copy(live)
        pack = None
        if rank == 0:
            parts = frozenset(state.parts)
            random = state.random.portable()
            envelope = partial(sharing.make_envelope, contents, parts, random)
            pack = partial(_pack, envelope, notes_of(state.values))
        # All members compute the same name, and another world computes another one.
        names = "\n".join([os.environ.get(contract.RUN_ID, ""), *members])
        digest = hashlib.sha256(names.encode()).hexdigest()[:8]
        folder = self.root / folders.folder_name(version, f"{attempt}-{digest}")
        before = [writer for writer in self._writers if writer.is_alive()]
        writer = CheckpointWriter(self, folder, version, self._staging, pack, is_last, before)
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
                    f"step {version}: {self.root} has not answered for {MAX_WAIT_S:g} s; "
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

    def tell_of_others(self, ages: Mapping[str, Age]) -> None:
        """Say once that another run has written into this folder since this one began."""
        others = {a.run for a in ages.values() if a.run != self.run and a.order > self._began}
        if others and not self._told:
            self._told = True
            say(
                f"another job ({min(others)}) writes checkpoints to {self.root} too; a job that is "
                "started again goes on from the one that was written last: give each job a "
                "checkpoint_dir of its own"
            )

    # ---- loading -------------------------------------------------------------------------

    def load_newest(self, state: LiveState) -> int | None:
        """Load the newest complete, undamaged checkpoint; return its step, or None without one.

        Called on the rank from which the others receive, before any rank writes. Deletes
        half-written checkpoints; logs and renames damaged ones. Raises `UsageError` where the state
        is built differently from that of the checkpoint.
        """
        root, self.history.earlier = self.root, ()
        try:
            root.mkdir(parents=True, exist_ok=True)
            for path in folders.sweep(root):
                say(f"{path} was half written when its job ended; deleted")
            candidates = folders.newest_first(root)
            self._began = folders.next_order(folders.ages(root).values())
        except OSError as error:
            say(f"checkpoint_dir {root} cannot be used: {describe(error)}; training goes on")
            return None
        for path in candidates:
            try:
                manifest = folders.verified(path)
            except DamagedError as error:
                say(f"{folders.set_aside(path)} is damaged: {error}; trying the one before")
            except OSError as error:
                say(f"{path} cannot be read: {describe(error)}; trying the one before")
            else:
                self._load(state, path, manifest)
                self.history.earlier = path.name, *manifest.earlier
                say(f"going on from step {manifest.version}, read from {path}")
                return manifest.version
        if candidates:
            say(f"no checkpoint in {root} can be used: training starts from the beginning")
        return None

    def _load(self, state: LiveState, path: Path, manifest: Manifest) -> None:
        """Load a checkpoint whose files are whole; raises `UsageError` where it does not fit."""
        try:
            with open_plain(path / folders.VALUES) as file:
                envelope = sharing.unpack(file.read())
            fill = partial(folders.read_into, path, manifest)
            sharing.take_over(state, envelope, fill, with_random=True, same_script=False)
            restore_notes(state.values, envelope.durable)
        except (UsageError, *UNREADABLE) as error:
            raise UsageError(f"{path} does not fit this script's state: {error}") from error


@dataclass
class History:
    """The checkpoints of a training, as the rank knows them that completes them."""

    earlier: tuple[str, ...] | None = None  # names, the newest first; None: not known yet

    def before(self, root: Path, folder: Path, ages: Mapping[str, Age]) -> tuple[str, ...]:
        """Return the names of the readable ones before `folder`, which is about to be completed.

        A rank that has neither loaded nor completed one takes them from the newest one.
        """
        if self.earlier is None:
            steps = {name: folders.version_of(root / name) for name in ages}
            older = [name for name in ages if steps[name] < folders.version_of(folder)]
            self.earlier = ()
            if older:
                last = max(older, key=lambda name: ages[name].order)
                self.earlier = (last,)
                with suppress(OSError, ElasticError):
                    self.earlier = last, *folders.read_manifest(root / last).earlier
        return tuple(name for name in self.earlier if folders.is_readable(root / name))


@dataclass(eq=False, repr=False)
class CheckpointWriter(Thread):
    """Writes one rank's share of one checkpoint in the background, then completes it on rank 0.

    Ranks learn of each other through the shared folder only: no collective, no message. A failure
    is logged in one line, once until writing works again, and never reaches the training thread.

    Args:
        owner: the checkpoints that this one belongs to.
        folder: the folder of this checkpoint.
        version: committed steps of the state.
        staging: the share; it must not be touched until `written` is set.
        pack: on rank 0, returns the rest of the state; called here because it takes long.
        is_last: the workers are about to leave, and the caller logs a failure.
        before: earlier writers that still wait for reports. They give up when this one completes
            its checkpoint, because ranks write in the order of steps.
    """

    owner: "Checkpoints"
    folder: Path
    version: int
    staging: folders.Staging
    pack: Callable[[], Envelope] | None
    is_last: bool
    before: list["CheckpointWriter"]
    written: Event = field(default_factory=Event)  # this rank's share is on disk, or has failed
    superseded: Event = field(default_factory=Event)  # a later checkpoint is complete
    problem: str = ""  # on rank 0 after a failure: the reason
    has_begun: bool = False  # the folder is this attempt's, and no other of the same name

    def __post_init__(self) -> None:
        super().__init__(name="elastic-checkpoints", daemon=True)

    def run(self) -> None:
        """Write the share and, on rank 0, complete the checkpoint."""
        try:
            with self.owner.disk:
                self._write()
                self.written.set()
                done = self._complete()
            deadline = time.monotonic() + PATIENCE_S
            pause = FIRST_POLL_S
            while not done:
                self.superseded.wait(pause)
                pause = min(pause * GROWTH, LONGEST_POLL_S)
                with self.owner.disk:
                    done = self._complete()
                if not done and time.monotonic() >= deadline:
                    raise DamagedError(
                        f"not every rank has written its part within {PATIENCE_S:g} s"
                    )
        except Exception as error:  # a checkpoint that fails must not end the training
            self._fail(describe(error))
        finally:
            self.written.set()
            self.before = []

    def _write(self) -> None:
        folder, rank = self.folder, self.staging.rank
        # Rank 0 alone creates the folder of all, so that a rank that does not see it fails.
        if rank == 0:
            self.owner.root.mkdir(parents=True, exist_ok=True)
            folders.make_room(folder)
        elif not self.owner.root.is_dir():
            raise DamagedError(
                f"rank {rank} finds no folder there; if rank 0 does, give a checkpoint_dir that "
                "is the same on every host"
            )
        self._await_room()
        shown_folder(folder)
        self.has_begun = True
        report = folders.write_share(folder, self.staging)
        if self.pack is not None:
            values = msgspec.msgpack.encode(self.pack())
            report.files[folders.VALUES] = folders.write_file(folder / folders.VALUES, values)
        folders.write_document(folder / f"part-{rank}.json", report)

    def _await_room(self) -> None:
        """Wait until rank 0 has renamed an earlier run's checkpoint that has this one's name."""
        until = time.monotonic() + MAX_WAIT_S
        while folders.is_complete(self.folder):
            if time.monotonic() >= until:
                raise DamagedError(f"{self.folder.name} is there, and rank 0 did not rename it")
            time.sleep(FIRST_POLL_S)

    def _complete(self) -> bool:
        """On rank 0, complete the checkpoint if all ranks have reported; return whether to stop.

        Raises an error where a rank cannot write its part.
        """
        owner, staging = self.owner, self.staging
        if staging.rank > 0:
            owner.in_trouble = False
            return True
        if self.superseded.is_set():
            return True
        reports = self._reports()
        if reports is None:
            return False
        ages = folders.ages(owner.root)
        earlier = owner.history.before(owner.root, self.folder, ages)
        manifest = Manifest(
            version=self.version,
            world_size=staging.size,
            tensors=staging.kinds,
            chunks=tuple(chunk for report in reports for chunk in report.chunks),
            files={name: mark for report in reports for name, mark in report.files.items()},
            torch=str(torch.__version__),
            order=folders.next_order(ages.values()),
            earlier=earlier,
            run=owner.run,
        )
        manifest.files[folders.INDEX] = folders.write_index(self.folder, manifest)
        folders.complete(self.folder, manifest)
        for writer in self.before:
            writer.superseded.set()
        if owner.in_trouble:
            say(f"checkpoints are written again, to {owner.root}: step {self.version}")
        owner.in_trouble = False
        owner.history.earlier = self.folder.name, *earlier
        with suppress(OSError):  # old ones that stay are no reason to lose this one
            folders.retire(owner.root, self.folder, earlier[owner.keep - 1 :])
        owner.tell_of_others(ages)
        return True

    def _reports(self) -> list[Report] | None:
        """Return the reports of all ranks, None while one is missing."""
        names = set(os.listdir(self.folder))
        reports = []
        ranks = range(self.staging.size)
        for rank in ranks:
            if f"part-{rank}.failed" in names:
                reason = (self.folder / f"part-{rank}.failed").read_text()
                raise DamagedError(f"rank {rank}: {reason}")
        if not names.issuperset(f"part-{rank}.json" for rank in ranks):
            return None
        for rank in ranks:
            reports.append(folders.read_document(self.folder / f"part-{rank}.json", Report))
            if reports[rank].layout != self.staging.digest:
                raise DamagedError(
                    f"rank {rank} has other tensors than rank 0; give the state the same on each"
                )
        return reports

    def _fail(self, reason: str) -> None:
        """Delete what was written; rank 0 logs the reason, others leave it in the folder for it."""
        rank = self.staging.rank
        logged = rank > 0 or not self.is_last
        if rank == 0:
            self.problem = reason
            if self.has_begun:
                folders.remove(self.folder)
        elif self.has_begun:
            with suppress(OSError):
                (self.folder / folders.file_name(rank)).unlink(missing_ok=True)
            with suppress(OSError):
                folders.write_file(self.folder / f"part-{rank}.failed", reason.encode())
                logged = False  # rank 0 reads and logs it
        if logged and not self.owner.in_trouble:
            say(
                f"the checkpoint of step {self.version} in {self.owner.root} is not written: "
                f"{reason}; training goes on, and every later checkpoint is tried again"
            )
        self.owner.in_trouble |= logged


def _at_least_1(name: str, value: int | None) -> int:
    if value is None:
        raise UsageError(
            "checkpoint_dir= needs every=, the number of commits from one checkpoint to the next"
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"checkpoint_dir= needs a whole number from 1 as {name}=, not {value!r}")
    return value


def describe(error: BaseException) -> str:
    """Return one line about a failure: the disk's own message where torch has wrapped one."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    return first_line(error)


# ---- what attributes add to checkpoints only -------------------------------------------


@runtime_checkable
class Durable(Protocol):
    """An attribute of a state that adds something of its own to each checkpoint."""

    def durable(self) -> Callable[[], bytes]:
        """Return a function that returns what to keep; b"": nothing.

        Called on the training thread of rank 0, at the commit that is written: it must not block,
        and talks to nobody. The function is called on the thread that writes, and may.
        """

    def restore_durable(self, data: bytes) -> None:
        """Take back what was kept.

        Called on the rank that loads a checkpoint, after `load_state_dict`, and before the others
        receive the state from it.
        """


def notes_of(values: Mapping[str, Any]) -> Notes:
    """Return the functions of all attributes that add something, by attribute."""
    return {name: each.durable() for name, each in values.items() if isinstance(each, Durable)}


def _pack(envelope: Callable[[], Envelope], notes: Notes) -> Envelope:
    """Return an envelope with what the functions of `notes_of` return, without what is empty."""
    found = {name: note() for name, note in notes.items()}
    durable = {name: data for name, data in found.items() if data}
    return msgspec.structs.replace(envelope(), durable=durable)


def restore_notes(values: Mapping[str, Any], notes: Mapping[str, bytes]) -> None:
    """Give each attribute back what it has added to a checkpoint."""
    for name, data in notes.items():
        if isinstance(each := values.get(name), Durable):
            each.restore_durable(data)


# ---- the last checkpoint, without a driver -----------------------------------------------

ROLL_CALL_S = 8.0  # the longest wait for the other members of the last world
ROLL_CALL_SHARE = 0.4  # of the time that is left; the rest is for writing
POLL_S = 0.05
REQUEST = "request.json"
NOTHING = -1  # the step of a worker whose state is of no use


class Arrival(Struct, frozen=True):
    """A worker that leaves, and the step whose state it holds."""

    worker: str
    step: int


def save_together(
    checkpoints: Checkpoints, state: LiveState, me: Arrival, world: Sequence[str], seconds: float
) -> str:
    """Write the newest step with the others that leave; return a clause that says what is on disk.

    Args:
        checkpoints: of the state.
        state: as it is after `me.step` steps.
        me: this worker.
        world: the members of the last world, by rank.
        seconds: the time that is left.
    """
    until = time.monotonic() + seconds
    patience = min(ROLL_CALL_S, seconds * ROLL_CALL_SHARE)
    try:
        request = _agree(checkpoints.root, me, world, patience, until)
        if me.worker not in request.members:
            return f"others write the state of step {request.step}, if they can"
        rank = request.members.index(me.worker)
        folder = checkpoints.take_last(state, request, rank)
        if rank > 0:
            checkpoints.drain()
            return f"its share of step {request.step} is in {folder}"
        problem = _await_outcome(checkpoints, folder, until)
    except (ElasticError, OSError) as error:
        problem = describe(error)
    if problem:
        return f"the state of step {me.step} is not on disk: {problem}"
    folders.remove_roll_calls(checkpoints.root)
    return f"the state of step {request.step} is in {folder}"


def _agree(
    root: Path, me: Arrival, world: Sequence[str], patience: float, until: float
) -> SaveRequest:
    """Sign in, wait for the others, and return the request that all of them follow."""
    run = os.environ.get(contract.RUN_ID, "")
    digest = hashlib.sha256("\n".join([run, *world]).encode()).hexdigest()[:8]
    folder = root / folders.roll_call_name(digest)
    root.mkdir(parents=True, exist_ok=True)
    shown_folder(folder)
    folders.write_document(folder / f"{me.worker}.arrival", me)
    published = time.monotonic() + patience
    while (now := time.monotonic()) < until:
        with suppress(FileNotFoundError, DamagedError):  # damaged: half written so far
            return folders.read_document(folder / REQUEST, SaveRequest)
        arrived = _arrivals(folder)
        if now >= published or {one.worker for one in arrived}.issuperset(world):
            _publish_request(folder, _request_of(arrived, world, until - now))
        time.sleep(POLL_S)
    raise ElasticError("the workers did not agree in time")


def _arrivals(folder: Path) -> list[Arrival]:
    found = []
    for path in folder.glob("*.arrival"):
        with suppress(DamagedError, FileNotFoundError):
            found.append(folders.read_document(path, Arrival))
    return found


def _request_of(arrived: Sequence[Arrival], world: Sequence[str], seconds: float) -> SaveRequest:
    """Return the request: those that hold the newest step write it, by rank."""
    newest = max(one.step for one in arrived)
    order = {worker: rank for rank, worker in enumerate(world)}
    holders = [one.worker for one in arrived if one.step == newest > NOTHING]
    members = sorted(holders, key=lambda worker: (order.get(worker, len(order)), worker))
    return SaveRequest(0, newest, tuple(members), seconds, "no driver lives")


def _publish_request(folder: Path, request: SaveRequest) -> None:
    """Write the request, unless there is one already."""
    body = msgspec.json.encode(request)
    with suppress(FileExistsError):
        descriptor = os.open(folder / REQUEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def _await_outcome(checkpoints: Checkpoints, folder: Path, until: float) -> str:
    """Wait for the end of the writing; return "" or why the checkpoint is not complete."""
    while (problem := checkpoints.outcome(folder)) is None and time.monotonic() < until:
        time.sleep(POLL_S)
    return "it was not written in time; raise --grace-period" if problem is None else problem
