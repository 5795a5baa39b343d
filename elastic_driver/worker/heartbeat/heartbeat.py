"""The heartbeat thread of a worker: renews its leases, reports progress, receives notices.

One request does all three and waits for a notice, so there is no polling and a notice arrives
within the delay of a message. The thread never touches torch and decides nothing: it calls
`on_notice` for every new notice. While the driver does not answer, the thread logs one line and
keeps trying, and training goes on.

`world` starts it once a process, before anything else can block. A forked child (a DataLoader
worker) has no such thread. Times are seconds.
"""

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from elastic_driver import contract
from elastic_driver.core import events
from elastic_driver.core.documents import Allocation, Notice, Progress, decode, encode
from elastic_driver.worker.context import WorkerContext
from elastic_driver.worker.heartbeat.preemption import PreemptionWatch
from elastic_driver.worker.heartbeat.progress import TrainingProgress
from elastic_driver.worker.heartbeat.stall_watch import StallWatch
from elastic_driver.worker.worker_log import say
from rendezvous.client import RendezvousClient
from rendezvous.errors import AbortedError, RendezvousError, WokenError
from rendezvous.wire import EVENTS_PATH, Entries, Set, Watch

HEARTBEATS_PER_S = 256.0  # of all workers of a world that trains
LONGEST_WAIT_S = 2.0  # between two heartbeats: the progress the driver reads is never older
SHORTEST_WAIT_S = 0.25
FIRST_WAIT_S = 0.05  # while the first step of a round is awaited; then ever longer
GROWTH = 1.5
STOP_S = 1.0  # the longest wait for the thread to end; it is a daemon
RECENT_STEPS = 11  # whose median is the current step time
RETRY_S = 0.5  # after a refused or unanswered heartbeat
LEAVING_S = 1.0  # the longest wait for the driver to accept that this worker leaves

_encode_event = msgspec.json.Encoder().encode


