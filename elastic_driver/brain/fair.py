"""The algorithm that the Brain uses if no other is named: fair shares, from speeds as measured.

How fast a job is with so many workers comes from its measured sizes and the model of the step time
(`features.sizes.search`), which is optimistic about sizes that were not tried: so they are
tried when slots are there. A job of which nothing is measured counts as one that grows linearly.
`shares` gives each job its number of workers, `placement` their hosts, which have the memory and
the processors for them. A plan differs from what is there only if that makes
the jobs faster by a noticeable part, or saves slots. Pure.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import inf

from elastic_driver.brain.algorithm import JobView, Plan, SpeedAt, View
from elastic_driver.brain.placement import Space, place, place_quickly, space_of
from elastic_driver.brain.shares import SharedJob, fair_shares, share_costs
from elastic_driver.features.sizes.autoscaler import HORIZON_S, REPAYS
from elastic_driver.features.sizes.search import CLOSE, Layout, Search, SpeedModel, fit
from elastic_driver.words import counted

GAIN = 0.02  # a plan has to save this share of the costs of the jobs that it changes
FITTED = 25  # jobs; with more of them, models would take too long to fit
EXACT = 60  # jobs times hosts; more of them are not placed in the best way, but in time
MEASURE_S = 60.0  # a job is left alone for so long while its size is measured
LEAST_SPEED = 0.01  # of the fastest measured size; a speed is above 0
HOPE = 0.25  # the power of the size by which the speed shrinks with fewer workers than measured
BUSY = 0.9  # of the processors of a host without any of our workers: others use it
_OPTIONAL = {"size measured", "slowdown", "time passed", "job back"}  # others may make room


def fair(view: View) -> Plan:
    """Return the plan with fair shares for all jobs."""
    space = _usable(view)
    sizes, whys = _sizes(view, space)
    now = {job.name: job.at for job in view.jobs}
    if all(sizes[job.name] == _size(job, space) == job.size for job in view.jobs):
        placement: Mapping[str, Mapping[str, int]] = now
    else:
        exact = len(view.jobs) * len(space.slots) <= EXACT
        placement = (place if exact else place_quickly)(sizes, space, now)
    workers = {job: dict(at) for job, at in placement.items() if at}
    shares = ", ".join(f"{name}: {size}" for name, size in sizes.items())
    reasons = {j.name: _reason(j, sizes[j.name], whys.get(j.name, "")) for j in view.jobs}
    return Plan(workers=workers, reason=f"fair shares ({view.event}): {shares}", reasons=reasons)


def _reason(job: JobView, size: int, why: str) -> str:
    if not size:
        memory = "" if not job.room else " on hosts with the memory for its workers"
        slots = "slot" if job.least == 1 else "slots"
        return f"it waits for {job.least} free {slots}{memory}"
    if job.held is not None:
        return f"a user asked for {_workers(job.held)}"
    return why


def _workers(count: int) -> str:
    return counted(count, "worker")


def _why_shares(jobs: Sequence[SharedJob], found: Mapping[str, int], slots: int) -> dict[str, str]:
    """Return why each job has got its share: its figure in the sum, and those beside it."""
    sharing = [job for job in jobs if found[job.name]]
    total = sum(job.weight for job in sharing)
    whys = {}
    for job, costs in zip(sharing, share_costs(sharing, slots), strict=True):
        size = found[job.name]
        part = f"its part of {counted(slots, 'slot')} (weight {job.weight:g} of {total:g})"
        near = [max((n for n in costs if n < size), default=None)]
        near.append(min((n for n in costs if n > size), default=None))
        others = [f"with {n} {costs[n]:.3g}" for n in near if n is not None]
        counts = ", ".join([f"with {_workers(size)} it counts {costs[size]:.3g}", *others])
        share = f"{part} is {slots * job.weight / total:.3g}"
        whys[job.name] = f"{share}; {counts}; the sum over all jobs is the smallest that fits"
    return whys


def _usable(view: View) -> Space:
    """Return the space on the hosts, without those that others keep busy if the rest is enough."""
    ours = {host for job in view.jobs for host, count in job.at.items() if count}
    calm = [h for h in view.hosts if h.name in ours or (h.cpu or 0.0) < BUSY]
    space = space_of(view.jobs, calm)
    needed = {job.name: max(job.least, job.held or 0) for job in view.jobs}
    return space if space.fits(needed) else space_of(view.jobs, view.hosts)


def _size(job: JobView, space: Space) -> int:
    """Return how many of its workers are where there is space for them."""
    most = space.of(job.name)
    return sum(min(count, most.get(host, 0)) for host, count in job.at.items())


# ---- how many workers --------------------------------------------------------------------


def _sizes(view: View, space: Space) -> tuple[dict[str, int], dict[str, str]]:
    """Return the number of workers of each job, and why, of those that have some."""
    possible = [job for job in view.jobs if _can_train(job, space)]
    measured = _being_measured(view, space)
    fixed = measured | _held(possible, measured, space)
    few, slots = len(view.jobs) <= FITTED, sum(space.slots.values())
    alike = _hosts_needed(space.slots)
    layouts = {
        job.name: _hosts_needed(space.of(job.name)) if space.is_limited(job.name) else alike
        for job in possible
    }
    jobs = []
    for job in possible:
        is_fixed = job.name in fixed
        speeds = {fixed[job.name]: 1.0} if is_fixed else _speeds(job, layouts[job.name], few)
        jobs.append(_shared(job, speeds))
    found = dict.fromkeys((job.name for job in view.jobs), 0) | fair_shares(jobs, slots, space)
    kept = {job.name: job.size for job in view.jobs}
    whys = _why_shares(jobs, found, slots)
    if _is_as_good(jobs, kept, found, space):
        for name in [name for name in whys if found[name] != kept[name]]:
            gain = f"{found[name]} would make the sum less than {GAIN:.0%} smaller"
            whys[name] = f"it stays at {_workers(kept[name])}: {gain}"
        found = kept
    for name, size in measured.items():
        whys[name] = f"its speed with {_workers(size)} is measured, for {MEASURE_S:g} s at most"
    settled, left = fixed.keys() | space.given_up, slots - sum(found.values())
    for job in possible:
        share, layout = found[job.name], layouts[job.name]
        if share and few and job.measured and job.name not in settled:
            most = space.most(job.name, found, share, min(share + left, len(layout)))
            found[job.name] = size = _searched(job, layout, share, most)
            left -= max(0, size - share)
            if size != share:
                whys[job.name] = _why_searched(job, size)
    return found, whys


def _why_searched(job: JobView, size: int) -> str:
    if all(each.size != size for each in job.speeds):
        return f"no other job wants its slots, and {_workers(size)} may be faster: that is tried"
    best = f"{_workers(size)} are the fewest that are within {1 - CLOSE:.0%} of its fastest size"
    return f"of the sizes that it has tried, {best}"


def _can_train(job: JobView, space: Space) -> bool:
    """Return whether a job could train if it were alone; else no plan can help it."""
    if not space.fits({job.name: job.least}):
        space.give_up_wishes(job.name)
    return space.fits({job.name: job.least})


def _being_measured(view: View, space: Space) -> dict[str, int]:
    """Return the sizes of the jobs that nobody disturbs now: they have just got a new size.

    None has that right where a job has arrived or has ended, or where a host is lost.
    """
    needed = set(view.triggers) - _OPTIONAL
    if needed or any(_size(job, space) != job.size for job in view.jobs):
        return {}
    return {
        job.name: job.size
        for job in view.jobs
        if job.size and job.held is None and not job.measured and job.unchanged_for < MEASURE_S
    }


def _shared(job: JobView, speeds: Mapping[int, float]) -> SharedJob:
    return SharedJob(
        name=job.name,
        speeds=speeds,
        weight=job.weight,
        size=job.size,
        age=job.age,
        changes=job.changes,
        change_cost=job.change_cost,
    )


def _held(jobs: Sequence[JobView], measured: Mapping[str, int], space: Space) -> dict[str, int]:
    """Return the sizes of the jobs that a user asked a size for.

    They get all of it if there are so many slots, without ending a job that trains. What a user
    asks for outranks wishes.
    """
    slots = sum(space.slots.values())
    needed = {job.name: measured.get(job.name, job.least) for job in jobs if job.size}
    found = {}
    for job in sorted(jobs, key=lambda job: job.size == 0):  # those that train come first
        if job.held is not None:
            space.give_up_wishes(job.name)
            others = sum(needed.values()) - needed.get(job.name, 0)
            most = job.held if job.most is None else min(job.held, job.most)
            most = max(job.least, min(most, slots - others))
            found[job.name] = needed[job.name] = space.most(job.name, needed, job.least, most)
    return found


def _is_as_good(
    jobs: Sequence[SharedJob], kept: Mapping[str, int], found: Mapping[str, int], space: Space
) -> bool:
    """Return whether what is there is as good as what was found, so that nothing has to change."""
    if not space.fits(kept) or any(kept[job.name] not in job.speeds for job in jobs):
        return False
    slots = sum(space.slots.values())
    costs = dict(zip((job.name for job in jobs), share_costs(jobs, slots), strict=True))
    changed = [name for name in costs if kept[name] != found[name]]
    if any(not found[name] for name in changed):
        return False
    before = sum(costs[name][kept[name]] for name in changed)
    after = sum(costs[name][found[name]] for name in changed)
    saves = sum(found.values()) < sum(kept.values())
    return not saves and before - after < GAIN * before


# ---- the search of a job for itself ------------------------------------------------------


def _searched(job: JobView, hosts: Mapping[int, int], share: int, most: int) -> int:
    """Return the size that a job is to have or to try next; nobody else wants so many slots.

    With fewer workers it may be faster, or as fast; and a curve of speed may have a dip.
    """
    most = most if job.most is None else min(most, max(share, job.most))
    if max(HORIZON_S, job.age) * (1 - CLOSE) < REPAYS * job.change_cost:
        return share
    times = {n: t for n, t in _nearest(job.speeds, hosts).items() if job.least <= n <= most}
    if job.size not in times:
        return share
    errors = {each.size: each.error for each in job.speeds}
    sizes = tuple((n, hosts[n]) for n in range(job.least, most + 1))
    known = tuple((n, times[n], errors[n]) for n in times)
    return _next_size(sizes, job.micro_batches, _rounded(job.noise), known)


@lru_cache(maxsize=1024)
def _next_size(
    sizes: tuple[tuple[int, int], ...],
    micro_batches: int | None,
    noise: float | None,
    known: tuple[tuple[int, float, float], ...],
) -> int:
    search = Search(Layout(dict(sizes), micro_batches, noise), moves=len(known) - 1)
    for size, step_time, error in known:
        search.measured(size, step_time, error)
    return search.next().size


# ---- how fast ----------------------------------------------------------------------------


def _hosts_needed(hosts: Mapping[str, int]) -> dict[int, int]:
    """Return how many hosts each size needs, if it gets the largest."""
    found, size = {}, 0
    for number, slots in enumerate(sorted(hosts.values(), reverse=True), start=1):
        for _slot in range(slots):
            size += 1
            found[size] = number
    return found


def _speeds(job: JobView, hosts: Mapping[int, int], fitted: bool) -> dict[int, float]:
    """Return the speed at each size that a job may have now.

    `fitted`: with a model that is fitted to its measured sizes; else a line between them will do.
    """
    most = len(hosts) if job.most is None else min(max(job.least, job.most), len(hosts))
    sizes = [size for size in hosts if job.least <= size <= most]
    if not job.speeds:
        return {size: float(size) for size in sizes}
    times = _nearest(job.speeds, hosts)
    largest = max(job.least, 2 * max(times))
    needed = {n: hosts.get(n, 1) for n in {*sizes, *times}}
    layout = Layout(needed, job.micro_batches, _rounded(job.noise))
    worthwhile = {*layout.candidates(), *times, job.least, job.size}
    offered = [size for size in sizes if size <= largest and size in worthwhile]
    fixed = layout.micro_batches, layout.noise
    speeds = _predicted(fitted, fixed, tuple(layout.hosts.items()), tuple(times.items()))
    return _without_needless({size: speeds[size] for size in offered}, set(times), job.least)


def _rounded(noise: float | None) -> float | None:
    """Return a noise that does not differ from look to look."""
    return None if noise is None else float(f"{noise:.1e}")


def _nearest(speeds: Sequence[SpeedAt], hosts: Mapping[int, int]) -> dict[int, float]:
    """Return one step time for each size: that on the number of hosts it would likely have."""
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
    """Return the speed at each size: measured, or the model's pulled to its measured neighbours."""
    layout, measured = Layout(dict(hosts), *fixed), dict(times)
    enough = fitted and len(measured) > 1
    model = fit(layout, measured) if enough else _one_pass(layout, *times[-1])
    rates = {size: layout.work(size) / time for size, time in times}
    wrong = {size: rate / model.rate(size) for size, rate in rates.items()}
    found = dict(rates)
    for size in layout.hosts:
        if size < min(rates):
            found[size] = _hoped(rates, size)
        elif size not in rates:
            below = max((s for s in wrong if s < size), default=min(wrong))
            above = min((s for s in wrong if s > size), default=max(wrong))
            part = (size - below) / (above - below) if above > below else 0.0
            promised = model.rate(size) * ((1 - part) * wrong[below] + part * wrong[above])
            if size > max(rates):
                found[size] = min(promised, _most_above(layout, rates, size))
            else:
                found[size] = _hoped_between(promised, _most_between(rates, size))
    return found


