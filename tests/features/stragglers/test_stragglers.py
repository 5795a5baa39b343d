"""From the progress that workers write to announcements, events and moved work."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_driver import contract
from elastic_driver.features.stragglers.machine import LOOK_S, SHARE, RoundPublished, Stragglers
from elastic_driver.job.decisions import Announce
from elastic_driver.job.events import RankRecovered, RankSlow, StatesDiffer, StatesEqual, Tick
from elastic_driver.job.status import SlowStatus
from elastic_driver.kernel.services import KeysRead, PublishKey, ReadKeys, SendEvent
from elastic_driver.words.findings import StateValue
from elastic_driver.words.orders import Allocation, StateQuestion, World, decode, encode
from elastic_driver.words.progress import Division, Progress, Sample, StateMark
from elastic_driver.words.wire_events import Event, LeafMark, StateDescribed, WorkerEnding
from elastic_driver.words.world import Member, SlotInfo

USUAL, SLOW = 0.1, 0.4


def world(size: int = 3, *, round_id: int = 1, version: int = 0) -> World:
    members = tuple(
        Member(f"{host}.0.1", SlotInfo(host, 0, rank, 0, 0, size, 1, 1, rank, size), version)
        for rank, host in enumerate("abcdef"[:size])
    )
    return World(round_id, members, "test")


def sample(step: int, seconds: float) -> Sample:
    return Sample(step, seconds, seconds)


class Bench:
    """The machine under test, with a store and a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.entries: dict[str, tuple[bytes, int]] = {}
        self.revision = 0
        self.takes = 0.0
        self.answers = True
        self.step_time = 0.5
        self.sent: list[Event] = []
        self.published: list[Allocation] = []
        self.asked: list[StateQuestion] = []
        self.machine = Stragglers()

    def enter(self, found: World) -> None:
        assert self.machine.handle(RoundPublished(found), self.now) == []

    def look(self) -> list[Announce]:
        """A look; what was announced."""
        announced = []
        for asked in self.machine.handle(Tick(), self.now):
            assert isinstance(asked, ReadKeys)
            assert self.machine.deadline() is None
            self.now += self.takes
            found = {k: self.entries[k] for k in asked.keys if k in self.entries}
            read = KeysRead("stragglers", asked.keys, found if self.answers else {}, self.takes)
            announced += self.hand_in(read)
        return announced

    def hand_in(self, event: KeysRead | StateDescribed | WorkerEnding) -> list[Announce]:
        """Hand in an event; what was announced."""
        announced = []
        for decision in self.machine.handle(event, self.now):
            match decision:
                case SendEvent(event=event):
                    self.sent.append(event)
                case PublishKey(key=contract.JOB_STATE, value=value):
                    self.asked.append(decode(StateQuestion, value))
                case PublishKey(key=key, value=value):
                    assert key == contract.JOB_ALLOCATION
                    self.published.append(decode(Allocation, value))
                case Announce():
                    announced.append(decision)
        assert self.machine.check() == []
        return announced

    def mark(self, step: int, *digests: str, round_id: int = 1, **more: int) -> list[Announce]:
        """Each rank marks its state after a step, and there is a look; what was announced."""
        for rank, digest in enumerate(digests):
            marks = (StateMark(step, digest),) if digest else ()
            self.revision += 1
            document = Progress(round_id, step, self.step_time, marks=marks, **more)
            worker = world().members[rank].worker
            self.entries[contract.worker_progress(worker)] = encode(document), self.revision
        return self.look()

    def write(
        self,
        rank: int,
        samples: Sequence[Sample],
        round_id: int = 1,
        *,
        step: int = 0,
        division: Division | None = None,
    ) -> None:
        self.revision += 1
        step = samples[-1].step if samples else step
        document = Progress(round_id, step, self.step_time, tuple(samples), division)
        worker = world().members[rank].worker
        self.entries[contract.worker_progress(worker)] = encode(document), self.revision

    def train(self, first: int, last: int, slow: int | None) -> list[str]:
        """Beats of eight steps each, and a look after each; the events there were."""
        events = []
        for step in range(first, last, 8):
            for rank in range(3):
                seconds = SLOW if rank == slow else USUAL
                self.write(rank, [sample(s, seconds) for s in range(step, step + 8)])
            events += [event.event for event in self.look()]
        return events


def test_the_share_of_a_slow_rank_is_that_of_a_stopwatch_beside_the_steps() -> None:
    bench, rest, waited, trained = Bench(), 0.3, 0.0, 0.0  # of a step, 0.3 s is no computing
    bench.enter(world())
    bench.step_time = USUAL + rest
    assert bench.train(1, 81, slow=None) == []
    (event,) = [
        event
        for step in range(81, 121, 8)
        for event in slowed_beat(bench, step, step_time=SLOW + rest)
    ]
    for _ in range(100):  # the stopwatch: every rank waits until the slow one has computed
        waited, trained = waited + SLOW - USUAL, trained + SLOW + rest
    assert abs(event.what.facts()["share"] - waited / trained) < 0.01
    assert 1 - 1 / event.what.facts()["ratio"] > 1.7 * waited / trained, "computing is not all"


