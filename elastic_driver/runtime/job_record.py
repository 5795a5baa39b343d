"""What the driver records and shows of the job: event log, terminal, ledger, times and results.

The executor calls it, on the driver's thread only. The event of the job's end is kept until all
processes have ended, so that it is the last one.
"""

import time
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from elastic_driver.features.goodput.driver import RunLedger
from elastic_driver.job.decisions import Announce, EndJob, PublishWorld
from elastic_driver.job.events import EventBatch
from elastic_driver.kernel.machine import ForMachine
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.journal.replay import ResumedRun, Step
from elastic_driver.runtime.mailbox import RunClock
from elastic_driver.runtime.metrics import JobTimes
from elastic_driver.runtime.reporter import Reporter
from elastic_driver.runtime.results import HeldTails, JobResult, WorkerResults, as_event
from elastic_driver.words import log_events as log
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.orders import World
from elastic_driver.words.wire_events import WorkerExited, WorkerReady, WorkerStepped


@dataclass(kw_only=True)
class JobRecord:
    """The record of one job, and what is shown of it."""

    log: EventLog
    reporter: Reporter
    clock: RunClock = field(default_factory=RunClock)
    ledger: RunLedger = field(default_factory=RunLedger)
    times: JobTimes = field(default_factory=JobTimes)
    tails: HeldTails = field(default_factory=HeldTails)
    _results: WorkerResults = field(default_factory=WorkerResults)
    _world: World | None = None  # the newest
    _exited: WorkerExited | None = None  # the newest end of a worker of the job
    _last_event: Announce | None = None  # logged after all processes have ended

    # ---- what has happened ---------------------------------------------------------------

    def note(self, event: ForMachine) -> None:
        """Take in an event, before its machine decides."""
        match event:
            case WorkerExited():
                self._exited = event
            case WorkerReady() if event.machine == "job":
                self.tails.elastic = True
            case WorkerStepped(round=round_id):  # the job goes on after what went wrong before
                self._show(self.tails.step_finished(round_id))
                self.times.stepped(round_id, self.clock())

    def world_published(self, world: World) -> None:
        """Take in a world whose members have been told of it."""
        self._world = world
        self._results.world_published(world)
        self._show(self.tails.world_published(world.round))

    def progressed(self, step: int, round_step: int) -> None:
        """Note the newest committed steps, of the job and of its present round."""
        caught_up = self.ledger.progressed(step, round_step)
        if caught_up is not None:
            number = None if self._world is None else self._world.round
            self._log_and_show(replace(caught_up, round=number))

    def job_ended(self, end: EndJob) -> JobResult:
        """Log and show the job's end, as the last events and lines; return its result."""
        if end.exit_code == 0:
            self._show(self.tails.job_succeeded())
        result = self._results.of_job(end, time.time())
        for worker in result.workers:
            told = as_event(worker)
            self.log.append(told.event, **told.facts())
        last = self._last_event or Announce(log.job_end(end.exit_code)(), end.reason)
        what = replace(
            last.what,
            exit_code=end.exit_code,
            first_failure=result.failure,
            step=self.ledger.step,
        )
        self._log_and_show(replace(last, what=what))
        self.reporter.summed_up(self.ledger.story)
        shown = end.failure is not None and self.tails.was_shown(end.failure)
        self.reporter.job_ended(end.reason, end.failure, end.exit_code, shown=shown)
        return result

    def announce(self, event: Announce) -> None:
        """Log and show what has happened; the end of the job waits for `job_ended`."""
        world, exited = self._world, self._exited
        self._results.note(event, exited, time.time())
        self.times.announced(event, world, self.clock())
        match event.what:
            case log.JobEnd():
                self._last_event = event
                return
            case log.RoundClosed(step=known) | log.StateLost(step=known):
                step = max(self.ledger.step, known or 0)  # workers tell it before heartbeats do
                event = replace(event, what=replace(event.what, step=step))
            case log.RoundCompleted() if world is not None:
                event = replace(event, reason=world.reason)
            case worker_log.WorkerExited(expected=False) if exited is not None:
                # The traceback of a stopped worker explains no failure.
                self.tails.add(exited, 1 if world is None else world.round, self.clock())
        self._log_and_show(event)

    def _log_and_show(self, event: Announce) -> None:
        logged = self.log.append(event.event, **event.facts())
        self.ledger.logged(logged.line)
        self.reporter.announced(event, logged.line)

    def show_overdue(self, now: float) -> None:
        """Show the tracebacks that have waited long enough; the job may fail later all the same."""
        tracebacks, repeats = self.tails.overdue(now)
        self._show(tracebacks)
        if repeats:
            self.reporter.workers_failed_again(repeats)

    def _show(self, tracebacks: list[tuple[str, str]]) -> None:
        for worker, text in tracebacks:
            self.reporter.worker_raised(worker, text)

    # ---- the run of an earlier driver ----------------------------------------------------

    def memory(self) -> bytes:
        """Return what is remembered for the job's end and of its past, for a snapshot."""
        return msgspec.msgpack.encode((self._results.encode(), self.ledger.encode()))

    def resume(self, run: ResumedRun) -> None:
        """Know again what the driver before this one knew; nothing is shown or logged again."""
        outcome = run.job.outcome
        self.tails.elastic, self.tails.stepped = outcome.elastic, outcome.has_progress
        results, ledger = msgspec.msgpack.decode(run.memory, type=tuple[bytes, bytes])
        self._results.decode(results)
        self.ledger.resume(ledger, run)
        for step in run.since:
            self._remember(step, run.unix_offset)

    def _remember(self, step: Step, unix_offset: float) -> None:
        """Remember what followed from an event of the driver before this one."""
        events = step.event.events if isinstance(step.event, EventBatch) else (step.event,)
        for event in events:
            self._exited = event if isinstance(event, WorkerExited) else self._exited
        for decision in step.decisions:
            if isinstance(decision, PublishWorld):
                self._world = decision.world
                self._results.world_published(decision.world)
            elif isinstance(decision, Announce):
                self._results.note(decision, self._exited, step.at + unix_offset)
                if isinstance(decision.what, log.JobEnd):
                    self._last_event = decision
