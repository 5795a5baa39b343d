"""From what workers wrote of their steps to events and `/v1/status`."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from elastic_driver import contract
from elastic_driver.core.documents import Member, Progress, Sample, SlotInfo, World, encode
from elastic_driver.core.events import Event, RankRecovered, RankSlow
from elastic_driver.core.status import SlowStatus
from elastic_driver.policies.nodecheck.check import NodeVerdict, Verdict
from elastic_driver.policies.nodecheck.report import CheckReport
from elastic_driver.runtime.slow_ranks import LOOK_S, SHARE, SlowRanks
from rendezvous.errors import RendezvousError
from rendezvous.wire import Entries, Entry, Get, Operation, Result, Set
from tests.runtime.cluster import Cluster
from tests.runtime.jobs import StartJob
from tests.runtime.waiting import until

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
    """Slow ranks under test, with a store and a clock of their own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.entries: dict[str, Entry] = {}
        self.revision = 0
        self.takes = 0.0
        self.answers = True
        self.posted: list[Event] = []
        self.slow = SlowRanks(self.apply, lambda: self.now, self.posted.append)

    def apply(self, operations: Sequence[Operation]) -> tuple[Result, ...]:
        (get,) = operations
        assert isinstance(get, Get)
        self.now += self.takes
        if not self.answers:
            raise RendezvousError("too busy")
        return (Entries({key: self.entries[key] for key in get.keys if key in self.entries}),)

    def write(self, rank: int, samples: Sequence[Sample], round_id: int = 1) -> None:
        self.revision += 1
        document = Progress(round_id, samples[-1].step, 0.5, tuple(samples))
        worker = world().members[rank].worker
        self.entries[contract.worker_progress(worker)] = Entry(encode(document), self.revision)

    def train(self, first: int, last: int, slow: int | None) -> list[str]:
        """Beats of eight steps each, and a look after each; the events there were."""
        events = []
        for step in range(first, last, 8):
            for rank in range(3):
                seconds = SLOW if rank == slow else USUAL
                self.write(rank, [sample(s, seconds) for s in range(step, step + 8)])
            events += [event.event for event in self.slow.look()]
        return events


def test_a_slow_rank_is_announced_shown_and_announced_again_when_it_has_recovered() -> None:
    bench = Bench()
    bench.slow.enter(world())
    assert bench.train(1, 81, slow=None) == []
    for rank in range(3):
        bench.write(rank, [sample(s, SLOW if rank == 1 else USUAL) for s in range(81, 111)])
    (event,) = bench.slow.look()
    assert (event.event, event.rank, event.host, event.worker) == ("rank_slow", 1, "b", "b.0.1")
    assert "rank 1 on b is slow (compute): 4.0 times the usual time" in event.reason
    assert event.detail["step"] <= 110, "within 30 steps"
    assert bench.slow.status() == (SlowStatus(1, "b", "b.0.1", "compute", 4.0, 94),)
    assert bench.posted == [RankSlow("b.0.1", 1, 4.0)]
    assert bench.train(111, 151, slow=None) == ["rank_recovered"]
    assert bench.slow.status() == ()
    assert bench.posted[1:] == [RankRecovered("b.0.1", 1)]
    assert bench.slow.false_alarms == 1, "the alarm was withdrawn after fewer than 50 steps"


def test_a_new_round_is_watched_anew_and_the_false_alarms_stay_counted() -> None:
    bench = Bench()
    bench.slow.enter(world())
    bench.train(1, 41, slow=None)
    bench.train(41, 73, slow=2)
    bench.train(73, 113, slow=None)
    assert bench.slow.false_alarms == 1
    bench.slow.enter(world(round_id=2, version=112))
    assert bench.slow.false_alarms == 1
    bench.train(113, 153, slow=0)
    assert bench.slow.status() == (), "these reports are of round 1, which is over"


def test_steps_before_the_round_are_not_counted() -> None:
    bench = Bench()
    bench.slow.enter(world(version=200))
    bench.train(1, 201, slow=0)
    assert bench.slow.status() == ()
    bench.train(201, 241, slow=0)
    assert [slow.rank for slow in bench.slow.status()] == [0]


