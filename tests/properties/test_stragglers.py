"""Slow ranks while training: found soon, told apart, and never made up out of jitter."""

from __future__ import annotations

from random import Random

from elastic_driver.core.slowness.stragglers import (
    StragglerWatch,
)
from tests.core.slowness.test_stragglers import jittered, train


def test_an_hour_of_jittered_steps_raises_no_alarm() -> None:
    random = Random(1)
    watch = StragglerWatch(("a", "b", "c", "d"))
    steps = range(36_000)  # of 0.1 s
    assert train(watch, steps, lambda _r, _s: jittered(random)) == []


def test_a_rank_that_says_nothing_does_not_fill_the_memory() -> None:
    watch = StragglerWatch(("a", "b"))
    for step in range(10_000):
        watch.report(0, step, 1.0)
    assert len(watch._reported) <= 256
