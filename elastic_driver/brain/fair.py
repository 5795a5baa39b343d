"""The algorithm that the Brain uses if no other is named: fair shares, from speeds as measured.

`speed_curve` says how fast a job is with each number of workers, `shares` gives each job its
number, and `placement` the hosts, which have the memory and the processors for them. The curve is
optimistic about sizes that were not tried: so they are tried when slots are there. A plan differs
from what is there only if that makes the jobs faster by a noticeable part, or saves slots. Pure.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from elastic_driver.brain.algorithm import JobView, Plan, View
from elastic_driver.brain.host_choice import Space, place, place_quickly, space_of
from elastic_driver.brain.shares import SharedJob, fair_shares, share_costs
from elastic_driver.brain.speed_curve import (
    NOTICEABLE,
    expected_speeds,
    fewest_hosts,
    rounded,
    step_times,
)
from elastic_driver.features.sizes.autoscaler import HORIZON_S, REPAYS
from elastic_driver.features.sizes.search import CLOSE, Layout, Search
from elastic_driver.words import counted

FITTED = 25  # jobs; with more of them, models would take too long to fit
EXACT = 60  # jobs times hosts; more of them are not placed in the best way, but in time
MEASURE_S = 60.0  # a job is left alone for so long while its size is measured
BUSY = 0.9  # of the processors of a host without any of our workers: others use it
# After these triggers alone, a job whose size is being measured is left alone.
_OPTIONAL = {"size measured", "slowdown", "time passed", "job back"}


def fair(view: View) -> Plan:
    """Return the plan with fair shares for all jobs."""
    space = _usable_space(view)
    sizes, whys = _sizes(view, space)
    now = {job.name: job.at for job in view.jobs}
    if all(sizes[job.name] == _usable_workers(job, space) == job.size for job in view.jobs):
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
    """Return why each job has its share: what it adds to the sum of costs, as two others would."""
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


def _usable_space(view: View) -> Space:
    """Return the space on the hosts that others do not keep busy; on all, if it is too small."""
    ours = {host for job in view.jobs for host, count in job.at.items() if count}
    calm = [h for h in view.hosts if h.name in ours or (h.cpu or 0.0) < BUSY]
    space = space_of(view.jobs, calm)
    needed = {job.name: max(job.least, job.held or 0) for job in view.jobs}
    return space if space.fits(needed) else space_of(view.jobs, view.hosts)


def _usable_workers(job: JobView, space: Space) -> int:
    """Return the number of the job's workers that are on hosts with space for them."""
    most = space.of(job.name)
    return sum(min(count, most.get(host, 0)) for host, count in job.at.items())


# ---- how many workers --------------------------------------------------------------------


def _sizes(view: View, space: Space) -> tuple[dict[str, int], dict[str, str]]:
    """Return the number of workers of each job, and why, of those that have some."""
    possible = _possible_jobs(view, space)
    measured = _being_measured(view, space)
    fixed = measured | _held(possible, measured, space)
    few = len(view.jobs) <= FITTED
    slots = sum(space.slots.values())
    alike = fewest_hosts(space.slots)
    layouts = {
        job.name: fewest_hosts(space.of(job.name)) if space.is_limited(job.name) else alike
        for job in possible
    }
    jobs = []
    for job in possible:
        if job.name in fixed:
            speeds = {fixed[job.name]: 1.0}
        else:
            speeds = expected_speeds(job, layouts[job.name], few)
        jobs.append(_shared(job, speeds))
    found = dict.fromkeys((job.name for job in view.jobs), 0) | fair_shares(jobs, slots, space)
    kept = {job.name: job.size for job in view.jobs}
    whys = _why_shares(jobs, found, slots)
    if _is_as_good(jobs, kept, found, space):
        for name in [name for name in whys if found[name] != kept[name]]:
            gain = f"{found[name]} would make the sum less than {NOTICEABLE:.0%} smaller"
            whys[name] = f"it stays at {_workers(kept[name])}: {gain}"
        found = kept
    for name, size in measured.items():
        whys[name] = f"its speed with {_workers(size)} is measured, for {MEASURE_S:g} s at most"
    settled = fixed.keys() | space.given_up
    left = slots - sum(found.values())
    for job in possible:
        share = found[job.name]
        layout = layouts[job.name]
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


def _possible_jobs(view: View, space: Space) -> list[JobView]:
    """Return the jobs that could train if they were alone; no plan can help the others.

    Wishes are given up for a job that could not train else.
    """
    found = []
    for job in view.jobs:
        needed = {job.name: job.least}
        if not space.fits(needed):
            space.give_up_wishes(job.name)
        if space.fits(needed):
            found.append(job)
    return found


def _being_measured(view: View, space: Space) -> dict[str, int]:
    """Return the sizes of the jobs that are left alone now, because their new size is measured.

    After an arrival, an end or a lost host, no job is left alone.
    """
    needed = set(view.triggers) - _OPTIONAL
    if needed or any(_usable_workers(job, space) != job.size for job in view.jobs):
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
    """Return the sizes of the jobs for which a user asked for a size.

    A job gets the whole size if there are so many slots without ending a job that trains. Wishes
    are given up for it.
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
    """Return whether the present sizes (`kept`) are as good as those found, so that they stay."""
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
    return not saves and before - after < NOTICEABLE * before


# ---- the search of a job for itself ------------------------------------------------------


def _searched(job: JobView, hosts: Mapping[int, int], share: int, most: int) -> int:
    """Return the size that a job is to have or to try next, of up to `most` workers.

    Nobody else wants those slots. With fewer workers the job may be faster, or as fast; and with
    more it may be faster although the next size is slower.
    """
    most = most if job.most is None else min(most, max(share, job.most))
    if max(HORIZON_S, job.age) * (1 - CLOSE) < REPAYS * job.change_cost:
        return share
    times = {n: t for n, t in step_times(job.speeds, hosts).items() if job.least <= n <= most}
    if job.size not in times:
        return share
    errors = {each.size: each.error for each in job.speeds}
    sizes = tuple((n, hosts[n]) for n in range(job.least, most + 1))
    known = tuple((n, times[n], errors[n]) for n in times)
    return _next_size(sizes, job.micro_batches, rounded(job.noise), known)


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
