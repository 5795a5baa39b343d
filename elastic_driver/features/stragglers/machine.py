"""The watch over a running job's ranks: it finds slow ranks and moves work (a `Machine`).

At each *look* the machine reads the workers' progress (`ReadKeys`), compares the times in it
(`slowness`) and moves work away from slow ranks (`balance`). A rank that computes
slowly becomes an event for the job, which may replace its worker. With `--balance`, ranks report
their share of a step; until all of them do, no work is moved.

The same looks compare the states that the ranks hold and the commits that they make
(`states`). A difference of states becomes an event for the job.

A look takes at most a twentieth of the driver's time. Pure. Times are seconds.
"""

from statistics import median
from typing import ClassVar

from msgspec import Struct

from elastic_driver import contract
from elastic_driver.features.stragglers.balance import Balancer, Cost
from elastic_driver.features.stragglers.slowness import Change, LinkWatch, Slowness, StragglerWatch
from elastic_driver.features.stragglers.states import Question, StateWatch, Told, find_oddity
from elastic_driver.job.decisions import Announce, PublishWorld
from elastic_driver.job.events import RankRecovered, RankSlow, StatesDiffer, StatesEqual, Tick
from elastic_driver.job.status import SlowStatus
from elastic_driver.kernel.log import LogEvent
from elastic_driver.kernel.machine import Declaration
from elastic_driver.kernel.services import KeysRead, PublishKey, ReadKeys, SendEvent
from elastic_driver.words import log_events as log
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.orders import Allocation, StateQuestion, World, encode
from elastic_driver.words.progress import Progress, decode_progress
from elastic_driver.words.wire_events import StateDescribed, WorkerEnding

LOOK_S = 0.25  # seconds between looks; workers of a small world send heartbeats as often
SHARE = 20.0  # the wait after a look is at least this many times as long as the look


class RoundPublished(Struct, frozen=True, tag="round_published"):
    """The job has published the world of a complete round."""

    machine: ClassVar[str] = "stragglers"

    world: World


Taken = RoundPublished | KeysRead | StateDescribed | WorkerEnding | Tick
Decided = ReadKeys | PublishKey | SendEvent | Announce


