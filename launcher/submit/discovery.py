"""From a plan's source of hosts to the discovery that the driver asks."""

import os

from elastic_driver.errors import ElasticError, UsageError
from elastic_driver.runtime.discovery import FixedDiscovery, HostDiscovery
from launcher.backends.registry import DISCOVERY, load
from launcher.backends.slurm_nodes import AllocationDiscovery
from launcher.plan.hosts import DiscoveredHosts, FixedHosts


def make_discovery(source: FixedHosts | DiscoveredHosts) -> HostDiscovery:
    """Return the discovery of these hosts; raises UsageError if it cannot work."""
    if isinstance(source, FixedHosts):
        if source.allocation is None:
            return FixedDiscovery(source.hosts)
        return AllocationDiscovery(source.allocation, source.hosts, os.environ)
    make = load(DISCOVERY, source.discovery)
    try:
        discovery: HostDiscovery = make(
            source.argument, default_slots=source.default_slots, timeout=source.timeout
        )
    except ElasticError:
        raise
    except Exception as error:  # another package's code may raise anything
        raise UsageError(
            f"--host-discovery {source.source}: {type(error).__name__}: {error}"
        ) from error
    return discovery
