"""The driver of a simulated job: the real kernel, on simulated time, with the cluster's handlers.

It may die at any moment of the kernel's way with an event. The next driver has what is in the
journal, takes the next term, and goes on at the job's own time: that stands still while no driver
lives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from elastic_driver.job import job
from elastic_driver.job.decisions import Announce, Decision, GiveOrder, PublishWorld, StartAgent
from elastic_driver.job.events import TOGETHER, AgentLost, DriverResumed, Tick
from elastic_driver.job.job import Job
from elastic_driver.kernel.kernel import Catalog, Kernel, Machines
from elastic_driver.runtime.machines import decode_event, encode_event
from elastic_driver.words import wire_events as ev
from tests.sim.workers import Violation

if TYPE_CHECKING:
    from tests.sim.agents import SimAgent
    from tests.sim.cluster import Cluster

CATALOG = Catalog((job.DECLARATION,))
GATHERED = 0.2  # of the events that can be: so many are taken in together with the next one
GATHER_S = 0.002
SNAPSHOT_EVERY = 24  # events
COMPARED = 0.3  # of the jobs that come back: compared with the one before
LATE = 0.25  # of the seeds have a slow disk: it lacks the last events of a driver that dies
MOST_LACKING = (1, 3, 24)  # events, as slow as the disk is
OVERDUE_S = 1.0  # a driver that is to die and gets no event dies between two
# The moment of a driver's death: before its next event is in the journal, before or amid the
# decisions that follow from it, or after all of them.
Moment = Literal["unjournalled", "undecided", "amid", "after"]
MOMENTS: tuple[Moment, ...] = ("unjournalled", "undecided", "amid", "after")
# An event, and the agent that it, or a worker of it, sends until it is answered.
Arrived = tuple[ev.Event, "SimAgent | None"]


class Cut(NamedTuple):
    """A driver that etcd does not answer for a while; `replaced`: a standby takes over."""

    seconds: float
    replaced: bool


@dataclass
class Waiting:
    """What a driver may not do before etcd has its last event, and what has come since."""

    decisions: list[Decision]
    arrived: list[Arrived]
    handled: int = field(init=False)  # of those that have arrived: the last event itself

    def __post_init__(self) -> None:
        self.handled = len(self.arrived)


class Journal:
    """The journal of a job, in memory: its newest state, and the events after that, as bytes."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.state = 0, 0.0, driver.job.snapshot()  # the last event in it, its time, and the state
        self.rows: list[tuple[int, float, bytes]] = []  # each event's number, time, and itself
        self.reached = 0.0  # the time of the last event that was replayed

    def note(self, n: int, at: float, machine: str, event: Any) -> None:
        """Write an event down."""
        assert machine == "job"
        if len(self.rows) >= SNAPSHOT_EVERY:
            last, its_time, _ = self.rows[-1]
            self.state, self.rows = (last, its_time, self.driver.job.snapshot()), []
        self.rows.append((n, at, encode_event(event)))

    def is_written(self) -> bool:
        """Return whether etcd has all events; if not, the driver keeps what was decided."""
        return self.driver.waits is None

    def once_written(self, act: Callable[[], None]) -> None:
        """Call nothing: a job has no clients, and replies to nobody."""
        raise AssertionError(f"{act} is to answer a client")

    def replayed(self) -> Machines:
        """Return the job's machine after the last event."""
        found = Machines()
        found.events, self.reached, state = self.state
        found.begin("job", Job.restored(state))
        for n, at, event in self.rows:
            found.handle(n, at, "job", decode_event(event))
            self.reached = at
        return found


class WatchedKernel(Kernel):
    """A kernel that shows what was decided before anything acts."""

    decided: Callable[[list[Decision]], None]

    def handle(self, n: int, at: float, name: str, event: Any) -> list[Any]:
        """See `Machines.handle`."""
        decisions = super().handle(n, at, name, event)
        self.decided(decisions)
        return decisions


