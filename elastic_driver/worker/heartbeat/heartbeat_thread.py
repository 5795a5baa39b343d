"""The heartbeat thread of a worker: it renews the leases, reports progress and receives notices.

One request does all three and waits for a notice, so there is no polling and a notice arrives
within the delay of a message. The thread never touches torch and decides nothing: it calls
`on_notice` for every new notice. While the driver does not answer, it logs one line and keeps
trying; training goes on.

It watches the term of the driver (`contract.JOB_DRIVER`): a new driver lacks the keys of a meeting,
so that ends. A forked child (a DataLoader worker) has no heartbeat thread. Times are seconds.
"""

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import starmap

from msgspec import Struct

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.words import orders as documents
from elastic_driver.words import wire_events as events
from elastic_driver.words.progress import BUFFERS_OF, MAX_DIGEST_CHARS, Progress, StateMark
from elastic_driver.worker.context import WorkerContext
from elastic_driver.worker.current import say
from elastic_driver.worker.heartbeat.training_progress import (
    LONGEST_WAIT_S,
    TrainingProgress,
    in_short,
    new_leaf_mark,
    usual_pause,
)
from elastic_driver.worker.heartbeat.watches import PreemptionWatch, StallWatch
from rendezvous.client import RendezvousClient
from rendezvous.errors import AbortedError, RendezvousError, RequestError, WokenError
from rendezvous.wire import Entries, Result, Set, Watch, expect

GROWTH = 1.5  # of the wait while no step is made
STOP_S = 1.0  # the longest wait for the thread to end
RECENT_STEPS = 11  # whose median is the current step time
RETRY_S = 0.5  # after a refused or unanswered heartbeat
SILENT_S = 3.0  # for an answer while the driver is silent, so that other duties do not wait long
LEAVING_S = 1.0  # the longest wait for the driver to accept that this worker leaves
WATCHED = (contract.JOB_NOTICE, contract.JOB_STACKS, contract.JOB_DRIVER, contract.JOB_STATE)
ABSENCE_SHARE = 0.9  # of --driver-timeout: a driver that was silent for so long is not expected


