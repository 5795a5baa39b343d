"""States that differ: a rank goes wrong now and then, the watch sees it, and the job repairs it.

Each simulated worker holds a *kind* of state; members of a world that is right hold the same. The
watch looks every half second, as the real one does: it tells the job that all are equal, or that
they differ. Steps are not counted: only a repair makes kinds equal that differ.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from elastic_driver.job.events import StatesDiffer, StatesEqual
from elastic_driver.job.workers import ENDING
from tests.sim.workers import Group, Violation

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

SHARE = 1 / 3  # of the seeds have ranks that go wrong
LOOK_S = 0.5
PAUSE_S = 6.0  # between two ranks that go wrong, on average


class Differences:
    """Lets ranks go wrong, in some seeds, and tells the job what they hold."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.random = cluster, Random(f"differences of {seed}")
        self.planned = self.random.random() < SHARE
        self.repaired = 0  # worlds
        self._kinds = 0

    def differ_until(self, end: float) -> None:
        """Let a rank go wrong now and then, until this moment; look for as long as there is one."""
        if self.planned:
            self._go_wrong_later(end)
            self._look()

    def _go_wrong_later(self, end: float) -> None:
        pause = self.random.expovariate(1 / PAUSE_S)
        self.cluster.clock.after(pause, lambda: self._go_wrong(end))

    def _go_wrong(self, end: float) -> None:
        if self.cluster.clock.now >= end or self.cluster.end is not None:
            return
        group = self._trains()
        # A rank that goes wrong again before all were equal would end the job, and rightly so.
        if group is not None and self.cluster.job.differences.proven:
            self._kinds += 1
            worker = self.random.choice(list(group.members.values()))
            worker.kind = self._kinds
            self.cluster.note("!!", f"{worker.id} goes wrong")
        self._go_wrong_later(end)

    def _look(self) -> None:
        cluster, group = self.cluster, self._trains()
        if cluster.end is not None:
            return
        cluster.clock.after(LOOK_S, self._look)
        job = cluster.job
        over = job.outcome.finishing or job.workers.count(ENDING) or cluster.goal is not None
        if group is None or over or group.size == 1 or not cluster.driver.up:
            return
        kinds = {worker.kind for worker in group.members.values()}
        if len(kinds) > 1:
            cluster.deliver(StatesDiffer(group.round, 1, "kind", (), f"kinds {sorted(kinds)}"))
        else:
            cluster.deliver(StatesEqual(group.round, 1))

    def _trains(self) -> Group | None:
        """The newest group, if all of its members have finished a step and are still in it."""
        world = self.cluster.newest
        group = None if world is None else self.cluster.groups.get(world.round)
        if group is None or not group.training or len(group.members) < group.size:
            return None
        steps = (worker.stepped_in for worker in group.members.values())
        return group if all(step == group.round for step in steps) else None

    def begin(self, group: Group) -> None:
        """A group begins to train: newcomers get the state of the source, or all that of rank 0."""
        members = sorted(group.members.values(), key=lambda worker: worker.rank)
        clean = [worker for worker in members if worker.clean] or members
        source = max(clean, key=lambda worker: (worker.version, -worker.rank))
        for worker in members:
            lacks = (worker.version, worker.clean) != (source.version, True)
            if group.repair or lacks or source.version < 0:
                worker.kind = source.kind
        self.repaired += group.repair
        if group.repair and len({worker.kind for worker in members}) > 1:
            raise Violation(f"round {group.round} is repaired and its ranks differ")

    def check_quiet(self) -> None:
        """Nobody has gone wrong for a long while: the members hold the same state."""
        group = self._trains()
        kinds = set() if group is None else {worker.kind for worker in group.members.values()}
        if self.planned and len(kinds) > 1:
            raise Violation(f"quiet, but the members hold the states {sorted(kinds)}")
