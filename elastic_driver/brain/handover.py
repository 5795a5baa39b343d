"""How slots pass from one job to another, as far as the first is known to have let go of them.

Pure. Times are unix seconds.
"""

from collections.abc import Iterable, Mapping

from elastic_driver.brain.jobs import Job

GATHER_S = 1.0  # slots that become free one after the other within this time are given together


def claimed(jobs: Iterable[Job]) -> dict[str, int]:
    """Return the slots of each host that processes of these jobs may occupy."""
    found: dict[str, int] = {}
    for job in jobs:
        for host, slots in job.claims().items():
            found[host] = found.get(host, 0) + slots
    return found


def is_on_its_way(job: Job) -> bool:
    """Return whether a plan wants other slots for a job than it has been granted."""
    return job.target is not None and not (job.grants and job.target == job.granted)


def next_slots(
    job: Job, hosts: Mapping[str, int], used: Mapping[str, int], now: float
) -> dict[str, int] | None:
    """Return the slots to grant a job now, on its way to its target; None: it goes on as it is.

    `hosts`: the slots of each host. `used`: those that processes of all jobs may occupy.
    """
    target = job.target
    if target is None or not is_on_its_way(job):
        job.gather_until = None
        return None
    if any(hosts.get(host, 0) < slots for host, slots in target.items()):
        job.gather_until = None  # a host is lost, so another plan is on its way
        found = job.granted
    else:
        found = _possible(job, target, hosts, used, now)
    return None if job.grants and found == job.granted else found


def _possible(
    job: Job,
    target: Mapping[str, int],
    hosts: Mapping[str, int],
    used: Mapping[str, int],
    now: float,
) -> dict[str, int]:
    """Return the slots that a job may have now; those that it uses already come first.

    They are what it has while it could only have too few.
    """
    granted, own, least = job.granted, job.claims(), job.report.least
    free = {host: hosts[host] - used.get(host, 0) + own.get(host, 0) for host in target}
    order = [*(h for h in granted if h in target), *(h for h in target if h not in granted)]
    possible = {host: n for host in order if (n := min(target[host], free[host])) > 0}
    if job.owes_since is not None:  # first it gives up what it owes, or it would gather slots
        possible = {h: k for h, n in possible.items() if (k := min(n, granted.get(h, 0)))}
    enough = not target or sum(possible.values()) >= least
    if possible != target and enough and _grows(granted, possible):
        if job.gather_until is None:
            job.gather_until = now + GATHER_S
        if now < job.gather_until:
            possible = {h: k for h, n in possible.items() if (k := min(n, granted.get(h, 0)))}
            enough = sum(possible.values()) >= least
    else:
        job.gather_until = None
    return possible if enough else granted


def _grows(now: Mapping[str, int], then: Mapping[str, int]) -> bool:
    """Return whether there are more slots on any host than now."""
    return any(slots > now.get(host, 0) for host, slots in then.items())
