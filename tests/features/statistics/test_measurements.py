"""Speeds, samples and the last hour, from what workers and agents have written."""

from __future__ import annotations

import pytest

from elastic_driver import contract
from elastic_driver.features.statistics.measurements import (
    LOOK_S,
    QUIET_S,
    SHARE,
    USAGE_S,
    Measurements,
)
from elastic_driver.words.orders import World, encode
from elastic_driver.words.progress import HostUsage, Progress, StepTimes, Usage, WorkerUsage
from elastic_driver.words.world import Member, SlotInfo
from rendezvous.wire import Entry

UNIX = 1_000_000.0


def world(*hosts: str, round_id: int = 1) -> World:
    size = len(hosts)
    return World(
        round_id,
        tuple(
            Member(f"{host}.0.1", SlotInfo(host, 0, rank, 0, 0, size, 1, 1, rank, size))
            for rank, host in enumerate(hosts)
        ),
        "test",
    )


def progress(at: float, steps: int, *, round_id: int = 1, samples: int = 0) -> Progress:
    return Progress(round_id, steps, 0.1, at=at, steps_done=steps, samples_done=samples)


HOST = HostUsage(
    cpu=0.5, memory_used=1, memory_total=2, disk_used=3, disk_total=4, net_in=5.0, net_out=6.0
)


class Bench:
    """Measurements of a world, and the time."""

    def __init__(self, *hosts: str) -> None:
        self.now = 100.0
        self.world = world(*hosts)
        self.of: dict[str, Progress] = {}
        self.measured = Measurements()

    def look(self, seconds: float = LOOK_S, **of: Progress) -> None:
        self.of |= {f"{host}.0.1": each for host, each in of.items()}
        self.now += seconds
        size = len(self.world.members)
        self.measured.take(self.now, UNIX + self.now, self.world, self.of, size)

    def usage(self, host: str, value: bytes, revision: int = 1) -> None:
        self.now += USAGE_S
        (key,) = self.measured.usage_keys(self.now, [(host, 1)])
        assert key == contract.agent_usage(host, 1)
        self.measured.usage_read({key: Entry(value, revision)})


def test_a_speed_is_by_the_worker_s_clock_however_late_its_messages_come() -> None:
    bench = Bench("a", "b")
    bench.look(a=progress(50.0, 1, samples=8), b=progress(70.0, 1, samples=8))
    assert bench.measured.document().steps_per_s is None, "one step makes no speed"
    bench.look(a=progress(52.0, 21, samples=168), b=progress(72.0, 21, samples=168))
    bench.look(3.7)  # nothing new: messages of a large world come seldom
    found = bench.measured.document()
    assert found.step == 21
    assert found.steps_per_s == pytest.approx(10.0)
    assert found.samples_per_s == pytest.approx(160.0), "of both workers"
    assert found.workers["a.0.1"].samples_per_s == pytest.approx(80.0)


def test_a_worker_without_new_steps_is_at_speed_0() -> None:
    bench = Bench("a")
    bench.look(a=progress(50.0, 1))
    bench.look(a=progress(51.0, 11))
    bench.look(QUIET_S + 0.2)
    assert bench.measured.document().steps_per_s == pytest.approx(10.0), "three steps more"
    bench.look(0.2)
    assert bench.measured.document().steps_per_s == 0.0
    assert bench.measured.document().samples_per_s is None, "it has never reported any"


def test_samples_of_a_lost_worker_stay_and_none_counts_twice() -> None:
    bench = Bench("a", "b")
    bench.look(a=progress(50.0, 10, samples=80), b=progress(50.0, 10, samples=80))
    bench.world = world("a", round_id=2)
    del bench.of["b.0.1"]
    bench.look(a=progress(51.0, 12, round_id=2, samples=96))
    assert bench.measured.document().samples == 176
    assert list(bench.measured.document().workers) == ["a.0.1"]
    bench.world = world("a", "b", round_id=3)
    bench.look(b=progress(60.0, 11, round_id=3, samples=88))
    assert bench.measured.document().samples == 184, "one that returns has eight more"