class Heartbeat:
    """Renews one worker's leases until stopped; made by the thread that trains.

    Args:
        born: the worker's context.
        client: belongs to this object and its thread alone.
        progress: reported with each heartbeat.
        on_notice: called on this thread with each new notice.
        before_heartbeat: called before each; returns the seconds until its next call, None: any.
    """

    def __init__(
        self,
        born: WorkerContext,
        client: RendezvousClient,
        progress: TrainingProgress,
        on_notice: Callable[[Notice], None],
        before_heartbeat: Callable[[], float | None],
    ) -> None:
        self._worker, self._client, self._progress = born.worker, client, progress
        self._on_notice, self._before_heartbeat = on_notice, before_heartbeat
        self._stall_watch = StallWatch(born.worker, progress, born.hang_timeout)
        self.preemption = PreemptionWatch(born.worker, born.leave_notice)
        self._pending: list[msgspec.Struct] = []  # events to post
        self._timeout = born.heartbeat_timeout
        self._idle = self._timeout / 3  # a lease survives two lost requests
        self._longest = min(self._idle, LONGEST_WAIT_S)
        self._reported = (0, 0)  # round and step of the progress sent last
        self._wait = FIRST_WAIT_S
        self._pause = self._longest  # between heartbeats while steps are made
        self._seen: Counter[str] = Counter()  # document key → its newest revision
        self._round_starts = False  # a new world may include us: its first step is near
        self._first_step_of = 0  # the round whose first step has been posted
        self._silent = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Send the first heartbeat and start the thread.

        Raises `RendezvousError` where the first heartbeat is not answered or is refused.
        """
        self._send(wait=0.0)
        self._thread = threading.Thread(target=self._run, name="elastic-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, within a second even in the middle of a request."""
        self._stopping.set()
        self._client.abort()
        self.preemption.wake()
        if self._thread is not None:
            self._thread.join(STOP_S)
        self._client.close()
        self.preemption.close()

    def report_first_step(self, client: RendezvousClient, round_id: int) -> None:
        """Post `WorkerStepped` now if this round had a step that was not reported yet.

        Called by the training thread before it reports that it has left the round.
        """
        if self._first_step_of != round_id and self._progress.steps > 0:
            event = events.WorkerStepped(self._worker, round_id, self._progress.version)
            client.post_json(EVENTS_PATH, _encode_event(event))
            self._first_step_of, self._round_starts = round_id, False

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                due = [
                    self.preemption.check(self._report_leaving),
                    self._before_heartbeat(),
                    self._check_stall(),
                    self._next_wait(),
                ]
                self._send(min(wait for wait in due if wait is not None))
                self._post_pending()
                if round_id := self._progress.round:
                    self.report_first_step(self._client, round_id)
            except AbortedError:
                return
            except WokenError:
                continue  # by a signal, or to stop
            except RendezvousError as error:
                if not self._silent:
                    say(f"the driver does not answer; training goes on ({error})")
                self._silent = True
                self.preemption.wait(RETRY_S)
            else:
                if self._silent:
                    say("the driver answers again")
                self._silent = False

    def _send(self, wait: float) -> None:
        """Send one heartbeat, and wait up to `wait` seconds for new documents."""
        progress = self._progress
        watched = [contract.JOB_NOTICE, contract.JOB_STACKS]
        if progress.round == 0:  # the start of a round must end the wait: its first step is urgent
            watched.append(contract.JOB_WORLD)
        if progress.wants_allocations:
            watched.append(contract.JOB_ALLOCATION)
        result = self._client.batch(
            Set(contract.worker_lease(self._worker), b"", self._timeout),
            Set(contract.worker_half_lease(self._worker), b"", self._timeout / 2),
            *self._report(),
            Watch({key: self._seen[key] for key in watched}, wait),
            wake=self.preemption.fileno(),
        )[-1]
        if not isinstance(result, Entries) or result.timed_out:
            return
        for key, entry in result.entries.items():
            if entry.revision <= self._seen[key]:
                continue
            self._seen[key] = entry.revision
            if key == contract.JOB_NOTICE:
                self._on_notice(decode(Notice, entry.value))
            elif key == contract.JOB_WORLD:
                self._round_starts = True
            elif key == contract.JOB_STACKS:
                self._pending.append(self._stall_watch.stack(int(entry.value)))
            else:
                progress.allocation = decode(Allocation, entry.value)

    def _check_stall(self) -> float | None:
        """Post a stall or its end at once; return the seconds until the next check."""
        if event := self._stall_watch.check(time.monotonic()):
            self._pending.append(event)
        self._post_pending()
        return self._stall_watch.due(time.monotonic())

    def _post_pending(self) -> None:
        while self._pending:  # kept until posted: the driver may be away
            self._client.post_json(EVENTS_PATH, _encode_event(self._pending[0]))
            del self._pending[0]

    def _report(self) -> tuple[Set, ...]:
        """Return the write of this worker's progress; none before the first step of a round."""
        progress = self._progress
        round_id, version, step_time = progress.round, progress.version, progress.step_time
        if round_id == 0 or progress.steps == 0:
            return ()
        self._reported = (round_id, version)
        times = tuple(progress.step_times)[-RECENT_STEPS:]
        usual = statistics.median(times) if times else step_time
        samples, links = progress.samples.collect(round_id, usual), progress.links()
        document = Progress(round_id, version, step_time, samples, progress.division, links)
        return (Set(contract.worker_progress(self._worker), encode(document)),)

    def _next_wait(self) -> float:
        """Return the seconds until the next heartbeat.

        Short while the first step of a round is awaited, growing with the time it takes. While
        steps are made it follows from the size of the world; without a new step it grows.
        """
        round_id = self._progress.round
        if self._round_starts if round_id == 0 else round_id != self._first_step_of:
            wait = min(self._wait, self._longest)
            self._wait = wait * GROWTH
            return wait
        self._wait = FIRST_WAIT_S
        if round_id == 0:
            return self._idle
        stepped = self._reported != (round_id, self._progress.version)
        self._pause = min(next_pause(self._pause, self._progress.size, stepped=stepped), self._idle)
        return self._pause

    def _report_leaving(self, event: events.WorkerLeaving) -> str:
        """Post that this worker leaves; return why that failed, or ""."""
        if self._silent:
            return "it does not answer"
        try:
            self._client.post_json(EVENTS_PATH, _encode_event(event), deadline=LEAVING_S)
        except AbortedError:
            raise  # the script has ended by itself meanwhile
        except RendezvousError as error:
            return str(error)
        return ""


def next_pause(before: float, size: int, *, stepped: bool) -> float:
    """Return the seconds between two heartbeats of a worker that trains in a world of `size`.

    The driver's load bounds it where the worker has `stepped` since the last heartbeat; otherwise
    it grows from `before`, the last pause.
    """
    if stepped:
        return min(max(size / HEARTBEATS_PER_S, SHORTEST_WAIT_S), LONGEST_WAIT_S)
    return before * GROWTH
