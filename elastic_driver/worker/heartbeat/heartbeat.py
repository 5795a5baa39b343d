"""The one daemon thread of a worker: shows that it lives, tells how far it is, hears notices.

One request a beat renews the lease, writes the progress and waits for a notice, so that nobody
polls and a notice arrives within a message's delay. The thread never touches torch and never
decides: every new notice goes to `on_notice`, called on this thread. A driver that does not answer
changes nothing but one line on stderr: beats go on being tried, training goes on.

Started by `world` before anything else can block, once a process. A forked child (a DataLoader
worker) has no such thread and never beats. Times are seconds.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import msgspec

from elastic_driver import contract
from elastic_driver.core.documents import Allocation, Notice, Progress, decode, encode
from elastic_driver.core.events import (
    WorkerLeaving,
    WorkerResumed,
    WorkerStack,
    WorkerStalled,
    WorkerStepped,
)
from elastic_driver.worker.heartbeat.preemption import Notices
from elastic_driver.worker.heartbeat.progress import TrainingProgress
from elastic_driver.worker.heartbeat.stall_watch import StallWatch
from elastic_driver.worker.worker_log import say
from rendezvous.client import RendezvousClient
from rendezvous.errors import AbortedError, RendezvousError, WokenError
from rendezvous.wire import EVENTS_PATH, Entries, Set, Watch

BEATS_PER_S = 256.0  # of all workers of a world that trains; and each of them
LONGEST_WAIT_S = 2.0  # at least so often, so that the progress the driver reads is never older
SHORTEST_WAIT_S = 0.25  # but no oftener
FIRST_WAIT_S = 0.05  # until the first step of a round is told, wait this long, then ever longer
GROWTH = 1.5
STOP_S = 1.0  # for the thread to end; it is a daemon, so a process never hangs on it
RECENT_STEPS = 11  # from which the step time of the moment is taken
RETRY_S = 0.5  # after a refused or unanswered beat
LEAVING_S = 1.0  # for the driver to hear that this worker has to go

_events = msgspec.json.Encoder()


class Heartbeat:
    """Renews one worker's lease until stopped.

    `client` belongs to this object and its thread alone. `timeout`: seconds without a beat after
    which the job takes this worker for lost.
    """

    def __init__(
        self,
        worker: str,
        client: RendezvousClient,
        progress: TrainingProgress,
        *,
        timeout: float,
        on_notice: Callable[[Notice], None],
        tend: Callable[[], float | None],
        watch: StallWatch,
        notices: Notices,
    ) -> None:
        self._worker, self._client, self._progress = worker, client, progress
        self._timeout, self._on_notice, self._tend = timeout, on_notice, tend
        self._watch, self._notices = watch, notices
        self._news: WorkerStalled | WorkerResumed | None = None
        self._idle = timeout / 3  # a lease survives two lost requests
        self._longest = min(self._idle, LONGEST_WAIT_S)
        self._said = (0, 0)  # round and step of the progress told last
        self._wait = FIRST_WAIT_S
        self._pause = self._longest  # between beats while steps are made
        self._seen = 0  # revision of the newest notice
        self._asked = 0  # revision of the newest question where we stand
        self._answer: WorkerStack | None = None  # to it; kept until it is told
        self._world = 0  # revision of the newest world
        self._allocation = 0  # revision of the newest allocation
        self._entering = False  # a new world may be ours: its first step is near
        self._told = 0  # the round whose first step has been told
        self._silent = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Send the first beat, then go on beating in the background.

        Raises `RendezvousError` where the first beat finds nobody or is refused.
        """
        self._beat(wait=0.0)
        self._thread = threading.Thread(target=self._run, name="elastic-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, within a second even in the middle of a request."""
        self._stopping.set()
        self._client.abort()
        self._notices.signals.wake()
        if self._thread is not None:
            self._thread.join(STOP_S)
        self._client.close()

    def tell_first_step(self, client: RendezvousClient, round_id: int) -> None:
        """Post `WorkerStepped` now if this round had a step that was not told yet.

        For the training thread, before it says that it has left the round.
        """
        if self._told != round_id and self._progress.steps > 0:
            self._post_stepped(client, round_id, self._progress.version)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                due = [self._notices.heed(self._tell_leaving), self._tend(), self._look()]
                due.append(self._next_wait())
                self._beat(min(wait for wait in due if wait is not None))
                self._tell()
            except AbortedError:
                return
            except WokenError:
                continue  # a signal came, or the end
            except RendezvousError as error:
                if not self._silent:
                    say(f"the driver does not answer; training goes on ({error})")
                self._silent = True
                self._notices.wait(RETRY_S)
            else:
                if self._silent:
                    say("the driver answers again")
                self._silent = False

    def _beat(self, wait: float) -> None:
        lease = Set(contract.worker_lease(self._worker), b"", self._timeout)
        sign = Set(contract.worker_half_lease(self._worker), b"", self._timeout / 2)
        keys = {contract.JOB_NOTICE: self._seen, contract.JOB_STACKS: self._asked}
        if self._progress.round == 0:
            # A beat must not sleep through the start of a round: its first step is news.
            keys[contract.JOB_WORLD] = self._world
        if self._progress.passes_on:
            keys[contract.JOB_ALLOCATION] = self._allocation
        wake = self._notices.signals.fileno()
        results = self._client.batch(
            lease, sign, *self._progress_write(), Watch(keys, wait), wake=wake
        )
        found = results[-1]
        if not isinstance(found, Entries) or found.timed_out:
            return
        world = found.entries.get(contract.JOB_WORLD)
        if world is not None and world.revision > self._world:
            self._world, self._entering = world.revision, True
        asked = found.entries.get(contract.JOB_STACKS)
        if asked is not None and asked.revision > self._asked:
            self._asked = asked.revision
            self._answer = self._watch.answer(int(asked.value))
        entry = found.entries.get(contract.JOB_NOTICE)
        if entry is not None and entry.revision > self._seen:
            self._seen = entry.revision
            self._on_notice(decode(Notice, entry.value))
        given = found.entries.get(contract.JOB_ALLOCATION)
        if given is not None and given.revision > self._allocation:
            self._allocation = given.revision
            self._progress.allocation = decode(Allocation, given.value)

    def _look(self) -> float | None:
        """Tell the driver where the training thread stands still; seconds to the next look."""
        if self._news is None:
            self._news = self._watch.look(time.monotonic())
        if self._news is not None:  # kept until it is told: the driver may be away
            self._client.post_json(EVENTS_PATH, _events.encode(self._news))
            self._news = None
        return self._watch.due(time.monotonic())

    def _progress_write(self) -> tuple[Set, ...]:
        progress = self._progress
        round_id, steps, version, step_time = (
            progress.round,
            progress.steps,
            progress.version,
            progress.step_time,
        )
        if round_id == 0 or steps == 0:
            return ()
        self._said = (round_id, version)
        times = tuple(progress.step_times)[-RECENT_STEPS:]
        usual = statistics.median(times) if times else step_time
        document = Progress(
            round=round_id,
            step=version,
            step_time=step_time,
            samples=progress.samples.collect(round_id, usual),
            division=progress.division,
            links=progress.links(),
        )
        return (Set(contract.worker_progress(self._worker), encode(document)),)

    def _next_wait(self) -> float:
        """Short while a round's first step is awaited, growing with the time it takes.

        While steps are made, it depends on how many workers there are; without a step to tell it
        grows until it is as long as the lease allows.
        """
        round_id = self._progress.round
        settled = not self._entering if round_id == 0 else round_id == self._told
        if settled:
            self._wait = FIRST_WAIT_S
            if round_id == 0:
                return self._idle
            stepped = self._said != (round_id, self._progress.version)
            pause = next_pause(self._pause, self._progress.size, stepped=stepped)
            self._pause = min(pause, self._idle)
            return self._pause
        wait = min(self._wait, self._longest)
        self._wait = wait * GROWTH
        return wait

    def _tell_leaving(self, event: WorkerLeaving) -> str:
        """Have the driver know that we have to go; why that cannot be, or nothing."""
        if self._silent:
            return "it does not answer"
        try:
            self._client.post_json(EVENTS_PATH, _events.encode(event), deadline=LEAVING_S)
        except AbortedError:
            raise  # the script has ended by itself meanwhile
        except RendezvousError as error:
            return str(error)
        return ""

    def _tell(self) -> None:
        if self._answer is not None:
            self._client.post_json(EVENTS_PATH, _events.encode(self._answer))
            self._answer = None
        round_id = self._progress.round
        if round_id in (0, self._told) or self._progress.steps == 0:
            return
        self._post_stepped(self._client, round_id, self._progress.version)

    def _post_stepped(self, client: RendezvousClient, round_id: int, step: int) -> None:
        event = WorkerStepped(worker=self._worker, round=round_id, step=step)
        client.post_json(EVENTS_PATH, _events.encode(event))
        self._told, self._entering = round_id, False


def next_pause(before: float, size: int, *, stepped: bool) -> float:
    """Seconds between two beats of a worker that trains with so many others.

    As the world's size allows where it has `stepped` since the last beat, else longer than before.
    """
    if stepped:
        return min(max(size / BEATS_PER_S, SHORTEST_WAIT_S), LONGEST_WAIT_S)
    return before * GROWTH
