"""A worker's connection to its driver: READY, and the next world.

The training thread reports READY and waits for the next world, with a connection of its own; the
heartbeat has another one (`heartbeat_thread`). Each request has a deadline and is repeated without
limit while the driver is absent: only a refusal is an error. If the driver is gone for good, the
agent ends this process; if the agent is, the kernel.

Where all workers of a job have to leave, the driver asks for a final checkpoint:
`FinalCheckpointTask` is one worker's part in it.

A new driver (`contract.JOB_DRIVER`) may not have what this worker sent last, so READY is sent
again.

`world` makes one connection in a process, before anything else can block. Times are seconds.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.words import orders as documents
from elastic_driver.words import wire_events as events
from elastic_driver.words.world import Member, StateVersion
from elastic_driver.worker.context import WorkerContext
from elastic_driver.worker.current import say
from elastic_driver.worker.heartbeat.heartbeat_thread import HeartbeatThread, new_documents
from elastic_driver.worker.heartbeat.training_progress import TrainingProgress
from rendezvous.errors import RendezvousError
from rendezvous.wire import Delete, Watch

STOP_S = 1.0  # the longest wait for the driver to delete the leases
SLICE_S = 10.0  # the longest request that waits for a world
CHECKPOINT_POLL_S = 0.05  # between two checks of a final checkpoint that is being written
MAX_REASON_CHARS = 1000
MAX_PROBLEM_CHARS = 1000


class Checkpointed(Protocol):
    """A state that can write a final checkpoint; see `State`, whose module imports this one."""

    def begin_final_checkpoint(self, request: documents.SaveRequest, rank: int) -> Path | None:
        """Begin to write this rank's share; return the folder, None where there is none.

        Raises an exception that says why it cannot be written.
        """

    def final_checkpoint_problem(self, folder: Path) -> str | None:
        """Return "" once the checkpoint is complete, why it failed, or None meanwhile."""


class FinalCheckpointTask:
    """Writes this worker's part of the final checkpoint, and reports the result.

    The driver requests it while this worker waits for a world. The state writes its shares in the
    background; the first of the requested workers reports the result. All calls come from the
    training thread, which trains nothing meanwhile.
    """

    def __init__(self, worker: str, state: Checkpointed) -> None:
        self._worker, self._state = worker, state
        self._asked: tuple[int, tuple[str, ...]] | None = None  # number and members of the request
        self._folder: Path | None = None  # is being written; set where this worker reports
        self._unsent: events.WorkerSaved | None = None
        self._sent: events.WorkerSaved | None = None

    def begin(self, request: documents.SaveRequest) -> None:
        """Carry out the driver's request; a failure becomes the result and is not raised.

        If a new driver repeats a request, its result is reported again, once it is known.
        """
        asked = request.number, request.members
        if asked == self._asked:
            self._unsent = self._unsent or self._sent
            return
        self._asked = asked
        self._folder = None
        self._unsent = None
        self._sent = None
        if self._worker not in request.members:
            return
        rank = request.members.index(self._worker)
        try:
            folder = self._state.begin_final_checkpoint(request, rank)
        except Exception as error:  # of any kind: the others must not wait for this worker
            self._conclude(str(error) or type(error).__name__)
        else:
            if rank == 0:
                self._folder = folder
                if folder is None:
                    self._conclude("")

    def report(self, post: Callable[[events.WorkerSaved], object]) -> bool:
        """Post the result once it is known; return whether it is still pending.

        The result is kept for the next call where `post` raises.
        """
        if self._folder is not None:
            problem = self._state.final_checkpoint_problem(self._folder)
            if problem is not None:
                self._conclude(problem)
        if self._unsent is not None:
            post(self._unsent)
            self._sent, self._unsent = self._unsent, None
        return self._folder is not None

    def _conclude(self, problem: str) -> None:
        number, _ = self._asked or (0, ())
        folder = "" if problem or self._folder is None else str(self._folder)
        problem = problem[:MAX_PROBLEM_CHARS]
        self._unsent = events.WorkerSaved(self._worker, number, folder, problem)
        self._folder = None


class DriverConnection:
    """The connections of one worker to its driver, and its heartbeat thread.

    The training thread makes it and calls its public methods.

    Args:
        born: the worker's context.
        progress: reported with each heartbeat.
        on_notice: called on the heartbeat thread with each new notice.
        before_heartbeat: called on that thread before each heartbeat; returns the seconds until it
            must be called again, or None where any time will do.
        leave_alone: called on that thread when this worker has to leave while no driver lives; gets
            the reason, and the time that the worker has, in seconds.
        on_new_driver: called on that thread when another driver has taken over, and the world that
            `await_world` has returned is of an earlier one.

    Raises `TokenError` where the token file cannot be used.
    """

    def __init__(
        self,
        born: WorkerContext,
        progress: TrainingProgress,
        on_notice: Callable[[documents.Notice], None],
        before_heartbeat: Callable[[], float | None],
        *,
        on_new_driver: Callable[[], None] = lambda: None,
        leave_alone: Callable[[str, float], None] = lambda _reason, _seconds: None,
    ) -> None:
        self.born = born
        self.client = born.client()
        self._heartbeat = HeartbeatThread(
            born,
            self.client.clone(),
            progress,
            on_notice,
            before_heartbeat,
            on_new_driver=on_new_driver,
            leave_alone=leave_alone,
        )
        self.preemption = self._heartbeat.preemption
        self._read = documents.Reader(say).read
        self._seen: Counter[str] = Counter()  # document key → its newest revision
        self._ready: events.WorkerReady | None = None  # the last one
        self._ready_at = 0.0  # when it was made

    def start(self) -> None:
        """Send the first heartbeat and start the thread; wait for a driver that is away.

        Raises `RendezvousError` where the first heartbeat is not answered or is refused.
        """
        # Over the connection that READY will use: by then it has shaken hands.
        self._heartbeat.start(self.client)

    def stop(self, *, over_in: int | None = None, failed: bool = False, unfit: str = "") -> None:
        """End the heartbeat, delete the leases and close the connections, within seconds.

        Args:
            over_in: the round in which the script has ended, 0 if in none; None: it goes on.
            failed: whether an exception of its own has ended it.
            unfit: why it could not take over the state of the others.
        """
        self._heartbeat.stop()
        if over_in is not None:
            marks = self._heartbeat.marks()
            leaves = self._heartbeat.last_leaves()
            unfit = unfit[: events.MAX_UNFIT_CHARS].encode(errors="replace").decode()
            me = self.born.worker
            step = self._heartbeat.last_step()
            ending = events.WorkerEnding(me, over_in, failed, marks, leaves, unfit, step)
            with contextlib.suppress(RendezvousError):
                self.client.post_json(EVENTS_PATH, documents.encode(ending), deadline=STOP_S)
        # A lease that expired would count as a hang, and the process may take long to end.
        with contextlib.suppress(RendezvousError):
            self.client.batch(*map(Delete, self._heartbeat.leases), deadline=STOP_S)
        self.client.close()

    def report_ready(
        self,
        left: int,
        state_version: StateVersion,
        reason: str,
        *,
        bound: bool,
        undone: float = 0.0,
        phase: int = 0,
        told: int = -1,
    ) -> None:
        """Report READY for the next round after round `left`; `bound`: to a device.

        `undone`: seconds since the last commit, if the state goes back to that. `phase`: the number
        of the training function's call. `told`: the rank that the script knows already; −1: none.
        """
        if left:
            self._heartbeat.report_first_step(self.client, left, math.inf)
        reason = reason[:MAX_REASON_CHARS]
        self._ready = events.WorkerReady(
            self.born.worker, left, *state_version, reason, bound, undone, phase, told
        )
        # The driver that gets it is the one we know, or a later one.
        known = self._seen[contract.JOB_DRIVER], self._heartbeat.driver_revision
        self._seen[contract.JOB_DRIVER] = max(known)
        self._ready_at = time.monotonic()
        self._post_ready(self._ready)

    def phase_of_others(self) -> int:
        """Return the furthest training function that members of the newest world are in; 0: none.

        For a worker that is in no world yet.
        """
        found = self.client.batch(Watch({contract.JOB_WORLD: 0}, 0.0), deadline=math.inf)[0]
        for value in new_documents(found, Counter()).values():
            world = self._read(documents.decode_world, contract.JOB_WORLD, value)
            if world is not None:
                return max(member.phase for member in world.members)
        return 0

    def await_world(
        self, left: int, checkpoint: FinalCheckpointTask | None = None
    ) -> tuple[documents.World, Member]:
        """Wait for the first world after round `left` with this worker in it; return both.

        `checkpoint` carries out a request for the final checkpoint that comes meanwhile. A driver
        that takes over meanwhile gets READY again.
        """
        while True:
            keys = [contract.JOB_WORLD, contract.JOB_DRIVER]
            wait = min(SLICE_S, self.born.heartbeat_timeout)
            if checkpoint is not None:
                keys.append(contract.JOB_SAVE)
                if checkpoint.report(self._post):  # it is being written
                    wait = min(wait, CHECKPOINT_POLL_S)
            watch = Watch({key: self._seen[key] for key in keys}, wait)
            found = new_documents(self.client.batch(watch, deadline=math.inf)[0], self._seen)
            self._heartbeat.world_revision = self._seen[contract.JOB_WORLD]
            if checkpoint is not None and contract.JOB_SAVE in found:
                value = found[contract.JOB_SAVE]
                if request := self._read(documents.decode_save, contract.JOB_SAVE, value):
                    checkpoint.begin(request)
            if contract.JOB_WORLD in found:
                value = found[contract.JOB_WORLD]
                world = self._read(documents.decode_world, contract.JOB_WORLD, value)
                if world is not None and world.round > left:
                    me = world.member(self.born.worker)
                    if me is not None:
                        self._heartbeat.begin()
                        return world, me
            if contract.JOB_DRIVER in found and self._ready is not None:
                self._post_ready(self._ready)

    def _post_ready(self, ready: events.WorkerReady) -> None:
        """Post READY; the driver may be away, and `undone` counts until it gets the event."""

        def encode() -> bytes:
            waited = time.monotonic() - self._ready_at if ready.undone else 0.0
            return documents.encode(replace(ready, undone=ready.undone + waited))

        self.client.post_json(EVENTS_PATH, encode, deadline=math.inf)

    def _post(self, event: Struct) -> None:
        self.client.post_json(EVENTS_PATH, documents.encode(event), deadline=math.inf)
