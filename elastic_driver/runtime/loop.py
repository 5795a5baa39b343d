"""The loop of a driver: it takes an event out of the mailbox and hands it to its machine.

Each event gets a number and the time. The executor carries out the machine's decisions, in their
order, before the next event. Events that many senders send at about the same time are handled
together. Runs in the driver's thread. Times are seconds.
"""

import contextlib
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elastic_driver.brain.store.records import Prior
from elastic_driver.errors import ExitCode
from elastic_driver.features.goodput.driver import job_started
from elastic_driver.job.decisions import Announce, CheckHosts, EndJob
from elastic_driver.job.events import DriverResumed, HostsMeasured, StopRequested, Tick
from elastic_driver.job.job import Job
from elastic_driver.job.workers import OCCUPYING
from elastic_driver.kernel.kernel import Handler, Kernel
from elastic_driver.kernel.log import Level
from elastic_driver.kernel.machine import ForMachine, Reply, Shown
from elastic_driver.kernel.services import (
    AdmitMembers,
    KeysRead,
    PublishKey,
    ReadKeys,
    SendEvent,
    ShowLine,
)
from elastic_driver.kernel.tables import Snapshots
from elastic_driver.runtime import mailbox as mail
from elastic_driver.runtime.brain_link import BrainReports
from elastic_driver.runtime.driver_parts import DriverPart, Measuring, watch_in
from elastic_driver.runtime.executor import Executor
from elastic_driver.runtime.host_checks import Checking
from elastic_driver.runtime.journal.replay import MEMORY, ResumedRun
from elastic_driver.runtime.journal.writer import DATA_WAIT_S, Journal
from elastic_driver.runtime.machines import MACHINES
from elastic_driver.runtime.mailbox import RunClock, collector_paused
from elastic_driver.words import counted
from elastic_driver.words import wire_events as ev
from elastic_driver.words.progress import Measured
from rendezvous.wire import Entry

MAX_TOGETHER = 1000  # events that are handled together
TELL_S = 2.0  # for workers to end, before the user is told of the wait
AGENT_EXIT_S = 3.0  # for agents to report and exit, after their workers' grace
_SPIN_GUARD_S = 0.01  # the least time between two ticks
_HELD_S = 0.02  # between two looks at a journal that does not answer


def _event_in(message: ForMachine | mail.Delivered) -> ForMachine:
    return message.event if isinstance(message, mail.Delivered) else message


def _decided(handlers: Mapping[type[Any], Handler]) -> dict[type[Any], Handler]:
    """Return the handlers without those of services that no machine here asks for."""
    asked = {kind for each in MACHINES for kind in each.decision_types()}
    services = {ReadKeys, PublishKey, AdmitMembers, SendEvent, ShowLine}
    return {kind: act for kind, act in handlers.items() if kind in asked or kind not in services}


def _call_all(acts: list[Callable[[], None]]) -> None:
    for act in acts:
        act()


