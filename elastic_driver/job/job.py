"""The job machine: `Job.handle(event, now)` takes an event and returns decisions.

Called by `runtime.driver` for every event, by the tests and by the simulation. The rule that an
event is for takes it in; then every rule draws its consequences, in the order of `RULES`, until
nothing changes any more. `now` is in monotonic seconds and never goes back. An event that is late,
repeated or out of order changes nothing and is counted.
"""

from collections.abc import Sequence

from elastic_driver.errors import assert_never
from elastic_driver.job import events as seen
from elastic_driver.job.decisions import Decision
from elastic_driver.job.events import (
    TOGETHER,
    AnyAgentEvent,
    EventBatch,
    JobEvent,
    OtherEvent,
    ProcessEvent,
    Together,
)
from elastic_driver.job.invariants import violations
from elastic_driver.job.parts import JobParts
from elastic_driver.job.rule import Rule
from elastic_driver.job.status import JobStatus, status_of
from elastic_driver.kernel.machine import Declaration
from elastic_driver.kernel.tables import Tables
from elastic_driver.kernel.wait import Wait
from elastic_driver.settings import Settings
from elastic_driver.words import wire_events as ev

# The rules in the order in which they draw consequences; the order is part of the specification.
# A rule may rely on what those before it have done in the same pass: workers are marked as leaving
# before a round is formed, stacks are settled before a worker is given up.
RULES = (
    "discovered",  # cool-downs end
    "suspicion",  # hosts that may be lost are probed
    "unreachable",  # hosts that are not reachable are probed
    "agents",  # agents that do not come up are given up
    "adoption",  # agents of an earlier driver that do not return are given up
    "rechecks",  # hosts are checked
    "stacks",  # a question to all workers is settled
    "memory",  # the job ends because no host has the memory for its workers
    "reports",  # the job ends because its workers have
    "notices",  # notices that may be some of many are handed on
    "preemption",  # the job ends because it has to go
    "drains",  # a slow worker is replaced
    "placement",  # workers are marked to leave, agents start and stop
    "hangs",  # workers that hang are given up
    "differences",  # a round whose ranks hold different states is left
    "boundary",  # the step after which members leave is named
    "membership",  # rounds of elastic jobs
    "plain",  # rounds of plain jobs
    "spares",  # spares are started and stopped
    "waits",  # the user hears for whom the job waits
)
MAX_PASSES = 64  # far more than any chain of consequences


class NotAtRestError(AssertionError):
    """The rules did not stop changing the job; the message names the rules that still did."""


