"""A worker's connection to its driver: the heartbeat thread, READY, and the next world.

The heartbeat thread renews the leases, reports progress and receives notices. One request does all
three and waits for a notice, so there is no polling and a notice arrives within the delay of a
message. The thread never touches torch and decides nothing: it calls `on_notice` for every new
notice. While the driver does not answer, it logs one line and keeps trying; training goes on.

The training thread reports READY and waits for the next world, with connections of its own. Each
request has a deadline and is repeated without limit while the driver is absent: only a refusal is
an error. If the driver is gone for good, the agent ends this process; if the agent is, the kernel.

Both threads watch the term of the driver (`contract.JOB_DRIVER`). A new driver may not have what
this worker sent last, so READY is sent again, and it lacks the keys of a meeting, so that ends.

`world` makes one connection in a process, before anything else can block. A forked child (a
DataLoader worker) has no heartbeat thread. Times are seconds.
"""

import contextlib
import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from elastic_driver import contract
from elastic_driver.core import documents, events
from elastic_driver.core.members import Member
from elastic_driver.core.progress import Progress
from elastic_driver.core.state_version import StateVersion
from elastic_driver.worker.context import WorkerContext
from elastic_driver.worker.heartbeat.preemption import PreemptionWatch
from elastic_driver.worker.heartbeat.progress import TrainingProgress
from elastic_driver.worker.heartbeat.stall_watch import StallWatch
from elastic_driver.worker.worker_log import say
from rendezvous.client import RendezvousClient
from rendezvous.errors import AbortedError, RendezvousError, RequestError, WokenError
from rendezvous.wire import EVENTS_PATH, Delete, Entries, Result, Set, Watch, expect

HEARTBEATS_PER_S = 256.0  # of all workers of a world that trains
LONGEST_WAIT_S = 2.0  # between two heartbeats: the progress the driver reads is never older
SHORTEST_WAIT_S = 0.25
GROWTH = 1.5  # of the wait while no step is made
STOP_S = 1.0  # the longest wait for the thread to end, and for the driver to delete the leases
RECENT_STEPS = 11  # whose median is the current step time
RETRY_S = 0.5  # after a refused or unanswered heartbeat
SILENT_S = 3.0  # for an answer while the driver is silent, so that other duties do not wait long
LEAVING_S = 1.0  # the longest wait for the driver to accept that this worker leaves
ABSENCE_SHARE = 0.9  # of --driver-timeout: a driver that was silent for so long is not expected
SLICE_S = 10.0  # the longest request that waits for a world
CHECKPOINT_POLL_S = 0.05  # between two checks of a final checkpoint that is being written
MAX_REASON_CHARS = 1000


