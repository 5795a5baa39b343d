"""This machine, measured by itself: `elasticbrain monitor --source agents` runs on each host."""

import contextlib
import socket
from collections.abc import Iterable, Sequence

import psutil

from elastic_driver import contract
from elastic_driver.brain.monitoring import MonitorOptions
from elastic_driver.brain.store.records import Node
from elastic_driver.errors import UsageError
from launcher.agent.host import HostSampler, usable_cpus


class Agents:
    """Measures the machine it runs on; `-H NAME:SLOTS` gives that another name."""

    def __init__(self, options: MonitorOptions) -> None:
        if len(options.hosts) > 1:
            raise UsageError("--source agents measures its own machine; name one host with -H")
        self._name = options.hosts[0][0] if options.hosts else socket.gethostname()
        self._slots = options.slots_of(self._name, usable_cpus())
        self._sampler = HostSampler()

    def look(self, now: float) -> Sequence[Node]:
        """See `Monitor.look`."""
        host = self._sampler.sample({}).host
        return [
            Node(
                name=self._name,
                seen=now,
                slots=self._slots,
                idle=None
                if self._slots is None
                else max(0, self._slots - workers(psutil.process_iter())),
                cpu=host.cpu,
                memory_free=max(0, host.memory_total - host.memory_used),
                memory_total=host.memory_total,
            )
        ]


def workers(processes: Iterable[psutil.Process]) -> int:
    """Return how many workers of jobs these are, as far as we may read them."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            environ = process.environ()
            if worker := environ.get(contract.WORKER_ID):
                found.add((environ.get(contract.RUN_ID), worker))
    return len(found)
