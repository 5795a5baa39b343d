"""Slow ranks while training: found soon, told apart, and never made up out of jitter."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from elastic_driver.features.stragglers.slowness import Change, Slowness, SlowRank, StragglerWatch

HOSTS = ("a", "a", "b", "b", "c", "c", "d", "d")
Times = Callable[[int, int], float]


def train(watch: StragglerWatch, steps: range, times: Times) -> list[Change]:
    """Let every rank report every step."""
    changes: list[Change] = []
    for step in steps:
        for rank in range(len(watch.hosts)):
            changes += watch.report(rank, step, times(rank, step))
    return changes


def test_a_rank_that_becomes_slow_is_named_with_its_host_and_kind_within_30_steps() -> None:
    watch = StragglerWatch(HOSTS)
    assert train(watch, range(1, 101), lambda _r, _s: 0.1) == []
    changes = train(watch, range(101, 131), lambda r, _s: 0.2 if r == 5 else 0.1)
    (change,) = changes
    assert not change.over
    assert (change.slow.rank, change.slow.host, change.slow.kind) == (5, "c", Slowness.COMPUTE)
    assert change.slow.ratio == pytest.approx(2.0)
    assert change.slow.step <= 130
    assert "rank 5 on c is slow (compute): 2.0 times" in change.slow.describe()
    assert watch.slow == (change.slow,)


@pytest.mark.parametrize(("each", "within"), [(2, 20), (4, 32), (16, 128)])
def test_where_reports_stand_for_several_steps_fewer_are_asked_for(each: int, within: int) -> None:
    watch = StragglerWatch(HOSTS)
    assert train(watch, range(each, 100 * each, each), lambda _r, _s: 0.1) == []
    slow = range(100 * each, 200 * each, each)
    (change,) = train(watch, slow, lambda r, _s: 0.2 if r == 5 else 0.1)
    assert change.slow.rank == 5
    assert change.slow.step - slow[0] <= within


def test_what_an_alarm_says_of_a_step_is_that_of_the_slow_steps_alone() -> None:
    """Not of the window, whose median may be that of steps that were slow in part."""
    watch = StragglerWatch(HOSTS)
    assert train(watch, range(4, 400, 4), lambda _r, _s: 0.1) == []
    slowed = {step: 0.5 if step < 412 else 1.2 for step in range(400, 480, 4)}
    (change,) = train(watch, range(400, 480, 4), lambda r, step: slowed[step] if r == 5 else 0.1)
    assert change.slow.ratio == pytest.approx(5.0), "the median of the window"
    assert change.slow.excess == pytest.approx(1.1)
    assert change.slow.share(1.5) == pytest.approx(1.1 / 1.5)


def test_fewer_reports_are_never_so_few_that_a_few_bad_ones_count() -> None:
    watch = StragglerWatch(HOSTS)
    slow = {400, 408, 416, 424}
    changes = train(watch, range(8, 800, 8), lambda r, s: 0.9 if r == 5 and s in slow else 0.1)
    assert changes == []


@pytest.mark.parametrize(("hosts", "slow"), [("ab", {1}), ("abc", {1, 2}), ("abcd", {0, 2})])
def test_slow_ranks_are_found_among_few(hosts: str, slow: set[int]) -> None:
    watch = StragglerWatch(tuple(hosts))
    train(watch, range(40), lambda r, _s: 0.3 if r in slow else 0.1)
    assert {s.rank for s in watch.slow} == slow


@pytest.mark.parametrize("each", [1, 2, 8])
def test_a_neighbours_half_second_makes_nobody_slow(each: int) -> None:
    watch = StragglerWatch(("a", "b", "c"))
    train(watch, range(each, 50 * each, each), lambda _r, _s: 0.1)
    disturbed = range(50 * each, 61 * each, each)  # reports of steps or blocks of 75 ms and more
    assert train(watch, disturbed, lambda r, _s: 0.16 if r == 1 else 0.1) == []
    assert train(watch, range(61 * each, 200 * each, each), lambda _r, _s: 0.1) == []


def test_who_is_slightly_slow_all_the_time_is_named_within_30_steps() -> None:
    watch = StragglerWatch(("a", "b", "c"))
    train(watch, range(1, 101), lambda _r, _s: 0.1)
    (change,) = train(watch, range(101, 131), lambda r, _s: 0.17 if r == 1 else 0.1)
    assert change.slow.rank == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_quota_that_stops_some_steps_and_not_others_is_named_within_30_steps(seed: int) -> None:
    watch = StragglerWatch(("a", "b", "c"))
    train(watch, range(1, 101), lambda _r, _s: 0.1)
    times = Random(seed).sample([0.12, 0.28] * 15, 30)
    (change,) = train(watch, range(101, 131), lambda r, s: times[s - 101] if r == 1 else 0.1)
    assert change.slow.rank == 1


def test_exactly_the_factor_is_not_slow() -> None:
    watch = StragglerWatch(("a", "b", "c"))
    assert train(watch, range(60), lambda r, _s: 1.5 if r == 2 else 1.0) == []


@pytest.mark.parametrize(("step_time", "named"), [(0.0, True), (0.9, True), (1.1, False)])
def test_what_is_a_small_part_of_the_step_harms_nobody(step_time: float, named: bool) -> None:
    watch = StragglerWatch(("a", "b", "c"), step_time=step_time)
    assert bool(train(watch, range(60), lambda r, _s: 0.2 if r == 2 else 0.1)) == named


def test_where_three_ranks_share_two_processors_the_one_that_is_alone_makes_nobody_slow() -> None:
    watch = StragglerWatch(("a", "a", "a"))
    assert train(watch, range(60), lambda r, _s: 0.1 if r == 0 else 0.2) == []
    assert len(train(watch, range(60, 120), lambda r, _s: 0.1 if r < 2 else 0.2)) == 1


def test_an_alarm_ends_when_the_rank_has_clearly_recovered_and_not_before() -> None:
    watch = StragglerWatch(("a", "b", "c"))
    train(watch, range(60), lambda r, _s: 2.0 if r == 0 else 1.0)
    still = train(watch, range(60, 160), lambda r, _s: 1.4 if r == 0 else 1.0)
    assert still == []
    assert watch.slow
    (over,) = train(watch, range(160, 220), lambda _r, _s: 1.0)
    assert over.over
    assert watch.slow == ()
    assert watch.false_alarms == 0


def test_an_alarm_that_is_soon_withdrawn_is_counted_as_false() -> None:
    watch = StragglerWatch(("a", "b", "c"))
    train(watch, range(30), lambda _r, _s: 1.0)
    raised = train(watch, range(30, 46), lambda r, _s: 3.0 if r == 1 else 1.0)
    assert len(raised) == 1
    train(watch, range(46, 90), lambda _r, _s: 1.0)
    assert watch.slow == ()
    assert watch.false_alarms == 1


def test_reports_may_come_in_batches_and_twice_without_changing_the_verdict() -> None:
    watch = StragglerWatch(("a", "b", "c"))
    for rank in (2, 0, 1):
        for step in range(40):
            for _ in range(2):
                watch.report(rank, step, 2.0 if rank == 1 else 1.0)
    assert [s.rank for s in watch.slow] == [1]


def test_steps_that_become_longer_for_all_name_nobody_though_reports_come_in_batches() -> None:
    watch = StragglerWatch(("a", "b", "c"))
    changes: list[Change] = []
    for first in range(0, 200, 25):
        for rank in range(3):
            for step in range(first, first + 25):
                changes += watch.report(rank, step, 3.0 if step >= 50 else 1.0)
    assert changes == []


def test_a_lost_report_does_not_stop_the_watch_or_fill_the_memory() -> None:
    watch = StragglerWatch(("a", "b"))
    for step in range(500):
        for rank in (0, 1):
            if (rank, step % 7) != (0, 3):
                watch.report(rank, step, 2.0 if rank == 1 else 1.0)
    assert [s.rank for s in watch.slow] == [1]
    assert len(watch._reported) <= 1


def test_a_rank_that_is_not_of_this_round_is_ignored() -> None:
    watch = StragglerWatch(("a",), first_step=10)
    assert watch.report(7, 11, 1.0) == watch.report(-1, 11, 1.0) == watch.report(0, 9, 1.0) == ()
    assert watch._reported == {}


def test_a_share_is_never_more_than_the_rank_is_late_by() -> None:
    slow = SlowRank(1, "b", Slowness.COMPUTE, 4.0, 90, 0.3)
    assert (slow.share(0.6), slow.share(0.1), slow.share(0.0)) == (0.5, 0.75, 0.75)