class FinalCheckpointTask:
    """One worker's part in the final checkpoint of a job whose workers all have to leave.

    The driver requests it while this worker waits for a world. The state writes its shares in the
    background; the first of the requested workers reports the result. All calls come from the
    training thread, which trains nothing meanwhile. `state`: a `State`, whose module imports this.
    """

    def __init__(self, worker: str, state: Any) -> None:
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
        self._asked, self._folder, self._unsent, self._sent = asked, None, None, None
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
        problem = problem[:MAX_REASON_CHARS]
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
        waits = born.driver_timeout > 0
        self.preemption = PreemptionWatch(
            born.worker, born.leave_notice, self._leave_alone_if_due if waits else None
        )
        self._progress = progress
        progress.on_first_step = self.preemption.wake  # it is reported at once
        self._leases = contract.worker_lease(born.worker), contract.worker_half_lease(born.worker)
        self._read = documents.Reader(say).read
        self._seen: Counter[str] = Counter()  # document key → its newest revision
        self._ready: events.WorkerReady | None = None  # the last one
        self._ready_at = 0.0  # when it was made
        # All fields below belong to the heartbeat thread.
        self._heart_client = self.client.clone()
        self._heart_seen: Counter[str] = Counter()  # as `_seen`
        self._term = 0  # of the driver
        self._on_notice, self._before_heartbeat = on_notice, before_heartbeat
        self._on_new_driver, self._leave_alone = on_new_driver, leave_alone
        self._stall_watch = StallWatch(born.worker, progress, born.hang_timeout)
        self._pending: list[Struct] = []  # events to post: the driver may be away
        self._idle = born.heartbeat_timeout / 3  # a lease survives two lost requests
        self._reported = (0, 0, 0)  # round, step and reported steps of the progress sent last
        self._pause = LONGEST_WAIT_S  # between heartbeats while steps are made
        self._first_step_of = 0  # the round whose first step has been posted
        self._silent = False  # the driver does not answer
        self._thread = threading.Thread(target=self._run, name="elastic-heartbeat", daemon=True)

    # ---- on the training thread ----------------------------------------------------------

    def start(self) -> None:
        """Send the first heartbeat and start the thread; wait for a driver that is away.

        Raises `RendezvousError` where the first heartbeat is not answered or is refused.
        """
        # Over the connection that READY will use: by then it has shaken hands.
        patience = max(self.client.timeout, self.born.driver_timeout)
        self._send(self.client, wait=0.0, patience=patience)
        self._thread.start()

    def stop(self, *, over_in: int | None = None, failed: bool = False) -> None:
        """End the heartbeat, delete the leases and close the connections, within seconds.

        Args:
            over_in: the round in which the script has ended, 0 if in none; None: it goes on.
            failed: whether an exception of its own has ended it.
        """
        self._heart_client.abort()
        self.preemption.wake()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self.preemption.close()
        if over_in is not None:
            ending = documents.encode(events.WorkerEnding(self.born.worker, over_in, failed))
            with contextlib.suppress(RendezvousError):
                self.client.post_json(EVENTS_PATH, ending, deadline=STOP_S)
        # A lease that expired would count as a hang, and the process may take long to end.
        with contextlib.suppress(RendezvousError):
            self.client.batch(*map(Delete, self._leases), deadline=STOP_S)
        self.client.close()

    def report_ready(
        self,
        left: int,
        state_version: StateVersion,
        reason: str,
        *,
        bound: bool,
        undone: float = 0.0,
    ) -> None:
        """Report READY for the next round after round `left`; `bound`: to a device.

        `undone`: seconds since the last commit, if the state goes back to that.
        """
        if left:
            self._report_first_step(self.client, left, math.inf)
        reason = reason[:MAX_REASON_CHARS]
        self._ready = events.WorkerReady(
            self.born.worker, left, *state_version, reason, bound, undone
        )
        # The driver that gets it is the one we know, or a later one.
        known = self._seen[contract.JOB_DRIVER], self._heart_seen[contract.JOB_DRIVER]
        self._seen[contract.JOB_DRIVER] = max(known)
        self._ready_at = time.monotonic()
        self._post_ready(self._ready)

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
            found = _new_documents(self.client.batch(watch, deadline=math.inf)[0], self._seen)
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

    # ---- on the heartbeat thread ---------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                self._heartbeat()
            except AbortedError:
                return
            except WokenError:
                continue  # by a signal, by the first step of a round, or to stop
            except RendezvousError as error:
                if not self._silent:
                    say(f"the driver does not answer; training goes on meanwhile ({error})")
                self._silent = True
                self.preemption.wait(RETRY_S)
            else:
                if self._silent:
                    say("the driver answers again")
                self._silent = False

    def _heartbeat(self) -> None:
        """Do what is due, and send one heartbeat that waits until something is due again."""
        due = [self.preemption.check(self._report_leaving), self._before_heartbeat()]
        if event := self._stall_watch.check(time.monotonic()):
            self._pending.append(event)
        patience, wake = self._patience(), self.preemption.fileno()
        while self._pending:
            body = documents.encode(self._pending[0])
            try:
                self._heart_client.post_json(EVENTS_PATH, body, patience, wake)
            except RequestError as error:
                if error.status >= 500:
                    raise
                # One that is refused for good would hold up all heartbeats.
                say(f"the driver did not take {type(self._pending[0]).__name__}: {error}")
            del self._pending[0]
        due += [self._stall_watch.due(time.monotonic()), self._next_wait()]
        if round_id := self._progress.round:
            self._report_first_step(self._heart_client, round_id, patience, wake)
        wait = min(wait for wait in due if wait is not None)
        self._send(self._heart_client, wait, patience)

    def _patience(self) -> float:
        """Return the seconds to wait for an answer."""
        return min(SILENT_S, self.client.timeout) if self._silent else self.client.timeout

    def _send(self, client: RendezvousClient, wait: float, patience: float) -> None:
        """Send one heartbeat, and wait up to `wait` seconds for new documents.

        Raises `RendezvousError` where it is not answered within `patience` seconds more.
        """
        progress = self._progress
        watched = [contract.JOB_NOTICE, contract.JOB_STACKS, contract.JOB_DRIVER]
        if progress.wants_allocations:
            watched.append(contract.JOB_ALLOCATION)
        result = client.batch(
            Set(self._leases[0], b"", self.born.heartbeat_timeout),
            Set(self._leases[1], b"", self.born.heartbeat_timeout / 2),
            *self._report(),
            Watch({key: self._heart_seen[key] for key in watched}, wait),
            deadline=wait + patience,
            wake=self.preemption.fileno(),
        )[-1]
        for key, value in _new_documents(result, self._heart_seen).items():
            if key == contract.JOB_DRIVER:
                if (driver := self._read(documents.decode_term, key, value)) is not None:
                    self._meet_driver(driver)
            elif key == contract.JOB_NOTICE:
                if (notice := self._read(documents.decode_notice, key, value)) is not None:
                    self._on_notice(notice)
            elif key == contract.JOB_STACKS:
                if (number := self._read(documents.decode_number, key, value)) is not None:
                    self._pending.append(self._stall_watch.stack(number))
            elif (shares := self._read(documents.decode_allocation, key, value)) is not None:
                progress.allocation = shares

    def _meet_driver(self, found: documents.DriverTerm) -> None:
        """Note the driver's term; say so if the newest world is of an earlier driver.

        Rank 0 tells a new driver again that this round has had a step: its journal may lack that.
        """
        before, self._term = self._term, max(self._term, found.term)
        if 0 < before < found.term and self._progress.rank == 0:
            self._first_step_of = 0
        # A driver writes its term before anything else.
        of_earlier = self._seen[contract.JOB_WORLD] < self._heart_seen[contract.JOB_DRIVER]
        if 0 < before < found.term and of_earlier:
            self._on_new_driver()

    def _report(self) -> tuple[Set, ...]:
        """Return the write of this worker's progress; none before the first step of a round."""
        progress = self._progress
        round_id, version, step_time = progress.round, progress.version, progress.step_time
        done, last = progress.reported_steps, progress.done
        if round_id == 0 or done == 0:
            return ()
        self._reported = (round_id, version, done)
        times = tuple(progress.step_times)[-RECENT_STEPS:]
        usual = statistics.median(times) if times else step_time
        samples, links = progress.samples.collect(usual), progress.links()
        found = Progress(
            round_id,
            version,
            step_time or usual,
            samples,
            progress.division,
            links,
            at=last.at,
            steps_done=last.steps,
            samples_done=last.samples,
            numbers=progress.numbers,
            total=progress.total,
            times=progress.times,
            reported=None if progress.steps else progress.reported_step,
            micro_batches=progress.micro_batches,
            batch=progress.batch,
            parameters=progress.parameters,
            gradients=progress.gradients,
        )
        return (Set(contract.worker_progress(self.born.worker), documents.encode(found)),)

    def _next_wait(self) -> float:
        """Return the seconds until the next heartbeat.

        While steps are made it follows from the size of the world; without a new step it grows.
        """
        progress = self._progress
        if progress.round == 0:
            return self._idle
        done = progress.reported_steps
        stepped = done > 0 and self._reported != (progress.round, progress.version, done)
        self._pause = min(next_pause(self._pause, progress.size, stepped=stepped), self._idle)
        return self._pause

    def _report_leaving(self, event: events.WorkerLeaving) -> None:
        self._heart_client.post_json(EVENTS_PATH, documents.encode(event), deadline=LEAVING_S)

    def _leave_alone_if_due(self, reason: str, left: float) -> bool:
        """Leave without a driver if the wait for it is over, or half of the notice is.

        Return whether this worker leaves.
        """
        silent = time.monotonic() - (self._heart_client.silent_since or time.monotonic())
        # The agents begin to wait a little earlier or later than this worker.
        over = silent > self.born.driver_timeout * ABSENCE_SHARE - RETRY_S
        if not over and left > self.born.leave_notice / 2:
            return False
        self._leave_alone(reason, left)
        return True

    # ---- on both -------------------------------------------------------------------------

    def _report_first_step(
        self, client: RendezvousClient, round_id: int, deadline: float, wake: int | None = None
    ) -> None:
        """Post `WorkerStepped` now if this round had a step that was not reported yet.

        The training thread does so before it reports that it has left the round.
        """
        progress = self._progress
        if self._first_step_of != round_id == progress.steps_of and progress.steps > 0:
            first, synced_at = progress.version - progress.steps + 1, progress.synced_at

            def encode() -> bytes:
                seconds = time.monotonic() - synced_at
                event = events.WorkerStepped(self.born.worker, round_id, first, seconds)
                return documents.encode(event)

            client.post_json(EVENTS_PATH, encode, deadline, wake)
            self._first_step_of = round_id


def _new_documents(result: Result, seen: Counter[str]) -> dict[str, bytes]:
    """Return the values that are newer than the revisions `seen` so far, and record these."""
    entries = expect(result, Entries).entries
    new = {key: entry.value for key, entry in entries.items() if entry.revision > seen[key]}
    for key in new:
        seen[key] = entries[key].revision
    return new


def next_pause(before: float, size: int, *, stepped: bool) -> float:
    """Return the seconds between two heartbeats of a worker that trains in a world of `size`.

    If the worker has `stepped` since the last heartbeat, the pause is longer in a larger world, to
    bound the driver's load. Otherwise it grows from `before`, the last pause.
    """
    if stepped:
        return min(max(size / HEARTBEATS_PER_S, SHORTEST_WAIT_S), LONGEST_WAIT_S)
    return before * GROWTH