def _one_pass(layout: Layout, size: int, step_time: float) -> SpeedModel:
    """Return the model of a single measurement, in which the exchange costs nothing."""
    free = (0.0, 0.0)
    return SpeedModel(layout, step_time / layout.passes(size), free, free, overlap=1.0)


def _hoped_between(promised: float, most: float) -> float:
    """Return the speed hoped for at a size between measured ones: halfway to the most it can be.

    Else a peak between two of them would never be found.
    """
    return min(most, (promised + most) / 2) if most < inf else promised


def _most_between(rates: Mapping[int, float], size: int) -> float:
    """Return the most that a curve of speed can have here if it bends downwards everywhere.

    It lies below the line through its two measured neighbours on either side.
    """
    most = inf
    below = sorted((n for n in rates if n < size), reverse=True)[:2]
    above = sorted(n for n in rates if n > size)[:2]
    for near, far in (pair for pair in (below, above) if len(pair) == 2):
        slope = (rates[far] - rates[near]) / (far - near)
        most = min(most, rates[near] + slope * (size - near))
    return max(LEAST_SPEED * max(rates.values()), most)


def _most_above(layout: Layout, rates: Mapping[int, float], size: int) -> float:
    """Return the most to hope for above all measured sizes, if the last workers brought nothing.

    If they brought another host, the dip may be that of its first exchange.
    """
    if len(rates) == 1:
        return inf
    before, largest = sorted(rates)[-2:]
    if rates[largest] >= (1 + GAIN) * rates[before]:
        return inf
    joined = layout.hosts[before] == 1 < layout.hosts[largest]
    return rates[largest] * float((size / largest) ** (2 * HOPE if joined else HOPE))