class Driver:
    """One driver of the job after the other; `mortal`: they keep a journal, and may die."""

    def __init__(self, cluster: Cluster, job: Job, seed: int, *, mortal: bool) -> None:
        self.cluster, self.job, self.mortal = cluster, job, mortal
        self.term, self.up = 1, True
        self.handled = self.died = 0
        self.dies: tuple[Moment, float] | None = None  # when, and for how many seconds
        self.random = Random(f"driver of {seed}")
        self._gathering = Random(f"gathering of {seed}")
        self._gathered: list[Arrived] = []  # arrived, and taken in together with what follows
        self._taken: list[Arrived] = []  # the events that the kernel handles now
        self._moment: Moment | None = None  # at which the driver dies by them
        self._most = math.inf  # decisions that it carries out before that
        self._left: list[Decision] = []  # those that it does not carry out any more
        self._base = 0.0  # of the job's time
        self._reached = 0.0  # the last deadline: a difference of floats may be just before it
        self._alarm: float | None = None
        self._second = Random(f"second driver of {seed}")
        self.cut: Cut | None = None  # from etcd, at the next event
        self.waits: Waiting | None = None  # for etcd
        self._unwritten = False  # etcd has not got the last event, upon which nothing acted
        self.waited = 0.0  # seconds, in all
        self._late = Random(f"late journal of {seed}").random() < LATE
        self.lacks = 0  # events that were acted upon and are not in the journal
        self.journal = Journal(self) if mortal else None
        self._handlers = {
            kind: partial(self._carry_out, act) for kind, act in cluster.handlers().items()
        }
        self.kernel = self._new_kernel(job)

    def _new_kernel(self, job: Job, events: int = 0) -> WatchedKernel:
        """Return the kernel of another driver, after so many events."""
        kernel = WatchedKernel(CATALOG, self._handlers, clock=lambda: self.now)
        kernel.decided, kernel.checks_invariants = self._decided, True
        kernel.record, kernel.events = self.journal, events
        kernel.begin("job", job)
        return kernel

    @property
    def now(self) -> float:
        """The job's time."""
        return max(self.cluster.clock.now - self._base, self._reached)

    # ---- events --------------------------------------------------------------------------

    def deliver(self, event: ev.Event, sender: SimAgent | None = None) -> bool:
        """Take an event in, or hold it back for a moment; return whether the driver lives on.

        Without an answer the `sender` keeps it.
        """
        if not self.up:
            self._not_heard((event, sender))
            return False
        together = isinstance(event, TOGETHER)
        if together and self._gathering.random() < GATHERED:
            self._gathered.append((event, sender))
            self.cluster.clock.after(GATHER_S, self._take_in_gathered)
        else:
            if not together:
                self._take_in_gathered()
            self._take_in(event, sender)
        return self.up

    def report(self, delay: float, event: ev.Event) -> None:
        """Take in a report of this driver's own shell, later; it is lost if the driver dies."""
        term = self.term

        def arrive() -> None:
            if term == self.term:
                self.deliver(event)

        self.cluster.clock.after(delay, arrive)

    def _take_in_gathered(self) -> None:
        if self._gathered:
            self._take_in(*self._gathered.pop())

    def _take_in(self, event: ev.Event, sender: SimAgent | None = None) -> None:
        if self.cluster.end is not None:
            return
        arrived, self._gathered = [*self._gathered, (event, sender)], []
        if self.waits is not None:
            self.waits.arrived += arrived
            return
        moment, away = self.dies or (None, 0.0)
        if moment == "unjournalled":
            self._die(away, arrived)
            return
        for one, _ in arrived:
            self.cluster.note("->", one)
        self.handled += 1
        self._taken, self._moment, self._left = arrived, moment, []
        self.kernel.hand_over([one for one, _ in arrived])
        if self.waits is not None:
            return
        self._most = math.inf
        self._wake_later(self._left)
        if self._moment is None:
            self._arm(event)
        elif self.cluster.end is None:
            self._die(away, [one for one in arrived if self.random.random() < 0.5])

    def _decided(self, decisions: list[Decision]) -> None:
        """Choose, before anything acts, how far the driver comes with what it has decided."""
        workers = self.job.workers.workers.values()
        self.cluster.spares.update(worker.id for worker in workers if worker.spare)
        if self._moment in ("undecided", "amid"):
            if all(isinstance(decision, Announce) for decision in decisions):
                self._moment = None  # there is nothing to be in the midst of
            else:
                most = 0 if self._moment == "undecided" else len(decisions)
                self._most = self.random.randint(0, most)
        self._begin_to_wait(decisions)

    def _carry_out(self, act: Callable[[Any], None], decision: Decision) -> None:
        """Carry a decision out, if the driver still lives."""
        if self._most > 0:
            self._most -= 1
            self.cluster.note("  ", decision)
            act(decision)
        else:
            self._left.append(decision)

    def _arm(self, event: ev.Event) -> None:
        at = self.kernel.deadlines["job"]
        if at is not None and at <= self.now and isinstance(event, Tick):
            raise Violation(f"the deadline {at} is not after the tick at {self.now}")
        if at is not None and at != self._alarm:
            self._alarm = at
            self.cluster.clock.after(max(0.0, at - self.now), lambda: self._tick(at, self.term))

    def _tick(self, at: float, term: int) -> None:
        if term == self.term and self.kernel.deadlines["job"] == at and self._alarm == at:
            self._alarm, self._reached = None, at
            self.deliver(Tick())

    # ---- two drivers -----------------------------------------------------------------------

    def _begin_to_wait(self, decisions: list[Decision]) -> None:
        """If etcd does not answer, keep the decisions: nothing acts that it does not have."""
        cut, self.cut = self.cut, None
        if cut is None or self.dies is not None:
            return
        self.cluster.note("!!", f"the driver of term {self.term} waits for etcd, {cut}")
        self.waits = Waiting(decisions, self._taken)
        go_on = self.lose_to_standby if cut.replaced else self.go_on
        self.cluster.clock.after(cut.seconds, partial(go_on, self.term))
        self.waited += cut.seconds

    def go_on(self, term: int) -> None:
        """Etcd answers again: act, and take in what has come meanwhile."""
        waits = self.waits
        if waits is None or self.term != term:
            return
        self.waits = None
        for decision in waits.decisions:
            self.kernel.act(decision)
        for event, sender in waits.arrived[waits.handled :]:
            if self.up:
                self.deliver(event, sender)
            else:
                self._not_heard((event, sender))
        if self.up and self.cluster.end is None:
            self.deliver(Tick())

    def lose_to_standby(self, term: int) -> None:
        """A standby has taken over: it has what etcd took, perhaps with the last event."""
        if self.waits is None or self.term != term or self.journal is None:
            return
        if self._second.random() < 0.5:
            self.journal.rows.pop()
            self._unwritten = True
        self._die(0.0, [])

    def _wake_later(self, left: list[Decision]) -> None:
        """Sometimes a driver was only stopped: it wakes, and carries out what it had decided."""
        if left and self._second.random() < 0.5:
            delay = self._second.uniform(0.0, 4.0)
            self.cluster.clock.after(delay, partial(self._wake, left, self.term))

    def _wake(self, left: list[Decision], term: int) -> None:
        self.cluster.note("!!", f"the driver of term {term} wakes")
        for decision in left:
            if isinstance(decision, StartAgent):
                self.cluster.start_agent_late(decision, term)
            elif isinstance(decision, GiveOrder):
                found = self.cluster.agent_named(decision.host, decision.incarnation)
                if found is not None:
                    found.receive(decision.order, term)
            elif isinstance(decision, PublishWorld):
                for worker in self.cluster.living():
                    if worker.driver == term:  # it has not found the next driver yet
                        worker.told_by = term
                        worker.see_world(decision.world)

    # ---- death and resume ----------------------------------------------------------------

    def die_soon(self, moment: Moment, away: float) -> None:
        """Let the driver die at its next event, or between two, and another come after a while."""
        if not self.up:
            return
        self.dies, term = (moment, away), self.term

        def overdue() -> None:
            if self.term == term and self.dies is not None:
                self.die_between(away)

        self.cluster.clock.after(OVERDUE_S, overdue)

    def live_on(self) -> None:
        """Let there be a driver, which does not die."""
        self.dies = self.cut = None
        self.go_on(self.term)
        self.resume(self.term)

    def die_between(self, away: float) -> None:
        """Let the driver die now, between two events."""
        if self.up and self.cluster.end is None:
            self._die(away, [])

    def _die(self, away: float, unanswered: list[Arrived]) -> None:
        """End this driver; `unanswered`: events whose senders got no answer."""
        cluster, self.dies, self.cut = self.cluster, None, None
        cluster.note("!!", f"the driver of term {self.term} dies, for {away} s")
        self.up, self._alarm = False, None
        self.died += 1
        gathered, self._gathered = self._gathered, []
        waits, self.waits = self.waits, None
        for arrived in (*unanswered, *gathered, *(waits.arrived if waits else ())):
            self._not_heard(arrived)
        for agent in cluster.every_agent():
            agent.lose_orders(self.random.randint(0, len(agent.orders)))
        cluster.forget_store()
        cluster.clock.after(away, partial(self.resume, self.term))

    def _not_heard(self, arrived: Arrived) -> None:
        event, sender = arrived
        if sender is not None and not isinstance(event, ev.AgentReturned):
            sender.unanswered.append(event)  # type: ignore[arg-type]

    def resume(self, term: int) -> None:
        """Start the next driver after the one of this term, if nobody has."""
        journal = self.journal
        if self.up or self.term != term or self.cluster.end is not None or journal is None:
            return
        before = self.job
        lacking = self._lose_the_last(journal) if self._late and not self.cluster.calm else 0
        found = journal.replayed()
        self.job = found.machines["job"]  # type: ignore[assignment]
        self.kernel = self._new_kernel(self.job, found.events)
        lacking += self._unwritten
        self._unwritten = False
        compared = not lacking and self.random.random() < COMPARED
        if compared and self.job.snapshot() != before.snapshot():
            raise Violation("the journal does not lead to the state that acted")
        self.term += 1
        self.up, self._base = True, self.cluster.clock.now - journal.reached
        self.cluster.note("!!", f"the driver of term {self.term} resumes")
        if (end := self.job.ending.end) is not None:
            self.cluster.end_job(end)
            return
        self.cluster.driver_comes()
        if self.deliver(DriverResumed(self.term, "the driver has died")):
            self.cluster.driver_is_back()
            self._replaced(before)

    def _lose_the_last(self, journal: Journal) -> int:
        """Remove what a slow disk has not got from the journal; return the number of events."""
        most = self.random.choice(MOST_LACKING)
        lacking = min(self.random.randint(0, most), len(journal.rows))
        journal.rows = journal.rows[: len(journal.rows) - lacking]
        self.lacks += lacking
        return lacking

    def _replaced(self, before: Job) -> None:
        """Sometimes the earlier driver lives on, and knows nothing: nobody obeys it any more."""
        if self.random.random() > 0.3:
            return
        term, orders = self.term - 1, list[GiveOrder]()
        for host, agent in list(before.fleet.agents.items()):
            lost = AgentLost(host, agent.incarnation, "it does not come any more")
            given = before.handle(lost, self.now)
            orders += [decision for decision in given if isinstance(decision, GiveOrder)]
        for decision in orders:
            found = self.cluster.agent_named(decision.host, decision.incarnation)
            delay = self.random.uniform(0.0, 3.0)
            if found is not None:
                self.cluster.clock.after(delay, partial(self._give_late, found, decision, term))

    def _give_late(self, agent: SimAgent, decision: GiveOrder, term: int) -> None:
        """Give an order of an earlier driver to an agent that knows a later one."""
        if agent.term > term:
            agent.receive(decision.order, term)
