"""The watch over a running job's ranks: which are slow, and who gets how much work (a `Machine`).

At each look the machine has the workers' progress keys read (`ReadKeys`), compares the times that
they report (`compute`, `links`) and moves work away from slow ranks (`balance`). Ranks that compute
slowly become events for the job, which may replace their workers. With `--balance`, ranks report
their share of a step; until all of them do, no work is moved.

A look takes at most a twentieth of the driver's time. Pure. Times are seconds.
"""

from collections.abc import Sequence
from statistics import median
from typing import ClassVar

import msgspec
from msgspec import Struct

from elastic_driver import contract
from elastic_driver.core.decisions import Announce
from elastic_driver.core.documents import Allocation, Progress, World, decode_progress, encode
from elastic_driver.core.events import RankRecovered, RankSlow, Tick
from elastic_driver.core.status import SlowStatus
from elastic_driver.policies.balance import Balancer, Cost, Move
from elastic_driver.policies.messages import KeysRead, MachineName, PublishKey, ReadKeys, SendEvent
from elastic_driver.policies.slow_links import LinkWatch
from elastic_driver.policies.slow_ranks import Change, Slowness, StragglerWatch

LOOK_S = 0.25  # as often as the workers of a small world send heartbeats
SHARE = 20.0  # after a look, the wait is at least so many times as long as the look took


class RoundPublished(Struct, frozen=True, tag="round_published"):
    """The job has published the world of a complete round."""

    machine: ClassVar[MachineName] = "stragglers"

    world: World


class Stragglers:
    """Watches the ranks of the newest complete round."""

    def __init__(self) -> None:
        self.step = 0  # committed steps, as the workers last reported
        self._world: World | None = None
        self._watch = StragglerWatch(())
        self._links = LinkWatch(())
        self._balancer = Balancer(())
        self._due: float | None = None
        self._seen = 0  # the newest revision that was read
        self._false_alarms = 0  # of earlier rounds

    # ---- the door ------------------------------------------------------------------------

    def handle(
        self, event: RoundPublished | KeysRead | Tick, now: float
    ) -> list[ReadKeys | PublishKey | SendEvent | Announce]:
        """Take in a new round, what was read, or the time for a look."""
        match event:
            case RoundPublished(world):
                self._enter(world)
                self._due = now + LOOK_S
                return []
            case KeysRead():
                self._due = now + max(LOOK_S, SHARE * event.seconds)
                return self._look(event)
            case Tick():
                self._due = None
                members = self._world.members if self._world is not None else ()
                keys = tuple(contract.worker_progress(member.worker) for member in members)
                return [ReadKeys("stragglers", keys, "a look at the ranks is due")]

    def deadline(self) -> float | None:
        """See `Machine.deadline`."""
        return self._due

    def check(self) -> list[str]:
        """See `Machine.check`."""
        size = self._world.size if self._world is not None else 0
        slow = (*self._watch.slow, *self._links.slow)
        return [f"rank {s.rank} of {size} is slow" for s in slow if not s.rank < size]

    def snapshot(self) -> bytes:
        """See `Machine.snapshot`."""
        costs = self._balancer.costs()
        return msgspec.json.encode((self.step, self._seen, self.false_alarms, self.status(), costs))

    # ---- what is known -------------------------------------------------------------------

    @property
    def false_alarms(self) -> int:
        """Alarms of the whole job that were withdrawn so soon that nothing was wrong."""
        return self._false_alarms + self._watch.false_alarms + self._links.false_alarms

    def status(self) -> tuple[SlowStatus, ...]:
        """Return the ranks that are slow now."""
        if self._world is None:
            return ()
        members = self._world.members
        return tuple(
            SlowStatus(s.rank, s.host, members[s.rank].worker, s.kind.value, s.ratio, s.step)
            for s in (*self._watch.slow, *self._links.slow)
        )

    # ---- rounds and looks ----------------------------------------------------------------

    def _enter(self, world: World) -> None:
        """Forget the round before, except the costs of a step for workers that stay."""
        self._false_alarms = self.false_alarms
        before = self._world.members if self._world is not None else ()
        costs = zip(before, self._balancer.costs(), strict=True)
        known = {member.worker: cost for member, cost in costs}
        hosts = [member.place.host for member in world.members]
        first_step = max(member.version for member in world.members) + 1
        self._world = world
        self._watch = StragglerWatch(hosts, first_step=first_step)
        self._links = LinkWatch(hosts)
        self._balancer = Balancer(hosts, known=[known.get(m.worker) for m in world.members])

    def _look(self, event: KeysRead) -> list[ReadKeys | PublishKey | SendEvent | Announce]:
        world = self._world
        if world is None:
            return []
        changes: list[Change] = []
        progress = self._progress(world, event)
        known = [each.step_time for each in progress if each is not None]
        self._watch.step_time = median(known) if known else self._watch.step_time
        for rank, each in enumerate(progress):
            if each is None:
                continue
            self.step = max(self.step, each.step)
            for sample in each.samples:
                changes += self._watch.report(rank, sample.step, sample.compute)
            if each.links is not None:
                self._links.report(rank, each.step, each.links)
            if each.division is not None:
                self._measure(rank, each)
        if known:
            changes += self._links.look(self._watch.step_time)
        move = self._balancer.decide()
        return [
            *(_event(c, world) for c in changes if c.slow.kind is Slowness.COMPUTE),
            *(_announce(change, world) for change in changes),
            *(() if move is None else _carry_out(move, world)),
        ]

    def _progress(self, world: World, event: KeysRead) -> list[Progress | None]:
        """By rank, the progress in this round; None where there is nothing new."""
        seen, self._seen = self._seen, max([self._seen, *(e[1] for e in event.entries.values())])
        found: list[Progress | None] = []
        for member in world.members:
            value, revision = event.entries.get(contract.worker_progress(member.worker), (b"", 0))
            progress = decode_progress(value) if revision > seen else None
            current = progress is not None and progress.round == world.round
            found.append(progress if current else None)
        return found

    def _measure(self, rank: int, progress: Progress) -> None:
        """Hand a rank's share and the costs of its steps to the balancer."""
        if progress.division is not None:
            self._balancer.divided(rank, progress.division)
        for sample in progress.samples:
            rest = max(sample.compute - sample.one_pass, 0.0) + sample.exchange
            self._balancer.measured(rank, sample.step, Cost(sample.one_pass, rest))


