"""How many workers of a job a host may have, by its memory, its processors and a user's plan.

The plan is a firm limit, and so is the memory for a job of which a worker has run out of it. A host
with less memory than similar jobs took, or with too few processors for more workers, is only to be
spared: such a wish does not count if the job could not train else. Pure. Memory is bytes.
"""

from collections.abc import Mapping, Sequence

from elastic_driver.brain.algorithm import HostView, JobView


def firm_limits(job: JobView, hosts: Sequence[HostView]) -> dict[str, int]:
    """Return the most workers by host that a job may have."""
    found = memory_limits(job, hosts)
    for host, most in job.planned.items():
        found[host] = min(most, found.get(host, most))
    return found


def memory_limits(job: JobView, hosts: Sequence[HostView]) -> dict[str, int]:
    """Return the most workers by host, for a job of which a worker has run out of memory."""
    return _by_memory(job, hosts) | job.room if job.room else {}


def wishes(job: JobView, hosts: Sequence[HostView]) -> dict[str, int]:
    """Return the most workers by host that a job should have, if it can train with them."""
    found = {} if job.room else _by_memory(job, hosts)
    for host, most in job.starved.items():
        found[host] = min(most, found.get(host, most))
    return found


def _by_memory(job: JobView, hosts: Sequence[HostView]) -> dict[str, int]:
    """Return how many workers have the memory on the hosts whose idle memory is known."""
    return {
        host.name: job.at.get(host.name, 0) + host.memory_free // job.memory
        for host in hosts
        if job.memory and host.memory_free is not None
    }


def too_small(
    job: JobView, hosts: Sequence[HostView], others: Mapping[str, int]
) -> tuple[str, int] | None:
    """Return the largest host, with its idle memory, if all have the memory for too few workers.

    `others`: slots that other jobs use; their hosts may have more idle memory later. The host is ""
    if the memory of none is known.
    """
    limits = memory_limits(job, [host for host in hosts if not others.get(host.name)])
    lacks = {host: room for host, room in limits.items() if not others.get(host)}
    if sum(min(host.slots, lacks.get(host.name, host.slots)) for host in hosts) >= job.least:
        return None
    known = {host.name: host.memory_free for host in hosts if host.memory_free is not None}
    largest = max(known, key=known.__getitem__, default="")
    return largest, known.get(largest, 0)
