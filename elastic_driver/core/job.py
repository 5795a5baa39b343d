"""The job machine: `Job.handle(event, now)` takes an event and returns decisions.

Called by `runtime.driver` for every event, by the tests and by the simulation. The rule that an
event is for takes it in; then every rule draws its consequences, in the order of `RULES`, until
nothing changes any more. `now` is in monotonic seconds and never goes back. An event that is late,
repeated or out of order changes nothing and is counted.
"""

from elastic_driver.core import events as ev
from elastic_driver.core.decisions import Decision
from elastic_driver.core.invariants import violations
from elastic_driver.core.job_parts import JobParts
from elastic_driver.core.machine import assert_never
from elastic_driver.core.rules.base import Rule
from elastic_driver.core.status import JobStatus, status_of
from elastic_driver.settings import Settings

RULES = (
    "discovered",  # cool-downs end
    "agents",  # agents that do not come up are given up
    "rechecks",  # hosts are checked
    "stacks",  # a question to all workers is settled
    "endings",  # the job ends because its workers have
    "preemption",  # the job ends because it has to go
    "drains",  # a slow worker is replaced
    "placement",  # workers are marked to leave, agents start and stop
    "hangs",  # workers that hang are given up
    "boundary",  # the step after which members leave is named
    "membership",  # rounds of elastic jobs
    "plain",  # rounds of plain jobs
)
"""The rules in the order in which they draw consequences; the order is part of the specification.

A rule may rely on what those before it have done in the same pass: workers are marked as leaving
before a round is formed, stacks are settled before a worker is given up.
"""

MAX_PASSES = 64  # far more than any chain of consequences


class NotAtRestError(AssertionError):
    """The rules went on changing the job; names those that still moved."""


class Job(JobParts):
    """One elastic job, from its first host to its exit status."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._began = False
        self._decided: tuple[Decision, ...] = ()  # upon the last event
        self._rules: tuple[tuple[str, Rule], ...] = tuple((n, getattr(self, n)) for n in RULES)

    def handle(self, event: ev.Event, now: float) -> list[Decision]:
        """Take in one event; return the decisions to carry out, in order. Never raises for one."""
        if self.outcome.end is not None:
            self.effects.ignore(f"{type(event).__name__} after the end of the job")
            return []
        if not self._began:
            self._began = True
            self.rounds.begin(now)
        for one in event.events if isinstance(event, ev.EventBatch) else (event,):
            if self.outcome.end is None:
                self._take_in(one, now)
        self._draw_consequences(now)
        decisions = self.effects.take()
        self._decided = tuple(decisions)
        return decisions

    def deadline(self) -> float | None:
        """Return when to send a `Tick` if nothing happens before; None if only an event helps."""
        return self.effects.alarm

    def check(self) -> list[str]:
        """Return every violated invariant as a sentence; O(hosts + workers)."""
        return violations(self, self._decided) if self._began else []

    def status(self, now: float) -> JobStatus:
        """Return a frozen picture of the job, for `/v1/status`."""
        return status_of(self, now)

    # ---- events --------------------------------------------------------------------------

    def _take_in(self, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.WorkerReport):
            self.reports.on(event, now)
        elif isinstance(event, ev.HostReport):
            self._on_host(event, now)
        elif not isinstance(event, ev.EventBatch):
            self._on_job(event, now)

    def _on_host(self, event: ev.HostReport, now: float) -> None:
        match event:
            case ev.AgentReady():
                self.agents.on_ready(event)
            case ev.AgentLost():
                self.agents.on_lost(event, now)
            case ev.HostsDiscovered():
                self.discovered.on_hosts(event)
            case ev.DiscoveryFailed():
                self.discovered.on_failed(event)
            case ev.HostsChecked():
                self.rechecks.on_hosts_checked(event, now)
            case ev.HostLeaving():
                self.drains.on_host_leaving(event, now)
            case ev.DrainRequested():
                self.drains.on_requested(event, now)
            case ev.DrainCancelled():
                self.drains.on_cancelled(event)
            case _:
                assert_never(event)

    def _on_job(self, event: ev.JobReport, now: float) -> None:
        match event:
            case ev.WorkerLeaving():
                self.drains.on_worker_leaving(event, now)
            case ev.WorkerSaved():
                self.final_checkpoint.on_saved(event)
            case ev.WorkerStack():
                self.stacks.on_worker_stack(event)
            case ev.StacksRequested():
                self.stacks.ask(now, event.reason or "somebody asks")
            case ev.ProgressReported():
                self.boundary.on_progress_reported(event, now)
            case ev.RankSlow():
                self.drains.on_slow(event, now)
            case ev.RankRecovered():
                self.drains.on_recovered(event, now)
            case ev.ScaleRequested():
                self.capacity.on_scale_requested(event)
            case ev.JobLeaving():
                self.preemption.on_job_leaving(event, now)
            case ev.StopRequested():
                self.outcome.finish(event.exit_code, event.reason or "it was asked to stop")
            case ev.Tick():
                pass  # only time has passed; the rules see to it
            case _:
                assert_never(event)

    # ---- consequences --------------------------------------------------------------------

    def _draw_consequences(self, now: float) -> None:
        """Run the rules until nothing changes; the last pass sets the alarm."""
        moved: list[str] = []
        for _ in range(MAX_PASSES):
            if self.outcome.end is not None:
                return
            self.effects.begin_pass()
            moved = self._pass(now)
            if not moved:
                return
        raise NotAtRestError(f"after {MAX_PASSES} passes these rules still move: {moved}")

    def _pass(self, now: float) -> list[str]:
        """Run every rule once; return those that changed something."""
        moved, before = [], self._mark()
        for name, rule in self._rules:
            rule.advance(now)
            after = self._mark()
            if after != before:
                moved.append(name)
            before = after
            if self.outcome.end is not None:
                break
        return moved

    def _mark(self) -> tuple[object, ...]:
        """Return all that a rule may change and another reads: not every change is a decision."""
        return (
            len(self.effects.decisions),
            self.rounds.current.number,
            self.rounds.current.state,
            self.outcome.kind,
            len(self.outcome.losses),
            self.capacity.changed,
            self.capacity.placement_due,
        )
