"""How many workers each of several jobs gets of the slots they share.

First the jobs get the fewest workers they can train with: those that train now, then the others, in
order of arrival. A job that finds too few slots waits, and no job overtakes it, or small jobs would
keep a large one waiting for ever. The slots that are left go where they maximise the weighted
harmonic mean, over the jobs, of X(n) / X(fair share), where X(n) is the speed with n workers. That
mean is the fairness of Pollux (Qiao et al., OSDI 2021) with the exponent −1. It is largest where
the sum of weight · X(fair share) / X(n) is smallest, and such a sum is minimised exactly by dynamic
programming, one job after the other.

A change of the size is charged to the job by Pollux's factor (T − R·δ) / (T + δ), for a job of the
age T that was changed R times before, at a cost of δ each.

Pure. Times are seconds, speeds are work per second in a unit of the job's own.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf, isfinite
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from elastic_driver.brain.host_choice import Space

LEAST_FACTOR = 0.01  # of a change; a job that has to change is still worth something
EFFORT = 100  # shares that are looked at for the best that fit, where space is limited
_EQUAL = 1e-12  # sums that differ by less than this share of them are equal

_Costs: TypeAlias = Mapping[str, Mapping[int, float]]  # of each size of each job


@dataclass(frozen=True)
class SharedJob:
    """A job that wants slots.

    `speeds` has the speed at each size that the job may have; the smallest of them is its min-np.
    A job whose size is held by a user has only that one. `size` is the present one, 0 for a job
    that does not train yet. `age` is T, `changes` R and `change_cost` δ, see above.
    """

    name: str
    speeds: Mapping[int, float]
    weight: float = 1.0
    size: int = 0
    age: float = 0.0
    changes: int = 0
    change_cost: float = 0.0

    def __post_init__(self) -> None:
        if not self.speeds or min(self.speeds) < 1:
            raise ValueError(f"{self.name}: a job needs speeds of one worker or more")
        for size, speed in self.speeds.items():
            if not (isfinite(speed) and speed > 0):
                raise ValueError(f"{self.name}: the speed of {size} workers is {speed}")
        if not (isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"{self.name}: the weight is {self.weight}, it must be above 0")

    @property
    def least(self) -> int:
        """The fewest workers it can train with."""
        return min(self.speeds)

    def speed_of_share(self, share: float) -> float:
        """Return the speed with so many slots, which may be a fraction.

        Between two sizes it lies on the line between them, below the smallest on the line to zero.
        """
        sizes = [0, *sorted(self.speeds)]
        above = bisect_left(sizes, share)
        if above == len(sizes):
            return self.speeds[sizes[-1]]
        high = sizes[above]
        low = sizes[above - 1] if above else 0
        part = (share - low) / (high - low) if high > low else 0.0
        slower = self.speeds.get(low, 0.0)
        return slower + (self.speeds.get(high, 0.0) - slower) * part

    def effective_speed(self, size: int) -> float:
        """Return the speed at a size, reduced by the cost of changing to it."""
        if self.size in (0, size) or not self.change_cost:
            return self.speeds[size]
        lost = self.changes * self.change_cost
        factor = (self.age - lost) / (self.age + self.change_cost)
        return self.speeds[size] * max(LEAST_FACTOR, factor)


def fair_shares(
    jobs: Sequence[SharedJob], slots: int, space: Space | None = None
) -> dict[str, int]:
    """Return the number of workers of each job; 0 for those that wait. `jobs` in order of arrival.

    No job gets slots that make it no faster. Of equally good shares, those are taken that give
    more to the jobs that came first. `space`: where jobs may have workers, if that differs. If the
    best shares do not fit there, the best of those that do are taken.
    """
    found = dict.fromkeys((job.name for job in jobs), 0)
    if len(found) < len(jobs):
        raise ValueError("two jobs have the same name")
    space = Space({"": slots}) if space is None else space
    admitted = _admitted(jobs, space)
    costs = {
        job.name: _worthwhile(costs, job.least if job.name in space.given_up else slots)
        for job, costs in zip(admitted, share_costs(admitted, slots), strict=True)
    }
    return found | _cheapest_that_fit(costs, slots, space)


def share_costs(jobs: Sequence[SharedJob], slots: int) -> list[dict[int, float]]:
    """Return the cost of each size of each job: weight · X(fair share) / X(n).

    The fair share is the job's part of the slots by its weight. So of two jobs that grow linearly,
    one with twice the weight gets twice the slots.
    """
    weights = sum(job.weight for job in jobs)
    costs = []
    for job in jobs:
        fair = job.weight * job.speed_of_share(slots * job.weight / weights)
        costs.append({size: fair / job.effective_speed(size) for size in job.speeds})
    return costs


def _admitted(jobs: Sequence[SharedJob], space: Space) -> list[SharedJob]:
    """Return the jobs that get workers, in order of arrival."""
    needs: dict[str, int] = {}
    for job in sorted(jobs, key=lambda job: job.size == 0):  # stable: those that train come first
        with_it = needs | {job.name: job.least}
        if not space.fits(with_it):
            space.give_up_wishes(job.name)
        if space.fits(with_it):
            needs = with_it
        elif not job.size:
            break
    return [job for job in jobs if job.name in needs]


def _worthwhile(costs: Mapping[int, float], most: int) -> dict[int, float]:
    """Return the sizes up to `most` that cost less than every smaller one."""
    kept: dict[int, float] = {}
    cheapest = inf
    for size in sorted(size for size in costs if size <= most):
        if costs[size] < cheapest * (1 - _EQUAL):
            kept[size] = cheapest = costs[size]
    return kept


def _cheapest_that_fit(costs: _Costs, slots: int, space: Space) -> dict[str, int]:
    """Return the size of each job, so that there is space for all and the sum of costs is least.

    If jobs lack space beside each other, one of them has to have fewer workers: each is tried, and
    the cheapest candidate so far is looked at first. After `EFFORT` candidates only the job is
    tried that loses least by it.
    """
    made = 0
    tried: set[tuple[int, ...]] = set()
    candidates = [_candidate(costs, slots, made)]
    while True:
        cheapest = heappop(candidates)
        sizes, options = cheapest.sizes, cheapest.options
        crowd = space.crowd(sizes)
        if not crowd:
            return sizes
        losses = {job: _loss(options[job], sizes[job]) for job in sizes if job in crowd}
        smaller = [job for job, loss in losses.items() if loss < inf]
        if cheapest.number >= EFFORT:
            candidates.clear()
            tried.clear()
            smaller = [min(smaller, key=losses.__getitem__)]
        for job in smaller:
            fewer = {size: cost for size, cost in options[job].items() if size < sizes[job]}
            left = {**options, job: fewer}
            key = tuple(map(len, left.values()))
            if key not in tried:
                tried.add(key)
                made += 1
                heappush(candidates, _candidate(left, slots, made))


class _Candidate(NamedTuple):
    """The cheapest sizes of all jobs by some of their options; compared by cost, then by age."""

    cost: float
    number: int  # no two candidates have the same
    options: _Costs
    sizes: dict[str, int]


def _candidate(options: _Costs, slots: int, number: int) -> _Candidate:
    """Return the candidate with the cheapest sizes that fit into the slots."""
    sizes = dict(zip(options, _cheapest(list(options.values()), slots), strict=True))
    cost = sum(options[job][size] for job, size in sizes.items())
    return _Candidate(cost, number, options, sizes)


def _loss(costs: Mapping[int, float], size: int) -> float:
    """Return the cost that one more worker saves; inf for the smallest size."""
    smaller = max((n for n in costs if n < size), default=None)
    return inf if smaller is None else (costs[smaller] - costs[size]) / (size - smaller)


def _cheapest(costs: Sequence[Mapping[int, float]], slots: int) -> list[int]:
    """Return one size of each job, so that all fit into the slots and the sum of costs is least."""
    # least[u]: the least sum of the jobs so far with at most u slots; taken[u]: the last one's size
    least = np.zeros(slots + 1)
    chosen = []
    for sizes in costs:
        after = np.full(slots + 1, inf)
        taken: Any = np.zeros(slots + 1, dtype=int)
        for size in sorted(size for size in sizes if size <= slots):
            total = least[: slots + 1 - size] + sizes[size]
            better = total < after[size:] * (1 - _EQUAL)
            after[size:][better] = total[better]
            taken[size:][better] = size
        least = after
        chosen.append(taken)
    found: list[int] = []
    left = slots
    for taken in reversed(chosen):
        found.append(int(taken[left]))
        left -= found[-1]
    return found[::-1]