def test_alone_nobody_is_slow_but_the_step_is_known() -> None:
    bench = Bench()
    assert bench.slow.due is None
    assert bench.slow.look() == []
    bench.slow.enter(world(1))
    assert bench.slow.due == bench.now + LOOK_S
    assert bench.slow.step == 0
    assert bench.train(1, 81, slow=0) == []
    assert bench.slow.step == 80


def test_what_is_not_a_progress_document_is_passed_over() -> None:
    bench = Bench()
    bench.slow.enter(world())
    bench.train(1, 81, slow=1)
    key = contract.worker_progress("a.0.1")
    for junk in (b"", b"{}", b'{"round":1,"step":9,"step_time":1,"samples":[[9,-1]]}'):
        bench.revision += 1
        bench.entries[key] = Entry(junk, bench.revision)
        assert bench.slow.look() == []
    assert [slow.rank for slow in bench.slow.status()] == [1]


def test_looks_never_take_much_of_the_drivers_time() -> None:
    bench = Bench()
    bench.slow.enter(world())
    assert bench.slow.due == bench.now + LOOK_S
    bench.slow.look()
    assert bench.slow.due == bench.now + LOOK_S
    bench.takes = 1.0
    bench.slow.look()
    assert bench.slow.due == bench.now + SHARE


def test_a_store_that_does_not_answer_is_asked_again_later() -> None:
    bench = Bench()
    bench.slow.enter(world())
    bench.answers = False
    assert bench.train(1, 41, slow=1) == []
    bench.answers = True
    assert bench.train(41, 81, slow=1) == ["rank_slow"]


# ---- in a driver -------------------------------------------------------------------------


def report(cluster: Cluster, round_id: int, times: dict[str, float], steps: range) -> None:
    for worker, seconds in times.items():
        document = Progress(round_id, steps[-1], 0.5, tuple(sample(s, seconds) for s in steps))
        cluster.client.batch(Set(contract.worker_progress(worker), encode(document)))


def test_the_driver_logs_a_slow_rank_and_shows_it_in_its_status(start_job: StartJob) -> None:
    job = start_job((("a", 2), ("b", 1)))
    cluster = job.cluster
    cluster.until_workers("a.0.1", "a.1.1", "b.0.1")
    cluster.ready("a.0.1", "a.1.1", "b.0.1")
    round_id = cluster.world(1).round
    assert cluster.status()["slow"] == []
    times = {"a.0.1": USUAL, "a.1.1": USUAL, "b.0.1": SLOW}
    report(cluster, round_id, times, range(1, 31))
    event = cluster.until_event("rank_slow", rank=2, host="b", worker="b.0.1", round=round_id)
    assert event["kind"] == "compute"
    (slow,) = cluster.status()["slow"]
    assert (slow["rank"], slow["host"], slow["worker"]) == (2, "b", "b.0.1")
    assert "rank 2 on b holds the others up" in job.stderr.getvalue()
    report(cluster, round_id, dict.fromkeys(times, USUAL), range(31, 61))
    cluster.until_event("rank_recovered", rank=2, host="b")
    until(lambda: cluster.status()["counters"]["false_alarms"] == 1, "it was a false alarm")


def test_what_the_node_check_found_is_logged_and_shown(start_job: StartJob) -> None:
    good = NodeVerdict("a", Verdict.GOOD, "", 0.1, 0.2, ())
    bad = replace(good, node="x", verdict=Verdict.FAULTY, reason="it does not start")
    checked = CheckReport(rounds=2, seconds=3.0, nodes=(good, bad))
    job = start_job((("a", 1),), node_check=checked)
    event = job.cluster.until_event("nodes_checked")
    assert (
        event["reason"]
        == "node check: 1 good, 1 faulty (x); 2 rounds, 3.0 s, of which the task 0.0 s"
    )
    shown = job.cluster.status()["node_check"]
    assert [(n["node"], n["verdict"]) for n in shown["nodes"]] == [("a", "good"), ("x", "faulty")]


def test_without_a_node_check_there_is_nothing_to_show(start_job: StartJob) -> None:
    job = start_job((("a", 1),))
    job.cluster.until_workers("a.0.1")
    assert job.cluster.status()["node_check"] is None
    assert job.cluster.events()[0]["event"] == "job_started"
    assert all(event["event"] != "nodes_checked" for event in job.cluster.events())