def slowed_beat(bench: Bench, step: int, *, step_time: float) -> list[Announce]:
    """Eight steps in which rank 1 is slow, each of this time, and a look."""
    bench.step_time = step_time
    for rank in range(3):
        seconds = SLOW if rank == 1 else USUAL
        bench.write(rank, [sample(s, seconds) for s in range(step, step + 8)])
    return bench.look()


def test_a_slow_rank_is_announced_shown_and_announced_again_when_it_has_recovered() -> None:
    bench = Bench()
    bench.enter(world())
    assert bench.train(1, 81, slow=None) == []
    for rank in range(3):
        bench.write(rank, [sample(s, SLOW if rank == 1 else USUAL) for s in range(81, 111)])
    (event,) = bench.look()
    assert (event.event, event.rank, event.host, event.worker) == ("rank_slow", 1, "b", "b.0.1")
    assert "rank 1 on b is slow (compute): 4.0 times the usual time" in event.reason
    assert event.what.facts()["step"] <= 110, "within 30 steps"
    assert bench.machine.status() == (SlowStatus(1, "b", "b.0.1", "compute", 4.0, 94),)
    assert bench.sent == [RankSlow("b.0.1", 1, 4.0)]
    assert bench.train(111, 151, slow=None) == ["rank_recovered"]
    assert bench.machine.status() == ()
    assert bench.sent[1:] == [RankRecovered("b.0.1", 1)]
    assert bench.machine.false_alarms == 1, "the alarm was withdrawn after fewer than 50 steps"


def test_a_new_round_is_watched_anew_and_the_false_alarms_stay_counted() -> None:
    bench = Bench()
    bench.enter(world())
    bench.train(1, 41, slow=None)
    bench.train(41, 73, slow=2)
    bench.train(73, 113, slow=None)
    assert bench.machine.false_alarms == 1
    bench.enter(world(round_id=2, version=112))
    assert bench.machine.false_alarms == 1
    bench.train(113, 153, slow=0)
    assert bench.machine.status() == (), "these reports are of round 1, which is over"


def test_steps_before_the_round_are_not_counted() -> None:
    bench = Bench()
    bench.enter(world(version=200))
    bench.train(1, 201, slow=0)
    assert bench.machine.status() == ()
    bench.train(201, 241, slow=0)
    assert [slow.rank for slow in bench.machine.status()] == [0]


def test_alone_nobody_is_slow_but_the_step_is_known() -> None:
    bench = Bench()
    assert bench.machine.deadline() is None
    bench.enter(world(1))
    assert bench.machine.deadline() == bench.now + LOOK_S
    assert bench.machine.step == 0
    assert bench.train(1, 81, slow=0) == []
    assert bench.machine.step == 80


def test_what_is_not_a_progress_document_is_passed_over() -> None:
    bench = Bench()
    bench.enter(world())
    bench.train(1, 81, slow=1)
    key = contract.worker_progress("a.0.1")
    for junk in (b"", b"{}", b'{"round":1,"step":9,"step_time":1,"samples":[[9,-1]]}'):
        bench.revision += 1
        bench.entries[key] = junk, bench.revision
        assert bench.look() == []
    assert [slow.rank for slow in bench.machine.status()] == [1]


def test_looks_never_take_much_of_the_drivers_time() -> None:
    bench = Bench()
    bench.enter(world())
    assert bench.machine.deadline() == bench.now + LOOK_S
    bench.look()
    assert bench.machine.deadline() == bench.now + LOOK_S
    bench.takes = 1.0
    bench.look()
    assert bench.machine.deadline() == bench.now + SHARE


def test_a_store_that_does_not_answer_is_asked_again_later() -> None:
    bench = Bench()
    bench.enter(world())
    bench.answers = False
    assert bench.train(1, 41, slow=1) == []
    bench.answers = True
    assert bench.train(41, 81, slow=1) == ["rank_slow"]


# ---- moved work --------------------------------------------------------------------------


def share(
    bench: Bench, first: int, shares: tuple[int, ...], *, slow: int | None = 1
) -> list[Announce]:
    """Five looks, each with eight new steps of every rank, as of a heartbeat."""
    events = []
    for start in range(first, first + 40, 8):
        for rank, own in enumerate(shares):
            seconds = 0.3 if rank == slow else 0.1
            samples = [Sample(s, seconds, seconds) for s in range(start, start + 8)]
            bench.write(rank, samples, division=Division(sum(shares), own))
        events += [event for event in bench.look() if event.event == "work_moved"]
    return events


def test_moved_work_is_published_under_its_round_and_announced() -> None:
    bench = Bench()
    bench.enter(world())
    (event,) = share(bench, 1, (4, 4, 4))
    (given,) = bench.published
    assert (given.round, given.shares) == (1, (5, 2, 5))
    assert (event.event, event.rank, event.host, event.worker) == ("work_moved", 1, "b", "b.0.1")
    assert event.what.facts() == {"shares": "5 2 5"}
    assert event.reason == given.reason
    assert "rank 1 on b came last" in event.reason
    assert share(bench, 41, (5, 2, 5)) == []


