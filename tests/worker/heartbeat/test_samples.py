"""Which measured steps a heartbeat tells."""

from __future__ import annotations

from collections.abc import Callable

from elastic_driver.words.orders import decode, encode
from elastic_driver.words.progress import MAX_SAMPLES, Progress, Sample
from elastic_driver.worker.heartbeat.training_progress import (
    COVERED_S,
    StepCost,
    StepSamples,
    TrainingProgress,
    steps_per_sample,
)


def cost(seconds: float) -> Callable[[], StepCost]:
    return lambda: StepCost(seconds, seconds / 2)


def told(step: int, seconds: float) -> Sample:
    return Sample(step, seconds, seconds / 2)


def steps_of(samples: StepSamples, step_time: float) -> list[int]:
    return [sample.step for sample in samples.collect(step_time)]


def test_of_long_steps_all_are_told_and_told_again() -> None:
    samples = StepSamples()
    for step in (1, 2, 3):
        samples.record(step, cost(0.5))
    assert samples.collect(1.0) == (told(1, 0.5), told(2, 0.5), told(3, 0.5))
    samples.record(4, cost(0.5))
    assert steps_of(samples, 1.0) == [1, 2, 3, 4]


def test_a_message_is_bounded_and_reaches_back_over_several_heartbeats_whatever_a_step_takes() -> (
    None
):
    for step_time in (0.0005, 0.003, 0.01, 0.1, 1.0):
        samples = StepSamples()
        heartbeat = max(int(2.0 / step_time), 1)
        reported: list[int] = []
        for first in range(0, 10 * heartbeat, heartbeat):
            for step in range(first, first + heartbeat):
                samples.record(step, cost(0.001))
            reported = steps_of(samples, step_time)
        assert len(reported) <= MAX_SAMPLES
        reach = reported[-1] - reported[0] + steps_per_sample(step_time)
        assert reach * step_time >= min(COVERED_S, 10 * heartbeat * step_time)
        message = Progress(1, 10 * heartbeat, step_time, samples.collect(step_time))
        assert decode(Progress, encode(message)) == message


def test_of_short_steps_the_mean_over_a_block_is_told() -> None:
    samples = StepSamples()
    for step in range(1, 17):  # of eight steps one is held up, as under a quota
        samples.record(step, cost(0.09 if step % 8 == 3 else 0.01))
        if step == 5:
            assert samples.collect(0.012) == (), "the block has not ended"
    assert samples.collect(0.012) == (told(8, 0.02), told(16, 0.02))


def test_of_steps_longer_than_that_the_last_eight_are_told() -> None:
    samples = StepSamples()
    for step in range(100):
        samples.record(step, cost(9.0))
    assert steps_of(samples, 10.0) == list(range(92, 100))


def test_ranks_that_time_a_step_differently_tell_steps_in_common() -> None:
    reported = []
    for step_time in (0.0093, 0.0095):  # to either side of a power of two
        samples = StepSamples()
        for step in range(800):
            samples.record(step, cost(0.01))
        reported.append(steps_of(samples, step_time))
    assert steps_per_sample(0.0093) != steps_per_sample(0.0095)
    assert len(set(reported[0]) & set(reported[1])) >= 15


def test_steps_of_another_round_are_not_told() -> None:
    progress = TrainingProgress()
    progress.enter(1, 0)
    progress.samples.record(7, cost(0.5))
    assert steps_of(progress.samples, 1.0) == [7]
    progress.samples.record(8, cost(0.5))
    progress.enter(2, 7)
    progress.samples.record(8, cost(0.25))
    assert progress.samples.collect(1.0) == (told(8, 0.25),)


def test_steps_that_nobody_collects_do_not_fill_the_memory() -> None:
    samples = StepSamples()
    for step in range(20_000):
        samples.record(step, cost(0.0))
    assert len(samples._recorded) == 4096
