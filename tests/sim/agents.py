"""A simulated agent: it carries out orders in sequence, and outlives its driver.

When another driver has taken over, it first says what nobody has heard, then what it runs, and
only then obeys. It refuses orders of an earlier driver.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from tests.sim.workers import AGAIN_S, ElasticWorker, PlainWorker, SimWorker

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

OWN = (ev.AgentReady, ev.AgentReturned, ev.HostLeaving, ev.WorkerStarted, ev.WorkerExited)
"""Events that agents send, one after another; workers send the others."""


@dataclass(eq=False)
class _OrderUnderWay:
    """An order that the agent has not read yet; `lost` with the store of its driver."""

    order: msg.Order
    term: int
    lost: bool = False


@dataclass(eq=False)
class Partition:
    """A time in which an agent and its workers are parted from a driver that lives."""

    mute: bool  # nothing that they send arrives
    deaf: bool  # no answer gets to them
    answers: int = field(init=False)  # to requests from before

    def __post_init__(self) -> None:
        self.answers = 0 if self.deaf else 1


@dataclass(eq=False)
class SimAgent:
    """An agent process; its workers end with it."""

    cluster: Cluster
    host: str
    incarnation: int
    term: int  # of the newest driver that it has reported to
    found: int = 0  # the term of the newest driver that it has begun to report to
    alive: bool = True
    cut: bool = False  # nothing it sends arrives, and it ends soon
    away: bool = False  # it cannot reach the driver; its peers can reach it
    late: float = 0.0  # of 1: in finding a driver that has taken over
    parted: Partition | None = None  # from the driver; its peers can reach it
    held: list[_OrderUnderWay] = field(default_factory=list)  # not read while it is parted
    back_at: float = -math.inf  # when it could reach the driver again
    silent_at: float = -math.inf  # when a probe of it had no answer
    sealed: bool = False  # its keys are refused: it ends when it hears of that
    heeds_terms: ClassVar[bool] = True
    ready: ev.AgentReady | None = None
    workers: dict[str, SimWorker] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    ended: dict[str, ev.WorkerExited] = field(default_factory=dict)
    orders_until: float = 0.0  # orders arrive in the order they were given
    orders: list[_OrderUnderWay] = field(default_factory=list)
    later: list[_OrderUnderWay] = field(
        default_factory=list
    )  # of a driver that it has to report to
    telling: bool = False  # its story is under way; what happens now is told afterwards
    under_way: int = 0  # reports of its own that are not answered
    unanswered: list[ev.WireEvent] = field(default_factory=list)

    @property
    def name(self) -> tuple[str, int]:
        """Host and incarnation."""
        return self.host, self.incarnation

    @property
    def reachable(self) -> bool:
        """Whether the driver and the agent can talk to each other."""
        return self.alive and not self.cut and not self.away and self.parted is None

    def come_up(self, ready: ev.AgentReady) -> None:
        """The process takes orders."""
        if self.alive:
            self.ready = ready
            self.cluster.post(self, ready)

    # ---- orders --------------------------------------------------------------------------

    def receive(self, order: msg.Order, term: int) -> None:
        """Take an order of the driver of this term, after the ones before."""
        clock, under_way = self.cluster.clock, _OrderUnderWay(order, term)
        self.orders.append(under_way)
        self.orders_until = max(self.orders_until, clock.now + self.cluster.delay())
        clock.after(self.orders_until - clock.now, lambda: self._read(under_way))

    def lose_orders(self, kept: int) -> None:
        """The driver has died, and with it what was not read: all but the first `kept` orders."""
        for under_way in self.orders[0 if self.held else kept :]:
            under_way.lost = True

    def _read(self, read: _OrderUnderWay) -> None:
        if self.parted is not None and not read.lost:
            if self.held or not self.parted.answers:
                self.held.append(read)
                return
            self.parted.answers -= 1
        self.orders.remove(read)
        if read.lost or not self.alive or self.cut:
            return
        if self.heeds_terms and read.term < max(self.term, self.found):
            self.cluster.refused += 1
        elif self.heeds_terms and read.term > self.term:
            self.later.append(read)
        else:
            self._carry_out(read)

    def _carry_out(self, read: _OrderUnderWay) -> None:
        self.cluster.check_term(self, read.term)
        order = read.order
        if isinstance(order, msg.StartWorkerOrder):
            if order.worker not in self.started:
                self._start(order)
            elif order.worker in self.ended:  # the driver that got the report has died
                self.cluster.post(self, self.ended[order.worker])
        elif isinstance(order, msg.StopWorkerOrder):
            worker = self.workers.get(order.worker)
            if worker is not None:
                self._stop(worker, order.grace)
        elif isinstance(order, msg.ShutdownOrder):
            self.die()

    def _start(self, order: msg.StartWorkerOrder) -> None:
        kind = ElasticWorker if self.cluster.elastic else PlainWorker
        newcomer = kind(self.cluster, self, order)
        self.cluster.check_slot(newcomer)
        self.started.add(newcomer.id)
        self.workers[newcomer.id] = newcomer
        newcomer.pid = self.cluster.next_pid()
        self.cluster.post(self, ev.WorkerStarted(newcomer.id, newcomer.pid))
        newcomer.boot()

    def _stop(self, worker: SimWorker, grace: float) -> None:
        worker.doomed = True
        heeds = not worker.frozen and grace > 0 and self.cluster.random.random() < 0.8
        delay = self.cluster.random.uniform(0.001, 0.1) if heeds else grace + 0.005
        self.cluster.clock.after(delay, lambda: worker.end(-15 if heeds else -9))

    def reap(self, worker: SimWorker, event: ev.WorkerExited) -> None:
        """A worker's process is gone."""
        self.workers.pop(worker.id, None)
        self.ended[worker.id] = event
        if self.alive:
            self.cluster.post(self, event)

    def die(self) -> None:
        """The agent is gone, and its workers with it."""
        self.alive = False
        for worker in list(self.workers.values()):
            worker.end(-9)

    # ---- partitions ----------------------------------------------------------------------

    def reunite(self) -> None:
        """The partition is over: send what got no answer, and take the orders that came meanwhile.

        One that was given up ends. (A real one ends within moments, and the next one on its host
        cannot start workers before.) One that knows no driver yet goes on to look for it.
        """
        self.parted, self.back_at = None, self.cluster.clock.now
        held, self.held = self.held, []
        if self.alive:
            self.cluster.reunited[not self.sealed] += 1
        if self.alive and self.sealed:
            self.die()
        if self.alive and self.term == self.cluster.driver.term:
            self.flush()
            for worker in self.workers.values():
                worker.act(self.cluster.delay(), "look_again", self.term)
        for read in held:
            self._read(read)

    # ---- drivers that come and go --------------------------------------------------------

    def come_back(self, term: int) -> None:
        """Report to the driver of this term, if it is still the one: what happened, what runs."""
        driver = self.cluster.driver
        if not self.alive or self.cut or not driver.up or driver.term != term:
            return
        if self.away:
            self.away, self.back_at = False, self.cluster.clock.now
        if self.parted is not None:
            self.cluster.clock.after(AGAIN_S, lambda: self.come_back(term))
            return
        if self.sealed:
            self.die()
            return
        if (
            self.under_way or self.telling or self.ready is None
        ):  # it waits for answers, or is not up yet
            self.cluster.clock.after(0.005, lambda: self.come_back(term))
            return
        own = [event for event in self.unanswered if isinstance(event, OWN)]
        self.unanswered = [event for event in self.unanswered if not isinstance(event, OWN)]
        for event in own:
            self.cluster.post(self, event, again=True)
        if own:
            self.come_back(term)  # once these are answered
            return
        self._tell_story(term)

    def _tell_story(self, term: int) -> None:
        assert self.ready is not None
        up = {name: getattr(self.ready, name) for name in self.ready.__struct_fields__}
        running = tuple(ev.RunningWorker(w.id, w.pid) for w in self.workers.values())
        self.telling, self.found = True, term
        self.cluster.clock.after(
            self.cluster.delay(),
            partial(self._story_arrives, ev.AgentReturned(**up, term=term, workers=running)),
        )

    def _story_arrives(self, story: ev.AgentReturned) -> None:
        self.telling = False
        driver = self.cluster.driver
        if not self.alive or self.cut or self.away or driver.term != story.term:
            return
        if self.parted is not None and self.parted.mute:
            self.come_back(story.term)
            return
        if not driver.deliver(story):
            return  # the driver has died, perhaps because of it
        if self.parted is not None:  # it gets no answer, and tells its story again
            self.come_back(story.term)
            return
        self.term = story.term
        for worker in self.workers.values():
            worker.act(0.0, "find_driver", story.term)
        orders, self.later = self.later, []
        for read in orders:
            if read.term == self.term and self.alive:
                self._carry_out(read)
        self.flush()

    def flush(self) -> None:
        """Send again what got no answer; workers do so themselves, if they live."""
        events, self.unanswered = self.unanswered, []
        for event in events:
            if isinstance(event, OWN) or event.worker in self.workers:
                self.cluster.post(self, event, again=True)

    def flush_of(self, worker: str) -> None:
        """Send again what this worker got no answer to."""
        again = [e for e in self.unanswered if not isinstance(e, OWN) and e.worker == worker]
        self.unanswered = [event for event in self.unanswered if event not in again]
        for event in again:
            self.cluster.post(self, event, again=True)