class Job(JobParts):
    """One elastic job, from its first host to its exit status."""

    def __init__(self, settings: Settings, found: Tables | None = None) -> None:
        super().__init__(settings, found)
        self._began = False if found is None else bool(found["job"]["began"])
        self._decided: tuple[Decision, ...] = ()  # upon the last event
        self._rules: tuple[tuple[str, Rule], ...] = tuple((n, getattr(self, n)) for n in RULES)

    def handle(self, event: JobEvent | EventBatch, now: float) -> list[Decision]:
        """Take in one event; return the decisions to carry out, in order. Never raises for one."""
        if not self._began:
            self._began = True
            self.rounds.begin(now)
        had_ended = self.outcome.end is not None
        for one in event.events if isinstance(event, EventBatch) else (event,):
            self._take_in(one, now)
        if not had_ended:
            self._draw_consequences(now)
        self._decided = tuple(self.effects.take())
        return list(self._decided)

    def deadline(self) -> float | None:
        """Return when to send a `Tick` if nothing happens before; None if only an event helps."""
        return self.effects.alarm

    def check(self) -> list[str]:
        """Return every violated invariant as a sentence; O(hosts + workers)."""
        return violations(self, self._decided) if self._began else []

    def tables(self) -> Tables:
        """See `Snapshots.tables`; the last decisions are not part of the state."""
        return {"job": {"began": self._began}, **super().tables()}

    def status(self, now: float) -> JobStatus:
        """Return a frozen picture of the job, for `/v1/status`."""
        return status_of(self, now)

    # ---- events --------------------------------------------------------------------------

    def _take_in(self, event: JobEvent, now: float) -> None:
        try:
            if self.outcome.end is not None:
                self._take_in_after_the_end(event)
            elif isinstance(event, ev.WorkerReport):
                self._take_in_report(event, now)
            elif isinstance(event, ev.AgentEvent):
                self._take_in_agent_event(event, now)
            else:
                self._take_in_other(event, now)
        except ev.StaleEvent as stale:
            self.effects.ignore(str(stale))

    def _take_in_after_the_end(self, event: JobEvent) -> None:
        if isinstance(event, seen.DriverResumed | ev.AgentReturned):
            self.adoption.take_in_after_the_end(event)
        else:
            self.reports.take_in_after_the_end(event)

    def _take_in_report(self, event: ProcessEvent, now: float) -> None:
        worker = self.workers.with_process(event, event.worker)
        match event:
            case ev.WorkerStarted():
                self.reports.on_started(worker, event, now)
            case ev.WorkerReady() if worker.spare:
                self.spares.on_ready(worker, event, now)
            case ev.WorkerExited() if worker.spare:
                self.spares.on_exited(worker, event, now)
            case ev.WorkerReady():
                self.adoption.on_round(event.round)
                self.reports.on_ready(worker, event, now)
                self.suspicion.on_left(worker, event, now)
            case ev.WorkerStepped():
                self.adoption.on_round(event.round, trains=True)
                self.reports.on_stepped(worker, event, now)
            case ev.WorkerEnding():
                self.reports.on_ending(worker, event, now)
            case ev.WorkerExited():
                self.reports.on_exited(worker, event, now)
                self.memory.on_exited(worker, event, now)
            case ev.WorkerStalled():
                self.adoption.on_round(event.round, trains=True)
                self.hangs.on_stalled(worker, event, now)
            case ev.WorkerResumed():
                self.hangs.on_resumed(worker, event, now)
            case _:
                assert_never(event)

    def _take_in_agent_event(self, event: AnyAgentEvent, now: float) -> None:
        match event:
            case ev.AgentReady():
                self.agents.on_ready(event, now)
                self.discovered.on_agent_up(event)
                self.suspicion.on_ready(event, now)
            case ev.AgentReturned():
                self.adoption.on_returned(event, now)
                self.discovered.on_agent_up(event)
            case seen.AgentLost():
                self.agents.on_lost(event, now)
            case seen.AgentSuspected():
                self.suspicion.on_suspected(event, now)
            case seen.AgentHeard():
                self.suspicion.on_heard(event, now)
            case seen.AgentProbed():
                self.suspicion.on_probed(event, now)
            case ev.HostLeaving():
                self.notices.on_host_leaving(event, now)
            case ev.ConnectionUnanswered():
                self.unanswered.on_unanswered(event, now)
            case _:
                assert_never(event)

    def _take_in_other(self, event: OtherEvent, now: float) -> None:  # noqa: PLR0912, PLR0915
        match event:
            case seen.HostProbed():
                self.unreachable.on_probed(event, now)
            case seen.LeaseExpired():
                self.agents.on_lease_expired(event, now)
            case seen.HostsMeasured():
                self.memory.on_hosts_measured(event, now)
            case seen.HostsDiscovered():
                self.discovered.on_hosts(event, now)
            case seen.HostsGranted():
                self.discovered.on_granted(event)
            case seen.DiscoveryFailed():
                self.discovered.on_failed(event, now)
            case seen.HostsChecked():
                self.rechecks.on_hosts_checked(event, now)
            case ev.WorkerLeaving():
                self.notices.on_worker_leaving(event, now)
            case ev.DrainRequested():
                self.drains.on_requested(event, now)
            case ev.DrainCancelled():
                self.drains.on_cancelled(event, now)
            case seen.RankSlow():
                self.drains.on_slow(event, now)
            case seen.RankRecovered():
                self.drains.on_recovered(event, now)
            case seen.StatesEqual():
                self.differences.on_equal(event, now)
            case seen.StatesDiffer():
                self.differences.on_differ(event, now)
            case ev.WorkerStack():
                self.stacks.on_worker_stack(event, now)
            case ev.StacksRequested():
                self.stacks.on_requested(event, now)
            case ev.WorkerSaved():
                self.final_checkpoint.on_saved(event, now)
            case seen.JobLeaving():
                self.preemption.on_job_leaving(event, now)
            case seen.ProgressReported():
                self.boundary.on_progress_reported(event, now)
            case ev.ScaleRequested():
                self.capacity.on_scale_requested(event)
                self.discovered.on_target_set(event)
            case ev.PlanApplied():
                self.discovered.on_plan_applied(event)
            case seen.SizeProposed():
                self.capacity.on_size_proposed(event)
            case seen.MemoryExpected():
                self.discovered.on_memory_expected(event)
            case seen.HostStarved():
                self.discovered.on_host_starved(event)
            case seen.StopRequested():
                self.outcome.on_stop_requested(event, now)
            case seen.DriverResumed():
                self.adoption.on_resumed(event, now)
            case seen.Tick():
                pass  # only time has passed: the rules draw the consequences
            case _:
                assert_never(event)

    # ---- consequences --------------------------------------------------------------------

    def _draw_consequences(self, now: float) -> None:
        """Run the rules until a pass changes nothing; the job waits for what that pass returns."""
        moved: list[str] = []
        for _ in range(MAX_PASSES):
            moved = []
            before = self._mark()
            waits = list[Wait]()
            for name, rule in self._rules:
                if self.outcome.end is not None:
                    self.effects.wait(())
                    return
                waits += rule.advance(now)
                after = self._mark()
                if after != before:
                    moved.append(name)
                before = after
            if not moved:
                self.effects.wait(waits)
                return
        raise NotAtRestError(f"after {MAX_PASSES} passes these rules still move: {moved}")

    def _mark(self) -> tuple[object, ...]:
        """Return the values that one rule changes and another reads, beside the decisions."""
        current, outcome, capacity = self.rounds.current, self.outcome, self.capacity
        mark = (current.number, current.state, outcome.kind, len(outcome.losses))
        return (*mark, capacity.changed, capacity.placement_due, len(self.effects.decisions))


def _together(events: Sequence[Together]) -> Together | EventBatch:
    return EventBatch(tuple(events)) if len(events) > 1 else events[0]


DECLARATION = Declaration(
    name="job",
    kind=Job,
    events=JobEvent | EventBatch,
    decisions=Decision,
    together=TOGETHER,
    batch=_together,
)