class HeartbeatThread:
    """The heartbeat thread of one worker, with a connection of its own.

    `DriverConnection` makes it and passes the arguments on. The training thread calls the public
    methods; the fields below `_client` belong to the heartbeat thread.
    """

    def __init__(
        self,
        born: WorkerContext,
        client: RendezvousClient,
        progress: TrainingProgress,
        on_notice: Callable[[documents.Notice], None],
        before_heartbeat: Callable[[], float | None],
        *,
        on_new_driver: Callable[[], None],
        leave_alone: Callable[[str, float], None],
    ) -> None:
        self._born, self._progress = born, progress
        waits = born.driver_timeout > 0
        self.preemption = PreemptionWatch(
            born.worker, born.leave_notice, self._leave_alone_if_due if waits else None
        )
        progress.on_first_step = self.preemption.wake  # it is reported at once
        progress.on_first_mark = progress.on_no_commit = self.preemption.wake  # these, too
        self.leases = contract.worker_lease(born.worker), contract.worker_half_lease(born.worker)
        self.world_revision = 0  # of the newest world that the training thread has got
        self._begun = False  # the thread sends heartbeats
        self._client = client
        self._seen: Counter[str] = Counter()  # document key → its newest revision
        self._read = documents.Reader(say).read
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
        self._is_asked = False  # so that even a worker without a step says where it is
        self._thread = threading.Thread(target=self._run, name="elastic-heartbeat", daemon=True)

    # ---- on the training thread ----------------------------------------------------------

    @property
    def driver_revision(self) -> int:
        """The revision of the newest driver's term that the heartbeat has seen."""
        return self._seen[contract.JOB_DRIVER]

    def start(self, client: RendezvousClient) -> None:
        """Send the first heartbeat with `client`, and start the thread.

        The thread connects with `begin`, or when its heartbeat is due: a handshake beside READY
        would delay it.
        """
        patience = max(client.timeout, self._born.driver_timeout)
        self._send(client, wait=0.0, patience=patience)
        self._thread.start()

    def begin(self) -> None:
        """Send heartbeats from now on: this worker has a world, and notices may concern it."""
        if not self._begun:
            self.preemption.wake()

    def stop(self) -> None:
        """End the heartbeat within `STOP_S`; the leases stay."""
        self._client.abort()
        self.preemption.wake()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self.preemption.close()

    # ---- on the heartbeat thread ---------------------------------------------------------

    def _run(self) -> None:
        self.preemption.wait(self._idle)
        self._begun = True
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
        patience = self._patience()
        wake = self.preemption.fileno()
        while self._pending:
            body = documents.encode(self._pending[0])
            try:
                self._client.post_json(EVENTS_PATH, body, patience, wake)
            except RequestError as error:
                if error.status >= 500:
                    raise
                # One that is refused for good would hold up all heartbeats.
                say(f"the driver did not take {type(self._pending[0]).__name__}: {error}")
            del self._pending[0]
        due += [self._stall_watch.due(time.monotonic()), self._next_wait()]
        if round_id := self._progress.round:
            self.report_first_step(self._client, round_id, patience, wake)
        wait = min(wait for wait in due if wait is not None)
        self._send(self._client, wait, patience)

    def _patience(self) -> float:
        """Return the seconds to wait for an answer."""
        return min(SILENT_S, self._client.timeout) if self._silent else self._client.timeout

    def _send(self, client: RendezvousClient, wait: float, patience: float) -> None:
        """Send one heartbeat, and wait up to `wait` seconds for new documents.

        Raises `RendezvousError` where it is not answered within `patience` seconds more.
        """
        progress = self._progress
        watched = WATCHED + ((contract.JOB_ALLOCATION,) if progress.wants_allocations else ())
        result = client.batch(
            Set(self.leases[0], b"", self._born.heartbeat_timeout),
            Set(self.leases[1], b"", self._born.heartbeat_timeout / 2),
            *self._report(),
            Watch({key: self._seen[key] for key in watched}, wait),
            deadline=wait + patience,
            wake=self.preemption.fileno(),
        )[-1]
        for key, value in new_documents(result, self._seen).items():
            if key == contract.JOB_DRIVER:
                if (driver := self._read(documents.decode_term, key, value)) is not None:
                    self._meet_driver(driver)
            elif key == contract.JOB_NOTICE:
                if (notice := self._read(documents.decode_notice, key, value)) is not None:
                    self._is_asked = True  # perhaps: how far it is
                    self._on_notice(notice)
            elif key == contract.JOB_STACKS:
                if (number := self._read(documents.decode_number, key, value)) is not None:
                    self._pending.append(self._stall_watch.stack(number))
            elif key == contract.JOB_STATE:
                if (question := self._read(documents.decode_question, key, value)) is not None:
                    self._describe_state(question)
            elif (shares := self._read(documents.decode_allocation, key, value)) is not None:
                progress.allocation = shares

    def _describe_state(self, asked: documents.StateQuestion) -> None:
        """Answer a question about this worker's state, if it is asked."""
        progress, worker = self._progress, self._born.worker
        if worker not in asked.workers or asked.round != progress.round:
            return
        try:
            progress.on_difference()
            found = progress.leaves(asked.step)
        except Exception as error:  # of any kind: heartbeats must go on
            say(f"could not describe the state after step {asked.step}: {error!r}")
            found = None
        leaves = tuple(starmap(new_leaf_mark, (found or ())[: events.MAX_LEAVES]))
        answer = events.StateDescribed(
            worker, asked.round, asked.step, leaves, missing=found is None
        )
        self._pending.append(answer)

    def _meet_driver(self, found: documents.DriverTerm) -> None:
        """Note the driver's term; say so if the newest world is of an earlier driver.

        Rank 0 tells a new driver again that this round has had a step: its journal may lack that.
        """
        before = self._term
        self._term = max(self._term, found.term)
        if 0 < before < found.term and self._progress.rank == 0:
            self._first_step_of = 0
        # A driver writes its term before anything else.
        of_earlier = self.world_revision < self._seen[contract.JOB_DRIVER]
        if 0 < before < found.term and of_earlier:
            self._on_new_driver()

    def _report(self) -> tuple[Set, ...]:
        """Return the write of this worker's progress; none before the first step of a round.

        A driver that asks gets it all the same.
        A step of an optimizer counts here, so that a worker that never commits is seen.
        """
        progress = self._progress
        round_id = progress.round
        version = progress.version
        step_time = progress.step_time
        done = _steps_of(progress)
        last = progress.done
        if round_id == 0 or (done == 0 and not self._is_asked):
            return ()
        self._is_asked = False
        self._reported = (round_id, version, done)
        times = tuple(progress.step_times)[-RECENT_STEPS:]
        usual = statistics.median(times) if times else step_time
        samples = progress.samples.collect(usual)
        links = progress.links()
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
            reported=_steps_without_commit(progress),
            micro_batches=progress.micro_batches,
            batch=progress.batch,
            parameters=progress.parameters,
            gradients=progress.gradients,
            marks=self.marks(),
            commits=progress.steps,
            optimizer_steps=progress.optimizer_steps,
            checks=progress.checks,
            boundary_time=progress.boundary_time(),
            since=progress.since_boundary(),
        )
        return (Set(contract.worker_progress(self._born.worker), documents.encode(found)),)

    def _next_wait(self) -> float:
        """Return the seconds until the next heartbeat.

        While steps are made it follows from the size of the world; without a new step it grows.
        """
        progress = self._progress
        if progress.round == 0:
            return self._idle
        done = _steps_of(progress)
        stepped = done > 0 and self._reported != (progress.round, progress.version, done)
        self._pause = min(next_pause(self._pause, progress.size, stepped=stepped), self._idle)
        return self._pause

    def _report_leaving(self, event: events.WorkerLeaving) -> None:
        self._client.post_json(EVENTS_PATH, documents.encode(event), deadline=LEAVING_S)

    def _leave_alone_if_due(self, reason: str, left: float) -> bool:
        """Leave without a driver if the wait for it is over, or half of the notice is.

        Return whether this worker leaves.
        """
        silent = time.monotonic() - (self._client.silent_since or time.monotonic())
        # The agents begin to wait a little earlier or later than this worker.
        over = silent > self._born.driver_timeout * ABSENCE_SHARE - RETRY_S
        if not over and left > self._born.leave_notice / 2:
            return False
        self._leave_alone(reason, left)
        return True

    # ---- on both -------------------------------------------------------------------------

    def marks(self) -> tuple[StateMark, ...]:
        """Return the marks of the state in this round, or in the one left last."""
        buffers = self._progress.buffers
        known = tuple(self._progress.marks)
        return tuple(
            StateMark(step, digest[:MAX_DIGEST_CHARS], buffers.get(step, ""))
            for step, digest in known
        )

    def last_step(self) -> int:
        """Return the steps of the job that this worker committed last, 0 if none in its round."""
        progress = self._progress
        return max(progress.version, 0) if progress.steps else 0

    def last_leaves(self) -> tuple[events.LeafMark, ...]:
        """Return the leaves of the newest mark in short, for the end of the script."""
        progress = self._progress
        found = progress.leaves(progress.marks[-1][0]) if progress.marks else None
        alike = [leaf for leaf in found or () if not leaf[0].startswith(BUFFERS_OF)]
        return tuple(starmap(new_leaf_mark, in_short(alike, events.MAX_LAST_LEAVES)))

    def report_first_step(
        self, client: RendezvousClient, round_id: int, deadline: float, wake: int | None = None
    ) -> None:
        """Post `WorkerStepped` now if this round had a step that was not reported yet.

        Both threads call it: the training thread before it reports that it has left the round.
        """
        progress = self._progress
        if self._first_step_of != round_id == progress.steps_of and progress.steps > 0:
            first, synced_at = progress.version - progress.steps + 1, progress.synced_at

            def encode() -> bytes:
                seconds = time.monotonic() - synced_at
                event = events.WorkerStepped(self._born.worker, round_id, first, seconds)
                return documents.encode(event)

            client.post_json(EVENTS_PATH, encode, deadline, wake)
            self._first_step_of = round_id


def new_documents(result: Result, seen: Counter[str]) -> dict[str, bytes]:
    """Return the values that are newer than the revisions `seen` so far, and record these."""
    entries = expect(result, Entries).entries
    new = {key: entry.value for key, entry in entries.items() if entry.revision > seen[key]}
    for key in new:
        seen[key] = entries[key].revision
    return new


def next_pause(before: float, size: int, *, stepped: bool) -> float:
    """Return the seconds between two heartbeats of a worker that trains in a world of `size`.

    If the worker has not `stepped` since the last one, it grows from `before`, the last pause.
    """
    return usual_pause(size) if stepped else before * GROWTH


def _steps_of(progress: TrainingProgress) -> int:
    """Return the steps of this round that are reported; of optimizers, if there are no others."""
    return progress.reported_steps or progress.optimizer_steps


def _steps_without_commit(progress: TrainingProgress) -> int | None:
    """Return the step that a round without commits has come to; None: there are commits."""
    if progress.steps:
        return None
    named = progress.reported_step
    return progress.optimizer_steps if named is None else named
