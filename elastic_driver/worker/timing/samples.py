"""What a rank's heartbeat tells of its measured steps, so that the driver can compare ranks.

Steps may be a millisecond long, beats are seconds apart and their messages small: of steps shorter
than 75 milliseconds, the mean over each 2ⁿ steps is told. A mean, because a processor that is
taken away now and then slows some of these steps far and the others not at all. All ranks end
their blocks at the same steps, as n follows from the step time they share (and where it
differs, every second block of the one ends with one of the other's). Those of the last seconds are
told again with each beat, so that no message has to arrive.

The training thread notes, the heartbeat thread collects: a deque's `append` and `popleft` are
atomic, so no lock is needed. Times are seconds.
"""

from __future__ import annotations

import math
from collections import deque

from msgspec import Struct

from elastic_driver.core.documents import MAX_SAMPLES, Sample
from elastic_driver.worker.timing.stretch import Stretch

BLOCK_S = 0.075  # the least time of the steps that a sample stands for
COVERED_S = 4.0  # what the samples of one message reach back: two beats, or several looks
LEAST = 8  # samples of a message, however long steps are
LARGEST_BACKLOG = 4096  # steps between two beats


class StepCost(Struct, frozen=True):
    """What one step cost: `compute` in all, of which `one_pass` is a forward-backward pass.

    `exchange` is what the process ran while others were waited for: to exchange gradients.
    """

    compute: float
    one_pass: float
    exchange: float = 0.0


class StepSamples:
    """The measured steps of this process in the round it is in."""

    def __init__(self) -> None:
        self._noted: deque[tuple[int, int, StepCost]] = deque(maxlen=LARGEST_BACKLOG)
        # What follows is the heartbeat thread's own.
        self._kept: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._round = 0
        self._stretch = Stretch()
        self._begin_block()

    def note(self, round_id: int, step: int, lap: StepCost) -> None:
        """A committed step of this round cost this rank so much; for the training thread."""
        self._noted.append((round_id, step, lap))

    def collect(self, round_id: int, step_time: float) -> tuple[Sample, ...]:
        """The samples of this round to tell, oldest first; for the heartbeat thread.

        `step_time`: what a step takes, waiting included.
        """
        if round_id != self._round:
            self._round = round_id
            self._kept.clear()
            self._begin_block()
        every, stretch = block(step_time), self._stretch.factor()
        while self._noted:
            noted_in, step, lap = self._noted.popleft()
            if noted_in == round_id:
                self._count(step, lap, every, stretch)
        needed = COVERED_S / (every * step_time) if step_time > 0 else MAX_SAMPLES
        return tuple(self._kept)[-max(LEAST, math.ceil(needed)) :]

    def _begin_block(self) -> None:
        self._steps = 0  # of the block that has not ended; likewise the sums of
        self._compute = self._passes = self._exchange = 0.0

    def _count(self, step: int, lap: StepCost, every: int, stretch: float) -> None:
        self._steps += 1
        self._compute += lap.compute
        self._passes += lap.one_pass
        self._exchange += lap.exchange * stretch
        if step % every == 0:
            sums = (self._compute, self._passes, self._exchange)
            self._kept.append(Sample(step, *(round(total / self._steps, 6) for total in sums)))
            self._begin_block()


def block(step_time: float) -> int:
    """How many steps one sample stands for: the smallest power of two that takes long enough."""
    every = 1
    while every * step_time < BLOCK_S and every < LARGEST_BACKLOG:
        every *= 2
    return every
