"""The job machine: `Job.handle(event, now)` takes an event and returns decisions.

Called by `runtime.driver` for every event, by the tests and by the simulation. The rule that an
event is for takes it in; then every rule draws its consequences, in the order of `RULES`, until
nothing changes any more. `now` is in monotonic seconds and never goes back. An event that is late,
repeated or out of order changes nothing and is counted.
"""

from collections.abc import Callable, Sequence
from typing import Any

from elastic_driver.job import events as seen
from elastic_driver.job.decisions import Decision
from elastic_driver.job.events import TOGETHER, EventBatch, Together
from elastic_driver.job.invariants import violations
from elastic_driver.job.parts import TAKERS, JobParts, Taker
from elastic_driver.job.rounds import Rule
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
        self._takers = {key: [_bind(self, t) for t in takers] for key, takers in TAKERS.items()}

    def handle(self, event: ev.Event | EventBatch, now: float) -> list[Decision]:
        """Take in one event; return the decisions to carry out, in order. Never raises for one."""
        if not self._began:
            self._began = True
            self.rounds.begin(now)
        had_ended = self.ending.end is not None
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

    def _take_in(self, event: ev.Event, now: float) -> None:
        try:
            if self.ending.end is not None:
                self._take_in_after_the_end(event)
            elif isinstance(event, ev.WorkerReport):
                worker = self.workers.with_process(event, event.worker)
                for take in self._takers[type(event), worker.spare]:
                    take(worker, event, now)
            else:
                for take in self._takers[type(event), False]:
                    take(None, event, now)
        except ev.StaleEvent as stale:
            self.effects.ignore(str(stale))

    def _take_in_after_the_end(self, event: ev.Event) -> None:
        if isinstance(event, seen.DriverResumed | ev.AgentReturned):
            self.adoption.take_in_after_the_end(event)
        else:
            self.reports.take_in_after_the_end(event)

    # ---- consequences --------------------------------------------------------------------

    def _draw_consequences(self, now: float) -> None:
        """Run the rules until a pass changes nothing; the job waits for what that pass returns."""
        moved: list[str] = []
        for _ in range(MAX_PASSES):
            moved = []
            before = self._mark()
            waits = list[Wait]()
            for name, rule in self._rules:
                if self.ending.end is not None:
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


def _bind(job: JobParts, taker: Taker) -> Callable[[Any, Any, float], None]:
    """Return a part's method as a function of worker, event and time; it gets what it names."""
    method = getattr(getattr(job, taker.part), taker.method)
    match taker.parameters:
        case ("event",):
            return lambda _worker, event, _now: method(event)
        case ("event", "now"):
            return lambda _worker, event, now: method(event, now)
        case ("worker", "event", "now"):
            return method  # type: ignore[no-any-return]
    raise TypeError(f"{taker.part}.{taker.method} has the parameters {taker.parameters}")


def _together(events: Sequence[Together]) -> Together | EventBatch:
    return EventBatch(tuple(events)) if len(events) > 1 else events[0]


DECLARATION = Declaration(
    name="job",
    kind=Job,
    events=ev.Event,
    decisions=Decision,
    together=TOGETHER,
    batch=_together,
)