def test_the_speed_of_a_new_round_has_nothing_of_the_pause_before_it() -> None:
    bench = Bench("a")
    bench.look(a=progress(50.0, 1))
    bench.look(a=progress(51.0, 11))
    bench.world = world("a", "b", round_id=2)
    bench.look(a=progress(90.0, 12, round_id=2))
    bench.look(a=progress(91.0, 22, round_id=2))
    assert bench.measured.document().workers["a.0.1"].steps_per_s == pytest.approx(10.0)


def test_what_a_script_reports_is_shown_of_rank_0_and_steps_without_commits_count() -> None:
    bench = Bench("b", "a")
    times = StepTimes(compute=0.2)
    reported = Progress(
        1, -1, 0.1, at=5.0, steps_done=3, numbers={"loss": 0.5}, total=9, times=times, reported=3
    )
    bench.look(a=Progress(1, -1, 0.1, at=5.0, numbers={"loss": 0.7}, reported=2), b=reported)
    found = bench.measured.document()
    assert (found.step, found.total, found.numbers) == (3, 9, {"loss": 0.5})
    assert found.workers["b.0.1"].times == times


def test_the_history_is_bounded_finer_where_it_is_new_and_an_hour_long() -> None:
    bench = Bench("a")
    for second in range(2 * 3600):
        bench.look(1.0, a=progress(50.0 + second, 10 * second))
    found = bench.measured.history()
    assert len(found.t) <= 720
    assert found.t == sorted(found.t)
    assert 3500 < found.t[-1] - found.t[0] < 3700
    assert found.t[-1] - found.t[-200] == pytest.approx(199.0)
    assert found.step[-1] == 10 * (2 * 3600 - 1)
    assert set(found.world_size) == {1}
    assert set(found.steps_per_s) == {10.0}
    assert set(found.step_time) == {0.1}
    since = bench.measured.history(found.t[-3])
    assert since.t == found.t[-2:]


def test_usage_is_shown_with_its_host_and_workers_of_other_hosts_are_not() -> None:
    bench = Bench("a")
    assert bench.measured.usage_keys(bench.now, []) == ()
    of = {"a.0.1": WorkerUsage(0.9, 1000), "b.0.1": WorkerUsage(0.1, 1)}
    bench.usage("a", encode(Usage(HOST, of)))
    found = bench.measured.document()
    assert found.hosts == {"a": HOST}
    assert {w: (each.step, each.cpu, each.memory) for w, each in found.workers.items()} == {
        "a.0.1": (-1, 0.9, 1000)
    }
    assert bench.measured.usage_keys(bench.now + 0.1, [("a", 1)]) == (), "it was read just now"


@pytest.mark.parametrize(("workers", "seconds"), [(2, 1.0), (400, 2.0), (1000, 5.0), (9000, 5.0)])
def test_the_usage_of_a_large_job_is_read_less_often(workers: int, seconds: float) -> None:
    bench = Bench(*(f"h{number}" for number in range(workers)))
    bench.look()
    agents = [("h0", 1)]
    assert bench.measured.usage_keys(bench.now, agents)
    assert bench.measured.usage_keys(bench.now + seconds - 0.1, agents) == ()
    assert bench.measured.usage_keys(bench.now + seconds, agents)


def test_a_costly_record_puts_the_next_look_off_and_a_cheap_one_does_not() -> None:
    subject = Measurements()
    subject.looked(10.0, 0.001)
    subject.recorded(10.1, 0.001)
    assert subject.due == 10.0 + LOOK_S
    subject.recorded(10.1, 1.0)
    assert subject.due == 10.1 + SHARE


@pytest.mark.parametrize("nonsense", [b"", b"{}", b"[" * 9999, b'{"host": {"cpu": -1}}'])
def test_usage_that_is_none_is_passed_over(nonsense: bytes) -> None:
    bench = Bench("a")
    bench.usage("a", nonsense)
    assert bench.measured.document().hosts == {}


def test_looks_take_a_small_share_of_the_time() -> None:
    subject = Measurements()
    subject.looked(10.0, 0.001)
    assert subject.due == 10.0 + LOOK_S
    subject.looked(11.0, 1.0)
    assert subject.due == 11.0 + SHARE


def test_a_progress_without_these_fields_is_understood() -> None:
    bench = Bench("a")
    bench.look(a=Progress(1, 7, 0.1))
    bench.look(a=Progress(1, 8, 0.1))
    found = bench.measured.document()
    assert (found.step, found.steps_per_s, found.samples) == (8, None, 0)
