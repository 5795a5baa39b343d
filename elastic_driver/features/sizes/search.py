"""The search for the size at which a job trains fastest, one measured size after the other. Pure.

First the size doubles as long as that makes the job faster; where a second host joins, it doubles
once more even if that costs speed. If the first size is not the smallest allowed, half of the best
size is tried, too. Then the model names the best size that was not tried. When it
names none, sizes beside the fastest one are tried whose speed may be better by a rule of thumb:
between two measured sizes, a curve of speed lies below the lines through its neighbours on as many
hosts. Last come smaller sizes that may be as fast. The smallest size that is certainly within 5 %
of the fastest one wins.

The model gives the time of a step for any number of workers, fitted to the sizes that were
measured. A step of n workers takes, in seconds,

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
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, hypot, inf, log

from scipy.optimize import least_squares  # type: ignore[import-untyped]

from elastic_driver.features.sizes.gauge import efficiency

LEAST, MOST = 1e-7, 1e5  # seconds; bounds of each time in the model
MOST_OVERLAP = 10.0  # the largest γ: the exchange is hidden almost completely
DOUBT = 0.02  # weight of "costs nothing" against a measurement


@dataclass(frozen=True)
class Layout:
    """The sizes a job may have, and how they would lie on its hosts.

    `hosts` has the number of hosts that each allowed size needs. `micro_batches` is V, or None
    where every worker brings a batch of its own. There `noise` is the scale of the gradients' noise
    (`features.sizes.gauge`); None: it is not known, and all samples teach as much.
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


CLOSE = 0.95  # a size this near to the fastest one is as good
GAIN = 1.02  # doubling has to make the job this many times as fast
MOVES_BESIDE_DOUBLING = 3  # moves of one search, the return to the best size included
DOUBTED = 0.8  # of the confidence interval of a comparison: 19 of 20 are right
LIKELY = 0.8  # of the highest bound: of such sizes the one in the middle is tried


@dataclass(frozen=True)
class Proposal:
    """The size to have next, and why. `last`: the search is over."""

    size: int
    reason: str
    last: bool = False


