"""The speed that a job is expected to have at each number of workers: an optimistic curve.

At a measured size it is what was measured. Elsewhere it is as high as it can reasonably be, because
a size that looks too slow is never tried, and so never known:

    speed
      |              o-----.......   above the largest: the model's, at most twice that size; if the
      |          .-o               last workers brought nothing: (n / largest) ** POWER
      |       o-´                  between two: the model's, pulled to its measured neighbours, and
      |    .-´                     halfway up to what a curve that bends downwards can have
      |  .´                        below the smallest: (n / smallest) ** POWER for a few workers
      |.´                          less, then in proportion
      +------------------------ workers

The model is that of the step time (`features.sizes.search`). Of a job without a measured size the
speed grows in proportion to its workers. Pure. Speeds are work per second, times are seconds.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import inf

from elastic_driver.brain.algorithm import JobView, SpeedAt
from elastic_driver.features.sizes.search import CLOSE, Layout, SpeedModel, fit

NOTICEABLE = 0.02  # the share by which a speed or a cost has to differ
LEAST_SPEED = 0.01  # of the fastest measured size; a speed is above 0
POWER = 0.25  # beyond the measured sizes, speed(n) = speed(m) * (n / m) ** POWER


def fewest_hosts(hosts: Mapping[str, int]) -> dict[int, int]:
    """Return the fewest hosts on which each number of workers fits."""
    found: dict[int, int] = {}
    size = 0
    for number, slots in enumerate(sorted(hosts.values(), reverse=True), start=1):
        for _slot in range(slots):
            size += 1
            found[size] = number
    return found


def expected_speeds(job: JobView, hosts: Mapping[int, int], fitted: bool) -> dict[int, float]:
    """Return the speed at each size that a job may have now.

    `hosts`: the fewest hosts by size. `fitted`: by a model that is fitted to all measured sizes;
    else by one of the largest of them, in which workers exchange for nothing.
    """
    most = len(hosts) if job.most is None else min(max(job.least, job.most), len(hosts))
    sizes = [size for size in hosts if job.least <= size <= most]
    if not job.speeds:
        return {size: float(size) for size in sizes}
    times = step_times(job.speeds, hosts)
    largest = max(job.least, 2 * max(times))
    needed = {n: hosts.get(n, 1) for n in {*sizes, *times}}
    layout = Layout(needed, job.micro_batches, rounded(job.noise))
    worthwhile = {*layout.candidates(), *times, job.least, job.size}
    offered = [size for size in sizes if size <= largest and size in worthwhile]
    fixed = layout.micro_batches, layout.noise
    speeds = _predicted(fitted, fixed, tuple(layout.hosts.items()), tuple(times.items()))
    return _without_needless({size: speeds[size] for size in offered}, set(times), job.least)


def rounded(noise: float | None) -> float | None:
    """Return a noise of two digits: a small difference is no reason to compute anew."""
    return None if noise is None else float(f"{noise:.1e}")


def step_times(speeds: Sequence[SpeedAt], hosts: Mapping[int, int]) -> dict[int, float]:
    """Return one step time of each measured size: that on the number of hosts nearest to `hosts`.

    `hosts`: the fewest hosts by size.
    """
    found: dict[int, SpeedAt] = {}
    for each in speeds:
        expected = hosts.get(each.size, 1)
        before = found.get(each.size)
        if before is None or abs(each.hosts - expected) < abs(before.hosts - expected):
            found[each.size] = each
    return {size: found[size].step_time for size in sorted(found)}


@lru_cache(maxsize=1024)
def _predicted(
    fitted: bool,
    fixed: tuple[int | None, float | None],
    hosts: tuple[tuple[int, int], ...],
    times: tuple[tuple[int, float], ...],
) -> Mapping[int, float]:
    """Return the speed at each size. `times`: the step times of the measured sizes, in order."""
    layout = Layout(dict(hosts), *fixed)
    enough = fitted and len(times) > 1
    model = fit(layout, dict(times)) if enough else _model_of_one(layout, *times[-1])
    rates = {size: layout.work(size) / time for size, time in times}
    errors = {size: rate / model.rate(size) for size, rate in rates.items()}
    found = dict(rates)
    for size in layout.hosts:
        if size < min(rates):
            found[size] = _below_measured(rates, size)
        elif size not in rates:
            below = max((s for s in errors if s < size), default=min(errors))
            above = min((s for s in errors if s > size), default=max(errors))
            part = (size - below) / (above - below) if above > below else 0.0
            expected = model.rate(size) * ((1 - part) * errors[below] + part * errors[above])
            if size > max(rates):
                found[size] = min(expected, _most_above_measured(layout, rates, size))
            elif (most := _most_between_measured(rates, size)) < inf:
                # Halfway up to it, or a peak between two measured sizes would never be found.
                found[size] = min(most, (expected + most) / 2)
            else:
                found[size] = expected
    return found


def _model_of_one(layout: Layout, size: int, step_time: float) -> SpeedModel:
    """Return the model of a single measurement, in which the exchange costs nothing."""
    free = (0.0, 0.0)
    return SpeedModel(layout, step_time / layout.passes(size), free, free, overlap=1.0)


def _most_between_measured(rates: Mapping[int, float], size: int) -> float:
    """Return the highest speed at a size between measured ones, if the curve bends downwards.

    Such a curve lies below the line through the two measured sizes next below, and below that
    through the two next above. inf: there are not two on either side.
    """
    most = inf
    below = sorted((n for n in rates if n < size), reverse=True)[:2]
    above = sorted(n for n in rates if n > size)[:2]
    for near, far in (pair for pair in (below, above) if len(pair) == 2):
        slope = (rates[far] - rates[near]) / (far - near)
        most = min(most, rates[near] + slope * (size - near))
    return max(LEAST_SPEED * max(rates.values()), most)


def _most_above_measured(layout: Layout, rates: Mapping[int, float], size: int) -> float:
    """Return the highest speed at a size above all measured ones.

    inf, if the last workers that were added made the job noticeably faster. If they came with the
    second host, the power is twice as large: the first exchange between hosts costs once.
    """
    if len(rates) == 1:
        return inf
    before, largest = sorted(rates)[-2:]
    if rates[largest] >= (1 + NOTICEABLE) * rates[before]:
        return inf
    joined = layout.hosts[before] == 1 < layout.hosts[largest]
    return rates[largest] * float((size / largest) ** (2 * POWER if joined else POWER))


def _below_measured(rates: Mapping[int, float], size: int) -> float:
    """Return the speed at a size below all measured ones.

    For up to a quarter of the workers less (at least one) it is little less than at the smallest
    measured size: else a job that grows no more would never be tried with fewer workers, and
    others would lack its slots. It is never above the line through the two smallest measured sizes,
    nor below the line to zero.
    """
    smallest, *larger = sorted(rates)
    linear = rates[smallest] * size / smallest
    if size < smallest - max(1, smallest // 4):
        return linear
    expected = rates[smallest] * float((size / smallest) ** POWER)
    if larger:
        slope = (rates[larger[0]] - rates[smallest]) / (larger[0] - smallest)
        expected = min(expected, rates[smallest] - slope * (smallest - size))
    return max(expected, linear)


def _without_needless(
    speeds: Mapping[int, float], measured: set[int], least: int
) -> dict[int, float]:
    """Return the sizes that are worth a look.

    As long as a size may be faster than all measured ones, that is every size; after that, those
    up to the smallest measured size that is as good as the fastest.
    """
    fastest = max((speed for size, speed in speeds.items() if size in measured), default=0.0)
    if max(speeds.values()) * CLOSE > fastest:
        return dict(speeds)
    enough = min(n for n, s in speeds.items() if n in measured and s >= CLOSE * fastest)
    return {size: speed for size, speed in speeds.items() if size <= max(least, enough)}
