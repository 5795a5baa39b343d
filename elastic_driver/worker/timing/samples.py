"""The measured steps that a heartbeat reports, so that the driver can compare ranks.

Steps may take a millisecond while heartbeats are seconds apart and their messages small. So for
steps shorter than `SAMPLE_S`, a sample is the mean over 2ⁿ steps. It is a mean because a processor
that is taken away now and then slows some of these steps a lot and the others not at all. All ranks
end their samples at the same steps, because n follows from the step time they share; where it
differs, every second sample of one rank ends with a sample of the other. The samples of the last
seconds are repeated in each heartbeat, so a lost message does no harm.

The training thread records, the heartbeat thread collects: a deque's `append` and `popleft` are
atomic, so no lock is needed. Times are seconds.
"""

from __future__ import annotations

import math
from collections import deque

from msgspec import Struct

from elastic_driver.core.documents import MAX_SAMPLES, Sample
from elastic_driver.worker.timing.cpu_slowdown import CpuSlowdown

SAMPLE_S = 0.075  # the least total time of the steps of one sample
COVERED_S = 4.0  # the time that the samples of one message cover: at least two heartbeats
LEAST_SAMPLES = 8  # in a message, however long steps are
LARGEST_BACKLOG = 4096  # steps between two heartbeats


class StepCost(Struct, frozen=True):
    """The cost of one step to this rank.

    `compute`: in all, with one forward-backward pass; `one_pass`: of that pass; `exchange`: CPU
    time of the process while it waited for others, spent on exchanging gradients.
    """

    compute: float
    one_pass: float
    exchange: float = 0.0


class StepSamples:
    """The measured steps of this process in its current round."""

    def __init__(self) -> None:
        self._recorded: deque[tuple[int, int, StepCost]] = deque(maxlen=LARGEST_BACKLOG)
        # The fields below belong to the heartbeat thread.
        self._kept: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._round = 0
        self._slowdown = CpuSlowdown()
        self._begin_sample()

    def record(self, round_id: int, step: int, cost: StepCost) -> None:
        """Record the cost of a committed step; called by the training thread."""
        self._recorded.append((round_id, step, cost))

    def collect(self, round_id: int, step_time: float) -> tuple[Sample, ...]:
        """Return the samples of this round to report, oldest first; for the heartbeat thread.

        `step_time`: seconds of a whole step, waiting included.
        """
        if round_id != self._round:
            self._round = round_id
            self._kept.clear()
            self._begin_sample()
        every, slowdown = steps_per_sample(step_time), self._slowdown.factor()
        while self._recorded:
            recorded_in, step, cost = self._recorded.popleft()
            if recorded_in == round_id:
                self._add(step, cost, every, slowdown)
        needed = COVERED_S / (every * step_time) if step_time > 0 else MAX_SAMPLES
        return tuple(self._kept)[-max(LEAST_SAMPLES, math.ceil(needed)) :]

    def _begin_sample(self) -> None:
        self._steps = 0
        self._compute = self._passes = self._exchange = 0.0

    def _add(self, step: int, cost: StepCost, every: int, slowdown: float) -> None:
        self._steps += 1
        self._compute += cost.compute
        self._passes += cost.one_pass
        self._exchange += cost.exchange * slowdown
        if step % every == 0:
            sums = (self._compute, self._passes, self._exchange)
            self._kept.append(Sample(step, *(round(total / self._steps, 6) for total in sums)))
            self._begin_sample()


def steps_per_sample(step_time: float) -> int:
    """Return the smallest power of two of steps that takes `SAMPLE_S`, up to the backlog."""
    every = 1
    while every * step_time < SAMPLE_S and every < LARGEST_BACKLOG:
        every *= 2
    return every
