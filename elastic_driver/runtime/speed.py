"""The speed of the job, as the machine that searches the best number of workers wants it."""

from typing import Any

from elastic_driver.core.job import Job
from elastic_driver.core.machine import Machine
from elastic_driver.core.rules.rounds import COMPLETE
from elastic_driver.policies.scaling.messages import SpeedSeen
from elastic_driver.policies.stragglers import Stragglers


def new_auto_scaler() -> Machine[Any, Any]:
    """Return the machine that searches the best size."""
    # Loads SciPy, which other jobs do without.
    from elastic_driver.policies.scaling.autoscaler import AutoScaler  # noqa: PLC0415

    return AutoScaler()


def speed_seen(job: Job, watch: Stragglers) -> SpeedSeen | None:
    """Return how far the job is; None while a round forms, or before its first step."""
    world, settings = watch.world, job.settings
    current = job.rounds.current
    if current.state is not COMPLETE or current.number != world.round:
        return None
    progress = watch.progress.get(world.members[0].worker)
    if progress is None or progress.round != world.round:
        return None
    steps = max(progress.step, -1 if progress.reported is None else progress.reported)
    known = sorted(job.hosts.known.values(), key=job.hosts.preference)
    return SpeedSeen(
        round=world.round,
        size=world.size,
        wanted=job.capacity.wanted,
        worker=world.members[0].worker,
        steps=steps,
        at=progress.at,
        slots=tuple(host.slots for host in known if job.hosts.usable(host.name)),
        least=job.capacity.least,
        most=job.capacity.most,
        unit=settings.node_unit,
        held=job.capacity.target is not None,
        rest=None if progress.total is None else max(0, progress.total - steps),
        micro_batches=progress.micro_batches,
    )
