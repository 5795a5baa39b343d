"""Simulated workers: elastic ones that train in step, and plain ones that never speak.

They follow `docs/protocol.md`. A group trains in lock-step; it breaks when a member dies or
leaves early, and stalls while one is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic_driver.words.orders import Notice, SaveRequest, StartWorkerOrder, World
from elastic_driver.words.wire_events import (
    OutOfMemory,
    WorkerExited,
    WorkerReady,
    WorkerSaved,
    WorkerStepped,
)

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster, SimAgent

STEP_S = 0.2
AGAIN_S = 0.05  # between two attempts to reach a driver


class Violation(AssertionError):
    """Something that must never happen has happened."""


@dataclass(eq=False)
class Group:
    """The members of one round that train together."""

    round: int
    size: int
    members: dict[str, SimWorker] = field(default_factory=dict)
    training: bool = False
    broken: bool = False
    stuck: bool = False  # its members wait for each other, and nobody finishes a step
    repair: bool = False  # all its members take over the state of rank 0

    def stands_still(self) -> bool:
        """Whether no member can finish a step."""
        return self.stuck or any(w.frozen or w.agent.cut for w in self.members.values())


class SimWorker:
    """One worker process on a simulated host."""

    def __init__(self, cluster: Cluster, agent: SimAgent, order: StartWorkerOrder) -> None:
        self.cluster, self.agent, self.order = cluster, agent, order
        self.id = order.worker
        self.pid = 0
        self.driver = cluster.driver.term  # that it has found
        self.told_by = 0  # the term of the driver whose answer it reads
        self.alive = True
        self.frozen = False
        self.beats = False  # though frozen: only its training thread stands still
        self.doomed = False  # told to stop: peers and checks do not count on it
        self.group: Group | None = None
        self.left = 0
        self.version = -1
        self.kind = 0  # of its state: see `differences`
        self.clean = True
        self.ready = False
        self.stepped_in = self.rank = 0
        self.heard_version = -1  # in its last heartbeat before it was parted from the driver

    def soon(self, low: float, high: float) -> float:
        return self.cluster.random.uniform(low, high)

    def act(self, delay: float, action: str, *arguments: object) -> None:
        """Do something later, if the process then still lives; a frozen one does it on waking."""

        def moment() -> None:
            if not self.alive:
                return
            if self.frozen:
                self.act(0.2, action, *arguments)
                return
            getattr(self, action)(*arguments)

        self.cluster.clock.after(delay, moment)

    def boot(self) -> None:
        raise AssertionError("a kind of worker says how it boots")

    def break_from(self, group: Group) -> None:
        raise AssertionError("a kind of worker says what a lost peer does to it")

    def end(
        self, exit_code: int, *, victim: bool = False, short: OutOfMemory | None = None
    ) -> None:
        """The process is gone, whoever ended it."""
        if not self.alive:
            return
        self.alive = False
        group, self.group = self.group, None
        if group is not None and group.members.pop(self.id) and exit_code != 0:
            break_group(group)
        self.agent.reap(self, WorkerExited(self.id, exit_code, "log", victim, short))

    def finish_step(self, version: int) -> None:
        raise AssertionError("a kind of worker says what a step means to it")

    def hear(self, term: int, action: str, document: object) -> None:
        """See something that the driver of this term has published, if its answer gets here."""
        if self.cluster.hears(self, term):
            self.told_by = term
            getattr(self, action)(document)

    def find_driver(self, term: int) -> None:
        """Another driver has taken over: send again what no driver has answered."""
        driver = self.cluster.driver
        if self.agent.parted is not None:
            if driver.term == term:
                self.act(AGAIN_S, "find_driver", term)
        elif driver.up and driver.term == term and not self.agent.away:
            self.driver = term
            self.agent.flush_of(self.id)
            self.look_again(term)

    def look_again(self, term: int) -> None:
        """Read what this driver has published."""
        store = self.cluster
        found = {"see_world": store.world, "see_notice": store.notice, "see_save": store.save}
        for action, document in found.items():
            if document is not None:
                self.hear(term, action, document)

    def see_world(self, world: World) -> None:
        """A world was published, or is seen late."""

    def see_notice(self, notice: Notice) -> None:
        """A notice was published, or is seen late."""

    def see_save(self, request: SaveRequest) -> None:
        """Somebody is to put the state on disk."""


def break_group(group: Group) -> None:
    """A member is gone: the others notice within milliseconds."""
    if group.broken:
        return
    group.broken = True
    for worker in list(group.members.values()):
        worker.act(worker.soon(0.002, 0.03), "break_from", group)


class ElasticWorker(SimWorker):
    """Speaks to the driver: READY, trains, leaves at a boundary or when its group breaks."""

    notice: Notice | None = None
    told: WorkerReady | None = None
    met_in = 0  # the term of the driver that has published its world

    def boot(self) -> None:
        self.act(self.soon(0.2, 2.0), "become_ready", "booted")

    def become_ready(self, reason: str) -> None:
        self.ready = True
        self.group = None
        place = self.cluster.places.get(self.id, self.order.place)
        rank = place.rank if self.cluster.horovod and not self.left else -1
        about = (self.left, self.version, self.clean, reason)
        self.told = WorkerReady(self.id, *about, told=rank)
        self.cluster.post(self.agent, self.told)
        if self.cluster.world is not None:
            term, world = self.cluster.driver.term, self.cluster.world
            self.act(self.soon(0.0, 0.01), "hear", term, "see_world", world)

    def find_driver(self, term: int) -> None:
        super().find_driver(term)
        if self.agent.parted is not None:
            return
        if self.group is not None and not self.group.training and self.met_in < term:
            self.leave(clean=self.clean, reason="its meeting ended with the driver")
            return
        forgotten = self.cluster.driver.lacks > 0 or self.soon(0.0, 1.0) < 0.5
        if self.ready and self.told is not None and forgotten:
            self.cluster.post(self.agent, self.told)  # perhaps this driver does not know
        elif self.group is not None and self.rank == 0 and self.stepped_in == self.group.round:
            self.cluster.post(self.agent, WorkerStepped(self.id, self.group.round, self.version))

    def see_world(self, world: World) -> None:
        me = world.member(self.id)
        if not self.ready or world.round <= self.left or me is None:
            return
        self.ready = False
        group = self.cluster.group(world)
        self.group, self.rank = group, me.place.rank
        self.met_in = self.told_by
        self.notice = None
        group.members[self.id] = self
        if self.cluster.notice is not None:
            term, notice = self.cluster.driver.term, self.cluster.notice
            self.act(0.0, "hear", term, "see_notice", notice)
        if group.broken or self.cluster.someone_is_gone(world):
            group.broken = True
            self.act(self.soon(0.01, 0.1), "break_from", group)
        elif len(group.members) == group.size:
            self.cluster.begin_training(group)

    def see_notice(self, notice: Notice) -> None:
        if self.group is None or notice.round != self.group.round:
            return
        self.notice = notice
        if notice.after_step is None:
            self.break_from(self.group)

    def see_save(self, request: SaveRequest) -> None:
        if self.ready and self.id in request.members:
            self.act(self.soon(0.05, 1.0), "write", request)

    def write(self, request: SaveRequest) -> None:
        """Write a share; the first one tells when all have, which takes all of them."""
        mine = (self.version, self.clean) == (request.step, True)
        self.cluster.written.setdefault(request.number, set()).add(self.id if mine else "wrong")
        self.tell_saved(request)

    def tell_saved(self, request: SaveRequest) -> None:
        if self.id != request.members[0]:
            return
        if self.cluster.written[request.number] != set(request.members):
            self.act(0.1, "tell_saved", request)
            return
        self.cluster.on_disk = max(self.cluster.on_disk, request.step)
        self.cluster.post(self.agent, WorkerSaved(self.id, request.number, f"step-{request.step}"))

    def break_from(self, group: Group) -> None:
        if self.group is group:
            self.leave(clean=self.cluster.random.random() < 0.7, reason="the group broke")

    def leave(self, *, clean: bool, reason: str) -> None:
        group = self.group
        assert group is not None
        group.members.pop(self.id, None)
        self.left, self.clean = group.round, clean
        break_group(group)
        self.become_ready(reason)

    def finish_step(self, version: int) -> None:
        """The whole group has finished this step; maybe it is the one to leave after."""
        assert self.group is not None
        self.version, self.clean = version, True
        if self.stepped_in != self.group.round:
            self.stepped_in = self.group.round
            self.cluster.post(self.agent, WorkerStepped(self.id, self.group.round, version))
        after = self.notice.after_step if self.notice else None
        if after is not None and version >= after:
            self.leave(clean=True, reason="a step boundary")


class PlainWorker(SimWorker):
    """Trains with the peers it was born with; falls, or hangs, when one of them is lost."""

    def boot(self) -> None:
        self.act(self.soon(0.2, 2.0), "join")

    def join(self) -> None:
        group = self.cluster.birth_group(self.order)
        self.group = group
        group.members[self.id] = self
        if group.broken:
            self.act(self.soon(0.01, 0.1), "break_from", group)
        elif len(group.members) == group.size:
            self.cluster.begin_training(group)

    def break_from(self, group: Group) -> None:
        if self.group is group and self.cluster.random.random() < 0.6:
            self.end(1, victim=True)  # the others hang until they are stopped

    def finish_step(self, version: int) -> None:
        self.version = version