class Stragglers:
    """Watches the ranks of the newest complete round."""

    def __init__(self) -> None:
        self.step = 0  # committed steps, as the workers last reported
        self.round_step = 0  # the same of this round: some steps may be trained again
        self.progress: dict[str, Progress] = {}  # the newest of each member, by worker
        self._world = World(0, (), "no round is complete yet")
        self._watch = StragglerWatch(())
        self._links = LinkWatch(())
        self._balancer = Balancer(())
        self._states = StateWatch()
        self._ranks: dict[str, int] = {}  # by worker
        self._told_equal = self._told_oddity = False  # of this round
        self._due: float | None = None
        self._seen = 0  # the newest revision that was read
        self._false_alarms = 0  # of earlier rounds

    # ---- a machine's methods -------------------------------------------------------------

    def handle(self, event: Taken, now: float) -> list[Decided]:
        """Take in a new round, what was read or sent, or the time for a look."""
        match event:
            case RoundPublished(world):
                self._enter(world)
                self._due = now + LOOK_S
                return []
            case KeysRead():
                self._due = now + max(LOOK_S, SHARE * event.seconds)
                return [*self._look(event, now), *self._compare(now), *self._commits()]
            case StateDescribed(worker=worker, round=number):
                if number == self._world.round and worker in self._ranks:
                    self._states.described(self._ranks[worker], event)
                return self._compare(now)
            case WorkerEnding(worker=worker, round=number, marks=marks):
                if number == self._world.round and worker in self._ranks:
                    self._come_to(event.step)
                    self._states.report(self._ranks[worker], marks, now)
                    self._states.ended(self._ranks[worker], event.leaves)
                return self._compare(now)
            case Tick():
                self._due = None
                keys = tuple(contract.worker_progress(m.worker) for m in self._world.members)
                return [ReadKeys("stragglers", keys, "a look at the ranks is due")]

    def deadline(self) -> float | None:
        """See `Machine.deadline`."""
        return self._due

    def check(self) -> list[str]:
        """See `Machine.check`."""
        size, slow = self._world.size, (*self._watch.slow, *self._links.slow)
        return [f"rank {s.rank} of {size} is slow" for s in slow if not s.rank < size]

    @property
    def world(self) -> World:
        """The world of the newest complete round."""
        return self._world

    @property
    def false_alarms(self) -> int:
        """The number of false alarms in the whole job: alarms that were soon withdrawn."""
        return self._false_alarms + self._watch.false_alarms + self._links.false_alarms

    @property
    def step_time(self) -> float:
        """Seconds of the usual rank's last step, waiting included; 0: not known yet."""
        return self._watch.step_time

    def status(self) -> tuple[SlowStatus, ...]:
        """Return the ranks that are slow now."""
        members = self._world.members
        return tuple(
            SlowStatus(s.rank, s.host, members[s.rank].worker, s.kind.value, s.ratio, s.step)
            for s in (*self._watch.slow, *self._links.slow)
        )

    # ---- rounds and looks ----------------------------------------------------------------

    def _enter(self, world: World) -> None:
        """Forget the round before, except the costs of a step for workers that stay."""
        self._false_alarms = self.false_alarms
        costs = zip(self._world.members, self._balancer.costs(), strict=True)
        known = {member.worker: cost for member, cost in costs}
        hosts = [member.place.host for member in world.members]
        first_step = max(member.version for member in world.members) + 1
        self._world, self.round_step = world, 0
        self._states = StateWatch(world.size)
        self._told_equal = self._told_oddity = False
        members = self._ranks = {m.worker: rank for rank, m in enumerate(world.members)}
        self.progress = {w: each for w, each in self.progress.items() if w in members}
        self._watch = StragglerWatch(hosts, first_step=first_step)
        self._links = LinkWatch(hosts)
        self._balancer = Balancer(hosts, known=[known.get(m.worker) for m in world.members])

    def _look(self, event: KeysRead, now: float) -> list[Decided]:
        changes: list[Change] = []
        progress = self._progress(event, now)
        if progress:
            self._watch.step_time = median(each.step_time for each in progress.values())
        for rank, each in progress.items():
            self._come_to(each.step)
            for sample in each.samples:
                changes += self._watch.report(rank, sample.step, sample.compute)
            if each.links is not None:
                self._links.report(rank, each.step, each.links)
            if each.division is not None:
                self._balancer.divided(rank, each.division)
                for sample in each.samples:
                    rest = max(sample.compute - sample.one_pass, 0.0) + sample.exchange
                    self._balancer.measured(rank, sample.step, Cost(sample.one_pass, rest))
        if progress:
            changes += self._links.look(self._watch.step_time)
        events = [self._event(c) for c in changes if c.slow.kind is Slowness.COMPUTE]
        return [*events, *map(self._announce, changes), *self._balance()]

    def _come_to(self, step: int) -> None:
        self.round_step = max(self.round_step, step)
        self.step = max(self.step, self.round_step)

    def _progress(self, event: KeysRead, now: float) -> dict[int, Progress]:
        """Return the ranks' new progress in this round, by rank; note their marks."""
        seen, self._seen = self._seen, max([self._seen, *(e[1] for e in event.entries.values())])
        found: dict[int, Progress] = {}
        for rank, member in enumerate(self._world.members):
            value, revision = event.entries.get(contract.worker_progress(member.worker), (b"", 0))
            progress = decode_progress(value) if revision > seen else None
            if progress is None or progress.round != self._world.round:
                continue
            self.progress[member.worker] = progress
            self._states.report(rank, progress.marks, now)
            if progress.reported is None:  # it has committed a step in this round
                found[rank] = progress
        return found

    # ---- states and commits --------------------------------------------------------------

    def _compare(self, now: float) -> list[Decided]:
        """Compare the states of the ranks, as far as they are known."""
        number, states = self._world.round, self._states
        decided: list[Decided] = []
        if states.equal_step is not None and not self._told_equal and self._world.size > 1:
            self._told_equal = True
            equal = StatesEqual(number, states.equal_step)
            decided.append(SendEvent(equal, f"all ranks are equal after step {equal.step}"))
        match states.look(now):
            case Question(step, ranks):
                asked = tuple(self._world.members[rank].worker for rank in ranks)
                question = encode(StateQuestion(number, step, asked))
                why = f"the ranks hold different states after step {step}"
                decided.append(PublishKey(contract.JOB_STATE, question, why))
            case Told(step, (leaf, values, reason)):
                decided.append(SendEvent(StatesDiffer(number, step, leaf, values, reason), reason))
        return decided

    def _commits(self) -> list[Announce]:
        """Announce, once a round, that some ranks commit and others do not."""
        if self._told_oddity:
            return []
        found = find_oddity(
            {
                self._ranks[worker]: progress
                for worker, progress in self.progress.items()
                if progress.round == self._world.round
            }
        )
        if found is None:
            return []
        self._told_oddity = True
        what = log.CommitsDiffer(kind=found.kind, ranks=" ".join(map(str, found.ranks)))
        return [Announce(what, found.reason, self._world.round)]

    # ---- decisions -----------------------------------------------------------------------

    def _event(self, change: Change) -> SendEvent:
        slow, number = change.slow, self._world.round
        worker = self._world.members[slow.rank].worker
        if change.over:
            return SendEvent(RankRecovered(worker, number), "it is no longer slow")
        return SendEvent(RankSlow(worker, number, slow.ratio), slow.describe())

    def _announce(self, change: Change) -> Announce:
        slow = change.slow
        kind, ratio = slow.kind.value, round(slow.ratio, 3)
        if change.over:
            reason = f"rank {slow.rank} on {slow.host} is no longer slow"
            over = worker_log.RankRecovered(kind=kind, ratio=ratio, step=slow.step)
            return self._about_rank(over, reason, slow.rank)
        share = round(slow.share(self._watch.step_time), 3)
        what = worker_log.RankSlow(kind=kind, ratio=ratio, step=slow.step, share=share)
        return self._about_rank(what, slow.describe(), slow.rank)

    def _balance(self) -> list[PublishKey | Announce]:
        """Publish new shares, if there are any, and announce them with the rank that came last."""
        move = self._balancer.decide()
        if move is None:
            return []
        allocation = encode(Allocation(self._world.round, move.shares, move.reason))
        moved = worker_log.WorkMoved(shares=" ".join(map(str, move.shares)))
        return [
            PublishKey(contract.JOB_ALLOCATION, allocation, move.reason),
            self._about_rank(moved, move.reason, move.last),
        ]

    def _about_rank(self, what: LogEvent, reason: str, rank: int) -> Announce:
        member = self._world.members[rank]
        place = (member.place.host, member.place.slot, rank, None, member.worker)
        return Announce(what, reason, self._world.round, *place)


MACHINES = (
    Declaration(
        name="stragglers",
        events=Taken,
        decisions=Decided,
        new=lambda _lease: Stragglers(),
        hears={"job": (WorkerEnding,)},
        follows={PublishWorld: lambda decision: RoundPublished(decision.world)},
    ),
)
