"""A model of the time of a step for any number of workers, fitted to the sizes that were measured.

A step of n workers takes, in seconds,

    T(n) = (m − 1)·g + (g^γ + s^γ)^(1/γ)

`m` is the number of micro-batches that one worker computes: ⌈V/n⌉ where the script divides a fixed
batch into V of them, else 1. `g` is the time for one. `s` is the time to exchange gradients, of
which γ says how much is hidden behind the last micro-batch: α + β·(n − 2), with values of their own
for one host and for several; 0 for a single worker. The formula is that of Pollux (Qiao et al.,
OSDI 2021).

What was not tried is expected to be good: without a measurement on several hosts these cost what
one host costs, and without one of two workers the exchange costs nothing. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from scipy.optimize import least_squares  # type: ignore[import-untyped]

from elastic_driver.policies.scaling.noise import efficiency

LEAST, MOST = 1e-7, 1e5  # seconds; bounds of each time in the model
MOST_OVERLAP = 10.0  # the largest γ: the exchange is hidden almost completely
DOUBT = 0.02  # weight of "costs nothing" against a measurement


@dataclass(frozen=True)
class Layout:
    """The sizes a job may have, and how they would lie on its hosts.

    `hosts` has the number of hosts that each allowed size needs. `micro_batches` is V, or None
    where every worker brings a batch of its own. There `noise` is the scale of the gradients' noise
    (`policies.scaling.noise`); None: it is not known, and all samples teach as much.
    """

    hosts: Mapping[int, int]
    micro_batches: int | None = None
    noise: float | None = None

    def passes(self, size: int) -> int:
        """Return how many micro-batches the busiest worker computes in a step."""
        return 1 if self.micro_batches is None else -(-self.micro_batches // size)

    def work(self, size: int) -> float:
        """Return how much a step of this size gets done, in batches."""
        if self.micro_batches is not None:
            return 1.0
        return size * (1.0 if self.noise is None else efficiency(self.noise, size))

    def candidates(self) -> list[int]:
        """Return the sizes that are worth a try, smallest first.

        Of the sizes at which the busiest worker has equally much to do only the smallest is.
        """
        found: dict[int, int] = {}
        for size in sorted(self.hosts):
            found.setdefault(size if self.micro_batches is None else self.passes(size), size)
        return sorted(found.values())


@dataclass(frozen=True)
class SpeedModel:
    """The fitted parameters, in seconds except γ."""

    layout: Layout
    one_pass: float
    alpha: tuple[float, float]  # on one host, across hosts
    beta: tuple[float, float]
    overlap: float

    def step_time(self, size: int) -> float:
        """Return the expected seconds of a step with this many workers."""
        exchange = 0.0
        if size > 1:
            across = self.layout.hosts.get(size, 1) > 1
            exchange = self.alpha[across] + self.beta[across] * (size - 2)
        last = max(self.one_pass, exchange)  # taken out of the sum, so that no power overflows
        ratio = min(self.one_pass, exchange) / last
        last *= float((1.0 + ratio**self.overlap) ** (1.0 / self.overlap))
        return (self.layout.passes(size) - 1) * self.one_pass + last

    def rate(self, size: int) -> float:
        """Return the expected work per second, in the unit of `Layout.work`."""
        return self.layout.work(size) / self.step_time(size)


def fit(layout: Layout, step_times: Mapping[int, float]) -> SpeedModel:
    """Return the model for these measured step times (seconds, by size; at least one).

    The squares of the logarithms' differences are least, within the bounds of each parameter.
    """
    sizes = sorted(step_times)
    several = [size for size in sizes if layout.hosts.get(size, 1) > 1]
    one = [size for size in sizes if size > 1 and size not in several]
    smallest = sizes[0]
    first_guess = step_times[smallest] / layout.passes(smallest)

    def model(values: Sequence[float]) -> SpeedModel:
        one_pass, a_one, b_one, a_across, b_across = map(exp, values[:5])
        if not several:
            a_across, b_across = a_one, b_one
        elif not one:
            a_one, b_one = min(a_one, a_across), min(b_one, b_across)
        return SpeedModel(layout, one_pass, (a_one, a_across), (b_one, b_across), values[5])

    def residuals(values: Sequence[float]) -> list[float]:
        found = model(values)
        wrong = [log(found.step_time(size) / step_times[size]) for size in sizes]
        free = (*found.alpha, *(beta * max(sizes) for beta in found.beta))
        return [*wrong, *(DOUBT * cost / first_guess for cost in free)]

    low = [log(LEAST)] * 5 + [1.0]
    high = [log(MOST)] * 5 + [MOST_OVERLAP]
    tries = []
    for share in (0.02, 0.3):  # of the exchange in a step; the fit may end in a local minimum
        guess = log(min(max(first_guess, LEAST * 10), MOST / 10))
        begin = [guess, guess + log(share), guess + log(share / 10)]
        begin = [*begin, begin[1], begin[2], 2.0]
        inside = [min(max(b, lo), hi) for b, lo, hi in zip(begin, low, high, strict=True)]
        tries.append(least_squares(residuals, inside, bounds=(low, high), max_nfev=200))
    best = min(tries, key=lambda found: float(found.cost))
    return model([float(value) for value in best.x])
