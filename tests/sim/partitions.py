"""Partitions between agents and a living driver: messages are lost or late, then all is well again.

An agent that is *mute* cannot reach the driver: it is silent, and its workers with it. A *deaf* one
gets no answers: what it sends arrives, and is sent again later. Orders are answers, so neither gets
any, except that the last request of a mute agent may still be answered. Its peers reach it all the
time, so its workers train on. If the driver gives it up meanwhile, it ends when it hears of that.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from elastic_driver.job.events import AgentHeard, AgentSuspected, LeaseExpired
from elastic_driver.words.wire_events import Event
from tests.sim.agents import Partition, SimAgent

if TYPE_CHECKING:
    from tests.sim.faults import Faults
    from tests.sim.workers import SimWorker

SHARE = 0.4  # of the seeds have partitions
ALL_AT_ONCE = 0.15  # of the partitions are of every agent: the driver's own link is down
PAUSE_S = 5.0  # between two, on average
BOTH_WAYS_OR_ONE = [(True, True), (True, False), (False, True)]  # mute, deaf
SILENT_S = 1.0
HEARTBEAT_S = 2.0


class Partitions:
    """Cuts agents off from the driver for a while, in some seeds, until told to stop."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults, self.cluster = faults, faults.cluster
        self.random = Random(f"partitions of {seed}")
        self._planned = self.random.random() < SHARE
        self._open: list[SimAgent] = []
        self.cluster.back.append(self._driver_is_back)

    def part_until(self, end: float) -> None:
        """Begin a partition now and then, until this moment."""
        if self._planned:
            self._next(end)

    def heal_all(self) -> None:
        """End every partition."""
        for agent in tuple(self._open):
            self._heal(agent, agent.parted)

    def _next(self, end: float) -> None:
        pause = self.random.expovariate(1 / PAUSE_S)
        self.cluster.clock.after(pause, partial(self._part_some, end))

    def _part_some(self, end: float) -> None:
        if self.cluster.clock.now >= end or self.cluster.end is not None:
            return
        whole = [a for a in self.cluster.every_agent() if a.parted is None and not a.cut]
        if whole:
            everybody = self.random.random() < ALL_AT_ONCE
            seconds = self.random.choice([0.2, self.random.uniform(0.2, 2.0), 3.0, 6.0])
            mute, deaf = self.random.choice([(True, True), *BOTH_WAYS_OR_ONE])
            for agent in whole if everybody else [self.random.choice(whole)]:
                self._part(agent, Partition(mute=mute, deaf=deaf), seconds)
        self._next(end)

    def _part(self, agent: SimAgent, partition: Partition, seconds: float) -> None:
        clock = self.cluster.clock
        what = f"{agent.name} is parted from the driver for {seconds} s, {partition}"
        self.cluster.note("!!", what)
        agent.parted = partition
        self._open.append(agent)
        clock.after(seconds, partial(self._heal, agent, partition))
        if partition.mute:
            clock.after(SILENT_S, partial(self._tell, agent, partition, self._silent(agent)))
            name = f"{agent.host}.{agent.incarnation}"
            lost = LeaseExpired("agent", name, HEARTBEAT_S)
            late = HEARTBEAT_S + self.random.uniform(0.0, 0.01)
            clock.after(late, partial(self._tell, agent, partition, lost))
            self._expire_leases(agent, partition)
        elif self.random.random() < 0.5:  # its heartbeats arrive
            broken = AgentSuspected(*agent.name, "disconnected", "a connection of it broke")
            self.cluster.deliver(broken)
            heard = self.random.uniform(0.0, HEARTBEAT_S / 3)
            clock.after(heard, partial(self._tell, agent, partition, AgentHeard(*agent.name)))

    @staticmethod
    def _silent(agent: SimAgent) -> AgentSuspected:
        return AgentSuspected(*agent.name, "silent", "it is silent")

    def _expire_leases(self, agent: SimAgent, partition: Partition) -> None:
        """Let the leases of its workers end, which cannot be renewed."""
        for worker in agent.workers.values():
            worker.heard_version = worker.version
            if self.cluster.elastic and (worker.ready or worker.group is not None):
                self._expire_lease(agent, partition, worker)

    def _expire_lease(self, agent: SimAgent, partition: Partition, worker: SimWorker) -> None:
        half = LeaseExpired("half", worker.id, HEARTBEAT_S)
        whole = LeaseExpired("worker", worker.id, HEARTBEAT_S)
        for delay, event in ((HEARTBEAT_S / 2, half), (HEARTBEAT_S, whole)):
            late = delay + self.random.uniform(0.0, 0.01)
            self.cluster.clock.after(late, partial(self._tell, agent, partition, event))

    def _tell(self, agent: SimAgent, partition: Partition, event: Event) -> None:
        """Hand the driver an event about an agent that is still parted from it."""
        if agent.alive and agent.parted is partition:
            self.cluster.deliver(event)

    def _driver_is_back(self) -> None:
        """Another driver watches the leases of workers that cannot reach it either."""
        for agent in self._open:
            if agent.parted is not None and agent.parted.mute:
                for worker in agent.workers.values():
                    if worker.id in self.cluster.leases:
                        self._expire_lease(agent, agent.parted, worker)

    def _heal(self, agent: SimAgent, partition: Partition | None) -> None:
        if partition is None or agent.parted is not partition:
            return
        self._open.remove(agent)
        if agent.alive:
            self.cluster.note("!!", f"{agent.name} is not parted from the driver any more")
        agent.reunite()
        delay = self.random.uniform(0.0, HEARTBEAT_S / 3)
        self.cluster.clock.after(delay, partial(self._hear, agent, self.cluster.driver.term))

    def _hear(self, agent: SimAgent, term: int) -> None:
        """Its first heartbeat after the partition arrives, if this driver knows it."""
        known = agent.term == term == self.cluster.driver.term
        if known and agent.reachable and not agent.sealed:
            self.cluster.deliver(AgentHeard(*agent.name))
