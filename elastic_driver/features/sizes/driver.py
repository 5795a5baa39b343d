"""What the machines of this feature are told in a driver: how far the job is, and its hosts' load.

They run with `--auto-scale`; the one for hosts with too few processors also if there is a Brain.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from elastic_driver.features.sizes.machine import Starvation
from elastic_driver.features.sizes.messages import HostLoad, LoadsSeen, PriorFound, SpeedSeen
from elastic_driver.job.workers import RUNNING
from elastic_driver.runtime.driver_parts import DriverPart, DriverThread, Watch, speed_of

if TYPE_CHECKING:
    from elastic_driver.brain.store.records import Prior
    from elastic_driver.job.job import Job
    from elastic_driver.kernel.machine import ForMachine
    from elastic_driver.runtime.resources import DriverSetup
    from elastic_driver.words.progress import Measured


def part(setup: DriverSetup, _began: float) -> DriverPart:
    """Return the part of a driver."""
    return Sizes(has_brain=setup.brain is not None)


class Sizes(DriverPart):
    """Begins the machines, and tells them of each measurement."""

    def __init__(self, *, has_brain: bool) -> None:
        self._has_brain = has_brain

    def attach(self, thread: DriverThread) -> None:
        """See `DriverPart.attach`."""
        self._thread = thread

    def job_begins(self, job: Job) -> None:
        """Have the number of workers searched, or hosts with too many found, as the job wants."""
        kernel = self._thread.kernel
        if job.settings.auto_scale:
            # Loads SciPy, which other jobs do without.
            from elastic_driver.features.sizes.autoscaler import AutoScaler  # noqa: PLC0415

            kernel.begin("scaling", AutoScaler())
        if job.settings.auto_scale or self._has_brain:
            kernel.begin("starvation", Starvation())

    def measured(self, document: Callable[[], Measured]) -> list[ForMachine]:
        """See `DriverPart.measured`."""
        machines, job = self._thread.kernel.machines, self._thread.job
        seen = None
        if job is not None and "starvation" in machines:
            seen = speed_seen(job, self._thread.watch)
        if job is None or seen is None:
            return []
        loads = loads_seen(job, document())
        return [seen, loads] if "scaling" in machines else [loads]

    def prior(self, prior: Prior) -> list[ForMachine]:
        """See `DriverPart.prior`."""
        times = tuple((each.size, each.hosts, each.step_time) for each in prior.speeds)
        return [PriorFound(jobs=prior.jobs, step_times=times)] if times else []


def speed_seen(job: Job, watch: Watch) -> SpeedSeen | None:
    """Return how far the job is; None while a round forms, or before its first step."""
    speed = speed_of(job, watch)
    if speed is None:
        return None
    known = sorted(job.hosts.known.values(), key=job.hosts.preference)
    told = asdict(speed)
    del told["hosts"]
    return SpeedSeen(
        **told,
        wanted=job.capacity.wanted,
        slots=tuple(host.slots for host in known if job.hosts.is_usable(host.name)),
        least=job.capacity.least,
        most=job.capacity.most,
        unit=job.settings.node_unit,
        held=job.capacity.target is not None,
    )


def loads_seen(job: Job, measured: Measured) -> LoadsSeen:
    """Return the load of the hosts that train; one of which a figure is not known is left out."""
    computing: dict[str, list[float]] = {}
    for worker in job.workers.having(RUNNING):
        found = measured.workers.get(worker.id)
        if found is not None and found.times is not None and found.times.compute is not None:
            computing.setdefault(worker.host, []).append(found.times.compute)
    hosts = (
        HostLoad(
            host=host,
            workers=len(job.workers.in_slots(host)),
            compute=median(times),
            cpu=used.cpu,
            pressure=used.pressure.cpu,
        )
        for host, times in computing.items()
        if (used := measured.hosts.get(host)) is not None
    )
    held = job.capacity.target is not None
    return LoadsSeen(round=job.rounds.current.number, hosts=tuple(hosts), held=held)
