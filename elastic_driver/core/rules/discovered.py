"""What discovery tells of hosts, entered into the job's books. Pure; called by `job`."""

from __future__ import annotations

from elastic_driver.core.events import DiscoveryFailed, HostsDiscovered
from elastic_driver.core.rules import rechecks
from elastic_driver.core.state import JobState


def hosts(job: JobState, event: HostsDiscovered, _now: float) -> None:
    """The hosts there are now: announce what has changed."""
    changes = job.hosts.discovered(event.hosts)
    if not changes:
        return
    job.capacity_changed = True
    for host, slots in changes.added:
        job.announce("host_discovered", f"{slots} slots", host=host)
        rechecks.found(job, host)
    for host in changes.removed:
        job.announce("host_removed", "discovery no longer reports it", host=host)
        rechecks.lost(job, host)
    for host, before, slots in changes.resized:
        job.announce("host_discovered", f"{slots} slots, it had {before}", host=host)


def failed(job: JobState, event: DiscoveryFailed, _now: float) -> None:
    """Nothing was found out; the hosts that are known stay."""
    kept = len(job.hosts)
    job.announce("discovery_failed", f"{event.reason}; the {kept} known hosts stay")
