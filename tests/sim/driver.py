"""The driver of a simulated job: it journals an event, decides, and acts. It may die in between.

The next driver has what is in the journal, takes the next term, and goes on at the job's own time:
that stands still while no driver lives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Literal, NamedTuple

from elastic_driver.job.decisions import Announce, Decision, GiveOrder, PublishWorld, StartAgent
from elastic_driver.job.events import TOGETHER, AgentLost, DriverResumed, EventBatch, JobEvent, Tick
from elastic_driver.job.job import Job
from elastic_driver.words import wire_events as ev
from tests.sim.workers import Violation

if TYPE_CHECKING:
    from tests.sim.agents import SimAgent
    from tests.sim.cluster import Cluster

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
Arrived = tuple[JobEvent, "SimAgent | None"]


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
        self._base = 0.0  # of the job's time
        self._reached = 0.0  # the last deadline: a difference of floats may be just before it
        self._alarm: float | None = None
        self._journal: list[tuple[float, JobEvent | EventBatch]] = []
        self._snapshot = (0.0, job.snapshot() if mortal else b"")
        self._second = Random(f"second driver of {seed}")
        self.cut: Cut | None = None  # from etcd, at the next event
        self.waits: Waiting | None = None  # for etcd
        self._unwritten = False  # etcd has not got the last event, upon which nothing acted
        self.waited = 0.0  # seconds, in all
        self._late = Random(f"late journal of {seed}").random() < LATE
        self.lacks = 0  # events that were acted upon and are not in the journal

    @property
    def now(self) -> float:
        """The job's time."""
        return max(self.cluster.clock.now - self._base, self._reached)

    # ---- events --------------------------------------------------------------------------

    def deliver(self, event: JobEvent, sender: SimAgent | None = None) -> bool:
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

    def report(self, delay: float, event: JobEvent) -> None:
        """Take in a report of this driver's own shell, later; it is lost if the driver dies."""
        term = self.term

        def arrive() -> None:
            if term == self.term:
                self.deliver(event)

        self.cluster.clock.after(delay, arrive)

    def _take_in_gathered(self) -> None:
        if self._gathered:
            self._take_in(*self._gathered.pop())

    def _take_in(self, event: JobEvent, sender: SimAgent | None = None) -> None:
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
        now = self.now
        cluster = self.cluster
        for one, _ in arrived:
            cluster.note("->", one)
        together = tuple(one for one, _ in arrived)
        taken = EventBatch(together) if len(arrived) > 1 else event  # type: ignore[arg-type]
        self.handled += 1
        self._write(now, taken)
        decisions = self.job.handle(taken, now)
        workers = self.job.workers.workers.values()
        cluster.spares.update(worker.id for worker in workers if worker.spare)
        left: list[Decision] = []
        if moment in ("undecided", "amid"):
            if all(isinstance(decision, Announce) for decision in decisions):
                moment = None  # there is nothing to be in the midst of
            else:
                most = 0 if moment == "undecided" else len(decisions)
                done = self.random.randint(0, most)
                decisions, left = decisions[:done], decisions[done:]
        if problems := self.job.check():
            raise Violation("; ".join(problems))
        if self._begins_to_wait(decisions, arrived):
            return
        self._act(decisions)
        self._wake_later(left)
        if moment is None:
            self._arm(event)
        elif self.cluster.end is None:
            self._die(away, [one for one in arrived if self.random.random() < 0.5])

    def _act(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self.cluster.note("  ", decision)
            self.cluster.execute(decision)

    def _arm(self, event: JobEvent) -> None:
        at = self.job.deadline()
        if at is not None and at <= self.now and isinstance(event, Tick):
            raise Violation(f"the deadline {at} is not after the tick at {self.now}")
        if at is not None and at != self._alarm:
            self._alarm = at
            self.cluster.clock.after(max(0.0, at - self.now), lambda: self._tick(at, self.term))

    def _tick(self, at: float, term: int) -> None:
        if term == self.term and self.job.deadline() == at and self._alarm == at:
            self._alarm, self._reached = None, at
            self.deliver(Tick())

    # ---- two drivers -----------------------------------------------------------------------

    def _begins_to_wait(self, decisions: list[Decision], arrived: list[Arrived]) -> bool:
        """Hold the decisions back if etcd does not answer: nothing acts that it does not have."""
        cut, self.cut = self.cut, None
        if cut is None or self.dies is not None:
            return False
        self.cluster.note("!!", f"the driver of term {self.term} waits for etcd, {cut}")
        self.waits = Waiting(decisions, arrived)
        go_on = self.lose_to_standby if cut.replaced else self.go_on
        self.cluster.clock.after(cut.seconds, partial(go_on, self.term))
        self.waited += cut.seconds
        return True

    def go_on(self, term: int) -> None:
        """Etcd answers again: act, and take in what has come meanwhile."""
        waits = self.waits
        if waits is None or self.term != term:
            return
        self.waits = None
        self._act(waits.decisions)
        for event, sender in waits.arrived[waits.handled :]:
            if self.up:
                self.deliver(event, sender)
            else:
                self._not_heard((event, sender))
        if self.up and self.cluster.end is None:
            self.deliver(Tick())

    def lose_to_standby(self, term: int) -> None:
        """A standby has taken over: it has what etcd took, perhaps with the last event."""
        waits = self.waits
        if waits is None or self.term != term:
            return
        if self._second.random() < 0.5:
            self._journal.pop()
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

    def _write(self, now: float, event: JobEvent | EventBatch) -> None:
        if not self.mortal:
            return
        if len(self._journal) >= SNAPSHOT_EVERY:
            self._snapshot, self._journal = (self._journal[-1][0], self.job.snapshot()), []
        self._journal.append((now, event))

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
        if self.up or self.term != term or self.cluster.end is not None:
            return
        before = self.job
        last, snapshot = self._snapshot
        self.job = Job.restored(snapshot)
        lacking = self._lose_the_last() if self._late and not self.cluster.calm else 0
        for last, event in self._journal:
            self.job.handle(event, last)
        lacking += self._unwritten
        self._unwritten = False
        compared = not lacking and self.random.random() < COMPARED
        if compared and self.job.snapshot() != before.snapshot():
            raise Violation("the journal does not lead to the state that acted")
        self.term += 1
        self.up, self._base = True, self.cluster.clock.now - last
        self.cluster.note("!!", f"the driver of term {self.term} resumes")
        if (end := self.job.outcome.end) is not None:
            self.cluster.execute(end)
            return
        self.cluster.driver_comes()
        if self.deliver(DriverResumed(self.term, "the driver has died")):
            self.cluster.driver_is_back()
            self._replaced(before)

    def _lose_the_last(self) -> int:
        """Remove what a slow disk has not got from the journal; return the number of events."""
        most = self.random.choice(MOST_LACKING)
        lacking = min(self.random.randint(0, most), len(self._journal))
        self._journal = self._journal[: len(self._journal) - lacking]
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
