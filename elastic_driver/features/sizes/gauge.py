"""The step time at one size: when it is known well enough, and whether it has changed since. Pure.

The first steps of a round do not count. After that, each look at the job's progress gives the mean
time of the steps since the look before. Times are seconds.

How much less a sample teaches in a larger batch.

Where each worker brings a batch of its own, more workers make the batch larger. With the batch M a
sample teaches (φ + M₀) / (φ + M) of what it teaches in the batch M₀ (Pollux, Qiao et al., OSDI
2021); φ is the gradient noise scale: the variance of one sample's gradient over the square of the
mean gradient. Here batches are counted in those of one worker, so M is the number of workers, and
M₀ is 1.

`runtime.parts` estimates the scale.
"""

from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import fmean, stdev

WARM_UP_STEPS, WARM_UP_S = 5, 0.5  # both have to pass
LEAST_STEPS, LEAST_LOOKS = 20, 4
CONFIDENCE = 2.0  # standard errors on each side; about 95 %
CLOSE_ENOUGH = 0.03  # of the mean: the confidence interval on each side
LONGEST_S = 20.0  # a step time that varies more than that counts after this time
DRIFT, DRIFT_S = 0.15, 60.0  # a change of this share, in the mean of this time


@dataclass
class Gauge:
    """The steps of one round, as they come. `mean` of no step is 0."""

    began: tuple[int, float] | None = None  # steps and time at the first look
    seen: tuple[int, float] | None = None  # at the newest look after the warm-up
    looks: list[tuple[float, int]] = field(default_factory=list)  # seconds and steps of each
    steps: int = 0  # in `looks`
    seconds: float = 0.0

    def take(self, steps: int, at: float) -> None:
        """Take in the number of steps done until a time; both only grow."""
        if self.began is None:
            self.began = steps, at
            return
        if self.seen is None:
            first_steps, first_at = self.began
            if steps - first_steps >= WARM_UP_STEPS and at - first_at >= WARM_UP_S:
                self.seen = steps, at
            return
        done, took = steps - self.seen[0], at - self.seen[1]
        if done <= 0 or took <= 0:
            return
        self.seen = steps, at
        self.looks.append((took, done))
        self.steps, self.seconds = self.steps + done, self.seconds + took
        while self.seconds - self.looks[0][0] > DRIFT_S and len(self.looks) > LEAST_STEPS:
            old, fewer = self.looks.pop(0)
            self.steps, self.seconds = self.steps - fewer, self.seconds - old

    @property
    def mean(self) -> float:
        """Seconds of a step."""
        return self.seconds / self.steps if self.steps else 0.0

    def is_known(self, worst: float = inf) -> bool:
        """Return whether the mean is exact enough to compare sizes by it.

        Steps that certainly take longer than `worst` need no exact mean.
        """
        if self.steps < LEAST_STEPS or len(self.looks) < LEAST_LOOKS:
            return False
        error, mean = self._interval()
        exact = error <= CLOSE_ENOUGH * mean or self.seconds >= LONGEST_S - 1
        return exact or mean - error > worst

    @property
    def error(self) -> float:
        """The confidence interval on each side, as a share of the mean; 0: not known."""
        if len(self.looks) < LEAST_LOOKS:
            return 0.0
        error, mean = self._interval()
        return error / mean

    def _interval(self) -> tuple[float, float]:
        times = [took / done for took, done in self.looks]
        return CONFIDENCE * stdev(times) / sqrt(len(times)), fmean(times)

    def has_drifted(self, known: float) -> bool:
        """Return whether the steps of the last minute differ from the step time known before."""
        full = self.seconds >= DRIFT_S * 0.9
        return full and abs(self.mean / known - 1) > DRIFT


def efficiency(noise: float, size: int) -> float:
    """Return what a sample teaches with this many workers, against one worker."""
    return (noise + 1) / (noise + size)