@dataclass(kw_only=True)
class DriverLoop:
    """Runs a driver's machines; all methods belong to the driver's thread."""

    mailbox: mail.DriverMailbox
    executor: Executor
    lease: float  # seconds that a client of a machine may be silent
    status: Callable[[], bytes]  # returns the status document
    answer: Callable[[list[Reply]], None]  # sends the machines' replies to their clients
    debug: bool  # check the machines' invariants after each event
    end: EndJob | None = None  # the job is over: the agents shut down
    job: Job | None = None  # None: not begun yet
    parts: Sequence[DriverPart] = ()  # of the features
    brain: BrainReports | None = None  # reports the job to the Brain; None: there is no Brain
    journal: Journal | None = None  # open from the job's beginning on; None: there is none
    clock: RunClock = field(default_factory=RunClock)
    acknowledge: Callable[[list[Callable[[], None]]], None] = _call_all
    resumed: ResumedRun | None = None  # the run of an earlier driver
    # Of the senders of the events that are handled now; they get an answer when that is over.
    unanswered: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        measuring = [part for part in self.parts if isinstance(part, Measuring)]
        self.measuring = measuring[0] if measuring else Measuring()
        checking = [part for part in self.parts if isinstance(part, Checking)]
        self.checking = checking[0] if checking else Checking()
        own: dict[type[Any], Handler] = {
            EndJob: self._end_job,
            CheckHosts: self.checking.check_for_job,
        }
        for part in self.parts:
            own |= part.handlers()
        self.kernel = Kernel(
            MACHINES,
            _decided(self.executor.handlers()) | own,
            clock=self.clock,
            answer=self.answer,
            followers=self.executor.followers(),
            post=self.mailbox.put,
        )
        self.kernel.checks_invariants, self.kernel.on_handled = self.debug, self._on_handled
        for each in MACHINES:
            if each.new is not None:
                self.kernel.begin(each.name, each.new(self.lease))
        self._watch_name, self.watch = watch_in(self.kernel.machines)
        for part in self.parts:
            part.attach(self)
        self._stop_now = False

    def turn(self, until: float | None = None) -> None:
        """Handle the next message, if one comes before a deadline, and the deadlines passed."""
        shows = self.executor.record.tails.deadline if self.end is None else None
        answers = None if self.journal is None else self.journal.deadline
        looks = (part.due for part in self.parts)
        known = (*self.kernel.deadlines.values(), until, shows, answers, *looks)
        deadlines = [due for due in known if due is not None]
        timeout = max(_SPIN_GUARD_S, min(deadlines) - self.clock()) if deadlines else None
        try:
            message = self.mailbox.get(timeout)
        except queue.Empty:
            pass
        else:
            self._take(message)
        now = self.clock()
        for name in self.kernel.due(now):
            # Messages that had to wait for the journal may tell of what is due.
            if not self.mailbox.has_old:
                self._decide(name, Tick())
        for part in self.parts:
            if part.due is not None and part.due <= now:
                part.look(now)
        if self.journal is not None:
            self.journal.flush()
            self._tell(self.journal.overdue())
        if self.brain is not None and self.job is not None:
            self.brain.look(self.job, self.watch, now)
        if self.end is None:
            self.executor.record.show_overdue(now)

    def views(self) -> dict[str, Any]:
        """Return what the machines show in the status, by the names under which they do."""
        shown = [(MACHINES[name].shown_as, m) for name, m in self.kernel.machines.items()]
        return {name: m.view() for name, m in shown if name and isinstance(m, Shown)}

    def wind_down(self, grace: float) -> None:
        """Have the agents stop their workers and exit, and wait until they have."""
        deadline = self.clock() + grace + AGENT_EXIT_S
        if self.end is not None and not self._stop_now:
            interrupted = self.end.exit_code == ExitCode.INTERRUPTED
            plain = self.job is not None and not self.job.outcome.elastic
            interrupt = interrupted and plain  # elastic workers go back to their last commit
            self.executor.shut_down_agents(grace, self.end.reason, interrupt=interrupt)
        tell_at: float | None = self.clock() + TELL_S
        while not self._stop_now and self.executor.orders and self.clock() < deadline:
            self.turn(deadline if tell_at is None else min(deadline, tell_at))
            if tell_at is not None and self.clock() >= tell_at:
                tell_at = None
                self._tell_of_wait(deadline - AGENT_EXIT_S - self.clock())

    def _tell_of_wait(self, left: float) -> None:
        """Say whom the end of the job waits for, and for how long at most."""
        count = 0 if self.job is None else self.job.workers.count(*OCCUPYING)
        if self.end is None or not count:
            return
        waits = f"waiting for {counted(count, 'worker')} to end, {max(left, 0.0):.0f} s at most"
        stopped = self.end.failure is None and self.end.exit_code == ExitCode.INTERRUPTED
        again = "; Ctrl-C again kills at once" if stopped else ""
        self.executor.record.reporter.note(
            f"{waits} ({self.end.reason}){again}", level=Level.NORMAL
        )

    # ---- for the parts (`parts.DriverThread`) ----------------------------------------------

    def call(self, act: Callable[[], object]) -> None:
        """See `DriverThread.call`."""
        self.mailbox.put(mail.Called(act))

    def post(self, event: ForMachine) -> None:
        """See `DriverThread.post`."""
        self.mailbox.put(event)

    def read(self, keys: tuple[str, ...], found: Callable[[dict[str, Entry]], None]) -> None:
        """See `DriverThread.read`."""
        self.executor.read(keys, found)

    def tell_measured(self, document: Callable[[], Measured]) -> Callable[[], None]:
        """See `DriverThread.tell_measured`."""
        events = [event for part in self.parts for event in part.measured(document)]

        def tell() -> None:
            for event in events:
                self._decide(event.machine, event)

        return tell

    def tell_prior(self, prior: Prior) -> None:
        """See `DriverThread.tell_prior`."""
        for part in self.parts:
            for event in part.prior(prior):
                self.mailbox.put(event)

    # ---- messages ------------------------------------------------------------------------

    def _take(self, message: mail.Message) -> None:
        match message:
            case mail.StatusAsked(reply):
                reply(self.status())
            case mail.StopNow():
                self._stop_now = True
                self.end = self.end or EndJob(int(ExitCode.INTERRUPTED), "asked to stop twice")
            case mail.TakenOver(error):
                raise error
            case mail.KeysChanged():
                self._keep(message)
            case mail.Called(act):
                act()
            case mail.JobBegins(job, run_id):
                if self.resumed is None:
                    self._begin_job(job, run_id)
                else:
                    self._resume_job(self.resumed)
            case StopRequested(reason, exit_code) if self.job is None:
                self.end = self.end or EndJob(exit_code, reason)
            case _:
                self._hand_over(message)

    def _hand_over(self, first: ForMachine | mail.Delivered) -> None:
        """Hand an event, and those behind it that are handled with it, to their machines."""
        messages: list[ForMachine | mail.Delivered] = [first]
        event = _event_in(first)
        together = MACHINES[event.machine].together
        if isinstance(event, together):
            messages += self.mailbox.following(together, MAX_TOGETHER)
        acts = [each.acknowledge for each in messages if isinstance(each, mail.Delivered)]
        self.unanswered = acts
        events = list(map(_event_in, messages))
        for each in events:
            self.executor.record.note(each)
        if any(isinstance(e, ev.WorkerExited) and e.out_of_memory is not None for e in events):
            events.insert(0, HostsMeasured(self.measuring.idle_memory()))
        self.kernel.hand_over(events)
        self._snapshot_if_due()
        self.unanswered = []
        if acts and self._journal is None:
            self.acknowledge(acts)
        elif acts and self._journal is not None:
            self._tell(self._journal.then(partial(self.acknowledge, acts)))

    # ---- machines ------------------------------------------------------------------------

    def _decide(self, name: str, event: Any) -> None:
        """Have a machine decide, and carry out what it decides."""
        self.kernel.decide(name, event)
        self._snapshot_if_due()

    def _snapshot_if_due(self) -> None:
        if self.journal is not None and self.journal.snapshot_due:
            self.journal_states()

    def _on_handled(self, name: str, event: Any, seconds: float) -> None:
        """Note how far the job is, which its watch has just read."""
        record, watch = self.executor.record, self.watch
        if isinstance(event, KeysRead):
            self.executor.look_seconds = seconds
            record.times.progressed(watch.step, watch.step_time)
        if isinstance(event, KeysRead) or (
            name == self._watch_name and type(event) is ev.WorkerEnding
        ):
            record.progressed(watch.step, watch.round_step)

    # ---- the journal ---------------------------------------------------------------------

    @property
    def _journal(self) -> Journal | None:
        """The journal, once there is a job."""
        return None if self.job is None else self.journal

    def note(self, n: int, at: float, machine: str, event: object) -> None:
        """See `Record.note`."""
        if self._journal is not None:
            self._journal.note(n, at, machine, event)

    def is_written(self) -> bool:
        """Wait until the journal has all events, if it must be written; False: it is too late.

        Meanwhile the status and the watch over slow ranks go on; everything else waits.
        """
        journal = self._journal
        if journal is None:
            return True
        self._tell(journal.settle())
        if not journal.holds:
            return True
        waiting: list[mail.Message] = []
        watched = self._watch_name
        while journal.holds and not self._stop_now:
            with contextlib.suppress(queue.Empty):
                match message := self.mailbox.get(_HELD_S):
                    case mail.StatusAsked() | mail.StopNow() | mail.TakenOver():
                        self._take(message)
                    case _ if getattr(message, "machine", "") == watched:
                        self._decide(watched, message)
                    case _:
                        waiting.append(message)
            due = self.kernel.deadlines.get(watched)
            if due is not None and due <= self.clock():
                self._decide(watched, Tick())
            self._tell(journal.settle())
        self.mailbox.put_back(waiting)
        return not self._stop_now

    def once_written(self, act: Callable[[], None]) -> None:
        """See `Record.once_written`."""
        if self._journal is not None:
            self._tell(self._journal.then(act, DATA_WAIT_S))

    def _tell(self, news: list[Announce]) -> None:
        """Log and show the news of the journal."""
        for each in news:
            self.kernel.act(each)

    def _keep(self, changed: mail.KeysChanged) -> None:
        if self._journal is not None:
            self._tell(self._journal.keep(changed.values))
        if self._journal is not None and changed.kept is not None:
            self._tell(self._journal.then(changed.kept))
        elif changed.kept is not None:
            changed.kept()

    def journal_states(self) -> None:
        """Write the machines' states, from which a replay may begin."""
        if self._journal is not None:
            with collector_paused():
                states: dict[str, bytes] = {
                    n: m.snapshot()
                    for n, m in self.kernel.machines.items()
                    if isinstance(m, Snapshots)
                }
            states[MEMORY] = self.executor.record.memory()
            self._journal.snapshot(self.kernel.events, self.clock(), states)

    # ---- the job, its check, and their ends ----------------------------------------------

    def _end_job(self, decision: EndJob) -> None:
        self.end = self.end or decision

    def _begin_job(self, job: Job, run_id: str) -> None:
        self._run_job(job)
        self.journal_states()
        if self.journal is not None:  # whoever sees that the job has begun can go on with it
            self._tell(self.journal.settle())
        what, started = f"run {run_id}", job_started(job.settings)
        self.kernel.act(Announce(started, what))
        self._begin_parts(job)

    def _run_job(self, job: Job) -> None:
        self.job = job
        self.kernel.begin("job", job)
        self.kernel.record = None if self.journal is None else self

    def _resume_job(self, run: ResumedRun) -> None:
        """Go on with the job of an earlier driver, after its last event."""
        machines: Any = run.machines
        self.kernel.machines |= machines
        self.kernel.events = run.n
        self._run_job(run.job)
        self.executor.resume(run)
        self.watch.step = self.executor.record.ledger.step
        self._begin_parts(run.job)
        self.end = run.end
        moved = self.executor.server.url != run.url
        event = DriverResumed(run.term + 1, f"driver {run.term} has ended", moved)
        for each in MACHINES.journalled:
            self._decide(each.name, event)
        self.journal_states()

    def _begin_parts(self, job: Job) -> None:
        for part in self.parts:
            part.job_begins(job)