def test_survivors_of_a_round_get_shares_that_fit_them_at_once() -> None:
    bench = Bench()
    bench.enter(world())
    share(bench, 1, (4, 4, 4))
    share(bench, 41, (5, 2, 5))
    bench.enter(world(2, round_id=2, version=80))
    for rank in range(2):
        bench.write(rank, [], round_id=2, step=81, division=Division(12, 6))
    (event,) = bench.look()
    assert event.round == 2
    assert bench.published[-1].shares == (9, 3)


def test_without_ranks_that_ask_for_it_nothing_is_moved() -> None:
    bench = Bench()
    bench.enter(world())
    for step in range(1, 80):
        for rank, seconds in enumerate((0.1, 0.9, 0.1)):
            bench.write(rank, [sample(step, seconds)])
        bench.look()
    assert bench.published == []


def test_a_worker_that_only_reports_steps_is_shown_and_not_judged() -> None:
    bench = Bench()
    bench.enter(world())
    key = contract.worker_progress("a.0.1")
    reported = Progress(1, -1, USUAL, (sample(9, SLOW),), at=1.0, reported=9)
    bench.entries[key] = encode(reported), 1
    assert bench.look() == []
    assert bench.machine.step == 0, "none is committed"
    assert bench.machine.progress == {"a.0.1": reported}
    bench.enter(world(2, round_id=2))
    assert list(bench.machine.progress) == ["a.0.1"]
    bench.enter(World(3, world(3).members[1:], "test"))
    assert bench.machine.progress == {}, "it has left"


def test_ranks_that_differ_are_asked_and_the_job_hears_of_the_difference() -> None:
    bench = Bench()
    bench.enter(world())
    bench.mark(4, "aa", "aa", "aa")
    assert bench.sent == [StatesEqual(1, 4)]
    bench.mark(5, "bb", "bb", "bb")
    assert len(bench.sent) == 1, "it is told once a round"
    bench.mark(6, "cc", "cc", "dd")
    assert bench.asked == [StateQuestion(1, 6, ("a.0.1", "c.0.1"))]
    for worker, value in (("a.0.1", "0.02"), ("c.0.1", "0.01")):
        leaves = (LeafMark("lr", value, value),)
        assert bench.hand_in(StateDescribed(worker, 1, 6, leaves)) == []
    values = (StateValue((0, 1), "0.02"), StateValue((2,), "0.01"))
    reason = "lr is 0.02 on ranks 0, 1 and 0.01 on rank 2"
    assert bench.sent[1:] == [StatesDiffer(1, 6, "lr", values, reason)]


def test_marks_and_answers_of_another_round_are_passed_over() -> None:
    bench = Bench()
    bench.enter(world())
    bench.mark(4, "aa", "aa", "bb")
    assert len(bench.asked) == 1
    bench.enter(world(round_id=2))
    for worker in ("a.0.1", "c.0.1", "z.0.1"):
        bench.hand_in(StateDescribed(worker, 1, 4, (LeafMark("lr", worker, worker),)))
    bench.mark(4, "aa", "aa", "bb", round_id=1)
    assert (len(bench.asked), bench.sent) == (1, [])
    bench.mark(5, "cc", "cc", "cc", round_id=2)
    assert bench.sent == [StatesEqual(2, 5)]


def test_the_last_marks_come_with_the_ends_of_the_scripts() -> None:
    bench = Bench()
    bench.enter(world())
    bench.mark(4, "aa", "aa", "")
    for worker, digest in (("a.0.1", "bb"), ("b.0.1", "bb"), ("c.0.1", "cc"), ("z.0.1", "cc")):
        bench.hand_in(WorkerEnding(worker, 1, marks=(StateMark(9, digest),)))
    (differ,) = bench.sent
    assert isinstance(differ, StatesDiffer)
    assert (differ.step, differ.reason[:21]) == (9, "ranks 0, 1 and rank 2")


def test_a_world_of_one_rank_proves_nothing() -> None:
    bench = Bench()
    bench.enter(world(1))
    bench.mark(4, "aa")
    assert bench.sent == []


def test_a_rank_that_never_commits_is_announced_once_a_round() -> None:
    bench = Bench()
    bench.enter(world())
    bench.mark(30, "aa", "aa", commits=30, optimizer_steps=30)
    assert bench.look() == []
    bench.revision += 1
    silent = encode(Progress(1, 0, 0.1, reported=30, optimizer_steps=30))
    bench.entries[contract.worker_progress("c.0.1")] = silent, bench.revision
    (announced,) = bench.look()
    assert (announced.event, announced.round) == ("commits_differ", 1)
    assert announced.what.facts() == {"kind": "no_commits", "ranks": "2"}
    assert announced.reason.startswith("rank 2 has trained at least 8 steps")
    assert bench.look() == []