@dataclass
class Search:
    """One search. `rates` is the work per second (`Layout.work`) at each size that was measured."""

    layout: Layout
    rates: dict[int, float] = field(default_factory=dict)
    moves: int = 0  # changes of the size so far
    order: list[int] = field(default_factory=list)  # the sizes as they were measured
    errors: dict[int, float] = field(default_factory=dict)  # of the rates, as shares of them

    def weigh_anew(self, layout: Layout) -> None:
        """Go on with a layout in which a step of a size gets another amount of work done."""
        for size in self.rates:
            self.rates[size] *= layout.work(size) / self.layout.work(size)
        self.layout = layout

    def measured(self, size: int, step_time: float, error: float = 0.0) -> None:
        """Take in the seconds of a step at a size, and how exactly they are known."""
        self.rates[size] = self.layout.work(size) / step_time
        self.errors[size] = error
        self.order.append(size)

    def winner(self) -> int:
        """Return the smallest measured size that is certainly within 5 % of the fastest one."""
        best = max(self.rates, key=lambda size: (self.rates[size], -size))
        return min(size for size in self.rates if size == best or self._is_close(size, best))

    def _is_close(self, size: int, best: int) -> bool:
        doubt = hypot(self.errors.get(size, 0.0), self.errors.get(best, 0.0))
        return self.rates[size] >= min(1.0, CLOSE + DOUBTED * doubt) * self.rates[best]

    def next(self) -> Proposal:
        """Return the size to have next, after the present one was measured."""
        proposal = self._explore()
        # A try costs this move, and perhaps one back.
        if proposal is not None and self.moves + 2 <= self._most_moves():
            return proposal
        best = self.winner()
        others = ", ".join(f"{size}: {self.rates[size]:.3g}" for size in sorted(self.rates))
        return Proposal(best, f"size {best} is best (work per second of {others})", last=True)

    def _most_moves(self) -> int:
        return MOVES_BESIDE_DOUBLING + max(self.layout.hosts).bit_length() - 1

    def _explore(self) -> Proposal | None:
        if (proposal := self._double() or self._halve()) is not None:
            return proposal
        promised = self._promised(self._untried(2 * max(self.rates)))
        return self._ask_model(promised) or self._doubt() or self._save_slots(promised)

    def _double(self) -> Proposal | None:
        """Return the next size of the doublings, None if they are over."""
        candidates = self.layout.candidates()
        tried = sorted(self.rates)
        largest = tried[-1]
        larger = [size for size in candidates if largest < size <= 2 * largest]
        if not larger:  # the next allowed size may be further away
            larger = [size for size in candidates if size > largest][:1]
        if not larger:
            return None
        if len(tried) > 1:
            before = tried[-2]
            slower = self.rates[largest] < GAIN * self.rates[before]
            joined = self._hosts(before) == 1 < self._hosts(largest)
            if slower and not joined:
                return None
            if largest < max(self.order[:-1], default=0):
                return None
        return Proposal(larger[-1], f"doubled: the largest size so far is {largest}")

    def _hosts(self, size: int) -> int:
        return self.layout.hosts.get(size, 1)

    def _halve(self) -> Proposal | None:
        """Return a smaller size, if the smallest measured one is the best so far."""
        smallest = min(self.rates)
        if self.winner() != smallest:
            return None
        smaller = [size for size in self.layout.candidates() if size < smallest]
        if not smaller:
            return None
        half = [size for size in smaller if 2 * size >= smallest]
        return Proposal((half or smaller[-1:])[0], f"halved: size {smallest} may be too large")

    def _ask_model(self, promised: Mapping[int, float]) -> Proposal | None:
        """Return the best size that was not tried, None if the model sees no better one."""
        size = max(promised, key=lambda each: (promised[each], -each), default=0)
        fastest = max(self.rates.values())
        if not size or promised[size] * CLOSE < fastest:
            return None
        gain = promised[size] / fastest - 1
        return Proposal(size, f"the model promises {gain:.0%} more speed")

    def _save_slots(self, promised: Mapping[int, float]) -> Proposal | None:
        """Return a smaller size than the best one that may be as good, None if there is none."""
        least = CLOSE * max(self.rates.values())
        cheaper = [size for size in promised if size < self.winner() and promised[size] >= least]
        if not cheaper:
            return None
        return Proposal(min(cheaper), "the model promises about the same speed")

    def _untried(self, most: int) -> list[int]:
        return [n for n in self.layout.candidates() if n not in self.rates and n <= most]

    def _doubt(self) -> Proposal | None:
        """Return the size between measured ones that may be the fastest, None if none can be."""
        fastest = max(self.rates.values())
        bounds = {size: self._bound(size) for size in self._untried(max(self.rates))}
        highest = max(bounds.values(), default=0.0)
        if highest * CLOSE < fastest:
            return None
        likely = [size for size in bounds if bounds[size] >= max(LIKELY * highest, fastest)]
        size = likely[(len(likely) - 1) // 2]
        return Proposal(size, "it is near the fastest size, and may be faster")

    def _bound(self, size: int) -> float:
        """Return the most speed a size can have by a rule of thumb; 0: the rule says nothing.

        On as many hosts the curve of speed bends downwards. Where a host joins it may fall, so no
        line is drawn from more hosts to fewer ones. If the smallest size so far has several hosts,
        nothing is known of one host, and its largest size may be any good.
        """
        here, tried = self._hosts(size), sorted(self.rates)
        below = [each for each in tried if each < size][-2:]
        above = [each for each in tried if each > size][:2]
        bounds = []
        if len(below) == 2 and self._hosts(below[0]) == self._hosts(below[1]):
            bounds.append(self._on_line(below[0], below[1], size))
        elif below:
            bounds.append(self.rates[below[-1]] * (size / below[-1]) ** self._growth(below[-1]))
        elif self._hosts(above[0]) > here == 1:
            largest = max(each for each in self.layout.candidates() if self._hosts(each) == 1)
            return inf if size == largest else 0.0
        if len(above) == 2 and self._hosts(above[0]) == here:
            bounds.append(self._on_line(above[0], above[1], size))
        return min(bounds, default=0.0)

    def _growth(self, size: int) -> float:
        """Return the power of the number of workers with which speed grew last below a size."""
        for first, second in reversed([*pairwise(n for n in sorted(self.rates) if n <= size)]):
            if self._hosts(first) == self._hosts(second):
                ratio = self.rates[second] / self.rates[first]
                return min(1.0, max(0.0, log(ratio) / log(second / first)))
        return 1.0  # at most with the number of workers

    def _on_line(self, first: int, second: int, size: int) -> float:
        low, high = self.rates[first], self.rates[second]
        if size < first and low > high:  # behind the fastest size speed falls by the same share
            return low * float((low / high) ** ((first - size) / (second - first)))
        return low + (high - low) * (size - first) / (second - first)

    def _promised(self, untried: list[int]) -> Mapping[int, float]:
        """Return the speed the model expects of each size, pulled towards its measured neighbours.

        The error of the model at the nearest measured sizes is interpolated. With few sizes
        measured the model has little to go by, so it promises no more than the rule of thumb.
        """
        if not untried:
            return {}
        times = {size: self.layout.work(size) / rate for size, rate in self.rates.items()}
        model = fit(self.layout, times)
        wrong = {size: rate / model.rate(size) for size, rate in self.rates.items()}
        promised = {}
        for size in untried:
            below = max((s for s in wrong if s < size), default=min(wrong))
            above = min((s for s in wrong if s > size), default=max(wrong))
            share = (size - below) / (above - below) if above > below else 0.0
            error = (1 - share) * wrong[below] + share * wrong[above]
            promised[size] = min(model.rate(size) * error, self._bound(size) or inf)
        return promised