def _hoped(rates: Mapping[int, float], size: int) -> float:
    """Return the speed hoped for below all measured sizes: little less than at the smallest.

    Else a job that grows no more would never be tried with fewer workers, and others would lack
    its slots. The hope is for a few workers less only, and a curve of speed lies below the line
    through any two of its points.
    """
    smallest, *larger = sorted(rates)
    linear = rates[smallest] * size / smallest
    if size < smallest - max(1, smallest // 4):
        return linear
    hoped = rates[smallest] * float((size / smallest) ** HOPE)
    if larger:
        slope = (rates[larger[0]] - rates[smallest]) / (larger[0] - smallest)
        hoped = min(hoped, rates[smallest] - slope * (smallest - size))
    return max(hoped, linear)


def _without_needless(
    speeds: Mapping[int, float], measured: set[int], least: int
) -> dict[int, float]:
    """Leave out sizes above a measured one that is as good as the fastest, if all is tried."""
    known = [speed for size, speed in speeds.items() if size in measured]
    fastest = max(known, default=0.0)
    if max(speeds.values()) * CLOSE > fastest:
        return dict(speeds)
    enough = min(n for n, s in speeds.items() if n in measured and s >= CLOSE * fastest)
    return {size: speed for size, speed in speeds.items() if size <= max(least, enough)}
