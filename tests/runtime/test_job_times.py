"""Durations of a job: a recovery, a round and a step count once, and only what they say."""

from __future__ import annotations

from elastic_driver.job.decisions import Announce
from elastic_driver.runtime.job_times import JobTimes
from elastic_driver.words import log_events as log
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.orders import World
from elastic_driver.words.world import Member, SlotInfo
from rendezvous.answers import Histogram, RequestTimes


def world(number: int, *workers: str) -> World:
    size = len(workers)
    members = tuple(
        Member(worker, SlotInfo("a", slot, slot, slot, 0, size, size, 1, 0, 1), 0)
        for slot, worker in enumerate(workers)
    )
    return World(number, members, "test")


def exited(worker: str, code: int = -9, *, expected: bool = False) -> Announce:
    return Announce(worker_log.WorkerExited(exit_code=code, expected=expected), "", worker=worker)


def counted(histogram: Histogram) -> tuple[int, float]:
    return sum(histogram.counts), round(histogram.sum, 6)


def test_a_bucket_has_the_durations_up_to_its_bound() -> None:
    times = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.11, 1.0, 7.0):
        times.observe(seconds)
    assert times.cumulative() == [("0.1", 2), ("1.0", 4), ("+Inf", 5)]
    assert times.sum == 0.05 + 0.1 + 0.11 + 1.0 + 7.0


def test_routes_of_one_kind_share_a_histogram() -> None:
    times = RequestTimes()
    assert times.of("/v1/hosts/{host}:drain") is times.of("/v1/hosts/{host}:undrain")
    assert times.of("/metrics") is not times.of("/v1/status")
    assert list(times.snapshot()) == ["hosts", "metrics", "status"]


def test_a_recovery_lasts_from_the_first_loss_to_the_first_step_of_a_later_round() -> None:
    times, three = JobTimes(), world(4, "a.0.1", "a.1.1", "a.2.1")
    times.announced(exited("a.0.1"), three, 10.0)
    times.announced(Announce(worker_log.WorkerLost(), "", worker="a.1.1"), three, 10.5)
    times.stepped(4, 10.6)  # a report of the world that is broken
    assert counted(times.recoveries) == (0, 0.0)
    times.stepped(5, 12.0)
    times.stepped(5, 12.1)
    assert counted(times.recoveries) == (1, 2.0)
    times.announced(Announce(worker_log.WorkerHung(), "", worker="a.2.1"), world(5, "a.2.1"), 20.0)
    times.stepped(6, 23.0)
    assert counted(times.recoveries) == (2, 5.0)


def test_only_the_unintended_end_of_a_member_is_a_loss() -> None:
    times, one = JobTimes(), world(1, "a.0.1")
    times.announced(exited("a.0.1", expected=True), one, 1.0)
    times.announced(exited("a.0.1", code=0), one, 1.0)
    times.announced(exited("b.0.1"), one, 1.0)  # a newcomer, not in the world
    times.announced(exited("a.0.1"), None, 1.0)
    times.stepped(2, 100.0)
    assert counted(times.recoveries) == (0, 0.0)


def test_a_round_lasts_from_opened_to_complete() -> None:
    times = JobTimes()
    times.announced(Announce(log.RoundOpened(), ""), None, 1.0)
    times.announced(Announce(log.RoundOpened(), ""), None, 3.0)  # the first one never was complete
    times.announced(Announce(log.RoundCompleted(), ""), None, 3.25)
    times.announced(Announce(log.RoundCompleted(), ""), None, 9.0)
    assert counted(times.rounds) == (1, 0.25)


def test_a_step_counts_once_and_those_before_the_driver_do_not() -> None:
    times = JobTimes()
    for step, seconds in ((5000, 0.1), (5003, 0.2), (5003, 0.2), (5001, 0.2), (5004, 0.5)):
        times.progressed(step, seconds)
    assert counted(times.steps) == (4, 0.6 + 0.5)
