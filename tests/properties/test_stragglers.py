"""Slow ranks while training: found soon, told apart, and never made up out of jitter."""

from __future__ import annotations

from random import Random

import pytest

from elastic_driver.features.stragglers.slowness import StragglerWatch
from tests.features.stragglers.test_slow_ranks import HOSTS, train


def jittered(random: Random, sigma: float = 0.25) -> float:
    """A step of 0.1 s as a busy machine gives it: jitter, and now and then a long pause."""
    pause = 5.0 if random.random() < 0.01 else 1.0
    return 0.1 * pause * random.lognormvariate(0.0, sigma)


@pytest.mark.parametrize("seed", range(20))
def test_the_right_host_is_named_under_jitter(seed: int) -> None:
    random = Random(seed)
    watch, slow = StragglerWatch(HOSTS), random.randrange(8)
    train(watch, range(1, 201), lambda _r, _s: jittered(random))
    changes = train(
        watch,
        range(201, 231),
        lambda r, _s: jittered(random) * (2.0 if r == slow else 1.0),
    )
    assert [(c.slow.rank, c.slow.host) for c in changes] == [(slow, HOSTS[slow])]


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