def _event(change: Change, world: World) -> SendEvent:
    slow = change.slow
    worker = world.members[slow.rank].worker
    if change.over:
        return SendEvent(RankRecovered(worker, world.round), "it is no longer slow")
    return SendEvent(RankSlow(worker, world.round, slow.ratio), slow.describe())


def _announce(change: Change, world: World) -> Announce:
    slow = change.slow
    over = f"rank {slow.rank} on {slow.host} is no longer slow"
    detail = {"kind": slow.kind.value, "ratio": round(slow.ratio, 3), "step": slow.step}
    return _about_rank(
        "rank_recovered" if change.over else "rank_slow",
        over if change.over else slow.describe(),
        world,
        slow.rank,
        detail,
    )


def _carry_out(move: Move, world: World) -> Sequence[PublishKey | Announce]:
    """Publish the new shares, and announce them with the rank that held the others up."""
    allocation = encode(Allocation(world.round, move.shares, move.reason))
    shares = " ".join(map(str, move.shares))
    return (
        PublishKey(contract.JOB_ALLOCATION, allocation, move.reason),
        _about_rank("work_moved", move.reason, world, move.last, {"shares": shares}),
    )


def _about_rank(
    event: str, reason: str, world: World, rank: int, detail: dict[str, str | float]
) -> Announce:
    member = world.members[rank]
    return Announce(
        event,
        reason,
        round=world.round,
        host=member.place.host,
        slot=member.place.slot,
        rank=rank,
        worker=member.worker,
        detail={**detail},
    )
