"""The best of several intervals: what passes does not count, what lasts does."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from torch.distributed import ReduceOp

from elastic_driver.features.checks.worker import measure as pace
from elastic_driver.worker.heartbeat.training_progress import CpuTime


def test_a_stall_in_one_stretch_does_not_count() -> None:
    calls = itertools.count()

    def work() -> None:
        time.sleep(0.1 if next(calls) == 5 else 0.005)

    (seconds,) = pace.best_of([pace.repeated(work)], contextlib.nullcontext, interval=0.05)
    assert 0.005 <= seconds < 0.025


def test_a_quota_counts_though_most_calls_are_fast() -> None:
    """Like a quota of a fifth: 20 ms at full speed, then 80 ms nothing."""
    began = time.perf_counter()

    def work() -> None:
        into = (time.perf_counter() - began) % 0.1
        time.sleep(0.002 if into < 0.02 else 0.1 - into)

    (seconds,) = pace.best_of([pace.repeated(work)], contextlib.nullcontext)
    assert seconds > 2.5 * 0.002


def test_each_stretch_is_measured_in_a_turn_and_others_get_theirs_between() -> None:
    turns: list[str] = []

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        turns.append("taken")
        yield
        turns.append("left")

    times = iter([0.0, 3.0, 0.0, 2.0, 0.0, 1.0])  # before each interval there is a warm-up

    def timing(_least: float) -> float:
        assert turns[-1] == "taken"
        return next(times)

    assert pace.best_of([timing], turn, interval=0.02, intervals=3) == [1.0]
    assert turns == ["taken", "left"] * 3


@pytest.mark.parametrize(
    ("times", "made"), [((1.0, 1.05, 9.0), 2), ((1.05, 1.0, 9.0), 2), ((1.0, 1.2, 1.1), 3)]
)
def test_intervals_that_agree_are_enough(times: tuple[float, ...], made: int) -> None:
    left = [seconds for pair in zip(times, times, strict=True) for seconds in pair]

    assert pace.best_of([lambda _least: left.pop(0)], contextlib.nullcontext) == [1.0]
    assert len(times) - len(left) / 2 == made


def test_calls_that_take_long_are_not_repeated_for_long() -> None:
    calls = itertools.count()

    def work() -> None:
        next(calls)
        time.sleep(0.05)

    pace.best_of([pace.repeated(work)], contextlib.nullcontext, interval=0.01, intervals=4)
    assert next(calls) == 2, "once to warm up, once to be timed"


def test_threads_add_up() -> None:
    slow = pace.in_threads([lambda: time.sleep(0.02), lambda: time.sleep(0.02)])(0.1)
    assert slow == pytest.approx(0.01, rel=0.5)


def test_threads_do_not_wait_for_each_other() -> None:
    calls, third = itertools.count(1), threading.Event()
    seen: list[bool] = []

    def quick() -> None:
        time.sleep(0.001)
        if next(calls) == 3:
            third.set()

    pace.in_threads([quick, lambda: seen.append(third.wait(10.0))])(0.1)
    assert seen[0], "one call of a thread lasts as long as three of the other"


def test_what_fails_in_a_thread_fails() -> None:
    def broken() -> None:
        raise ArithmeticError("not finite")

    with pytest.raises(ArithmeticError, match="not finite"):
        pace.in_threads([broken])(0.01)


class Others:
    """The other ranks, whose times are known."""

    def __init__(self, seconds: float = 0.0, lost: float = 0.0) -> None:
        self.seconds, self.lost = seconds, lost  # `seconds`: of a call, when first asked
        self.asked = 0

    def __call__(self, times: Sequence[float], operation: object) -> list[float]:
        if operation == ReduceOp.SUM:
            return [own + self.lost for own in times]
        self.asked += 1
        return [max(own, self.seconds if self.asked == 1 else 0.0) for own in times]


@pytest.mark.parametrize("others", [0.0, 1.0])
def test_everybody_makes_as_many_calls_as_the_slowest_has_time_for(others: float) -> None:
    calls = itertools.count()

    def work() -> None:
        next(calls)
        time.sleep(0.002)

    pace.together(work, lambda: None, Others(others))
    least, most = pace.TOGETHER_CALLS
    assert next(calls) - 2 == (least if others else most)


@pytest.mark.parametrize(
    ("own", "others", "used", "least"),
    [
        (0.0, 0.0, 0.0, 0.02),
        (0.01, 0.0, 0.0, 0.01),
        (0.0, 0.01, 0.0, 0.01),
        (5.0, 5.0, 0.02, 0.02),
        # Several threads at work need more than has passed.
        (0.0, 0.0, 5.0, 0.02),
    ],
)
def test_what_anybody_lost_does_not_count_and_what_was_done_does(
    own: float, others: float, used: float, least: float
) -> None:
    accounts = itertools.cycle([CpuTime(), CpuTime(ran=used, waited=own)])
    seconds = pace.together(
        lambda: time.sleep(0.02),
        lambda: None,
        Others(seconds=1.0, lost=others),
        lambda: next(accounts),
    )
    assert least <= seconds < least + 0.015


def test_nothing_is_left_running() -> None:
    before = threading.active_count()
    pace.in_threads([lambda: time.sleep(0.01)] * 3)(0.01)
    assert threading.active_count() == before
