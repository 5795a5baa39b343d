"""The speed of the job, as the search of the best size and the statistics want it."""

import hashlib
from statistics import median
from typing import Any

import msgspec
from msgspec.structs import replace

from elastic_driver.brain.documents import Kind, Speed
from elastic_driver.brain.store.figures import Sample
from elastic_driver.job.job import Job
from elastic_driver.job.rounds import COMPLETE
from elastic_driver.job.workers import RUNNING
from elastic_driver.kernel.machine import Machine
from elastic_driver.policies.scaling.messages import HostLoad, LoadsSeen, SpeedSeen
from elastic_driver.policies.scaling.noise import noise_scale
from elastic_driver.policies.stragglers import Stragglers
from elastic_driver.words.orders import JobSpec
from elastic_driver.words.progress import Measured, Progress


def new_auto_scaler() -> Machine[Any, Any]:
    """Return the machine that searches the best size."""
    # Loads SciPy, which other jobs do without.
    from elastic_driver.policies.scaling.autoscaler import AutoScaler  # noqa: PLC0415

    return AutoScaler()


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


def kind_of(spec: JobSpec) -> Kind:
    """Return what a job trains, as far as its command says it."""
    digest = hashlib.sha256(msgspec.json.encode(spec.command)).hexdigest()
    return Kind(name=spec.run_id[:255], command=digest)


def kind_seen(kind: Kind, job: Job, watch: Stragglers) -> Kind:
    """Return what a job trains, with what its workers have said of the model and the batch."""
    progress = _progress(job, watch)
    if progress is None or progress.parameters is None:
        return kind
    return replace(kind, parameters=progress.parameters, batch=progress.batch)


def sample_of(job: Job, watch: Stragglers, t: float, measured: Measured) -> Sample:
    """Return the job at the time `t` (unix seconds), as its statistics want it."""
    progress = _progress(job, watch)
    return Sample(
        t,
        job.workers.count(RUNNING),
        measured,
        _speed(watch, progress),
        None if progress is None else progress.parameters,
        None if progress is None else progress.batch,
    )


def _speed(watch: Stragglers, progress: Progress | None) -> Speed | None:
    """Return how far the world has come; None if it has not made a step."""
    world = watch.world
    if progress is None or not progress.at:
        return None
    steps = _steps(progress)
    return Speed(
        round=world.round,
        size=world.size,
        hosts=world.members[0].place.node_count,
        worker=world.members[0].worker,
        steps=steps,
        at=progress.at,
        rest=None if progress.total is None else max(0, progress.total - steps),
        micro_batches=progress.micro_batches,
    )


def _progress(job: Job, watch: Stragglers) -> Progress | None:
    """Return the progress of rank 0; None while a round forms, or before its first step."""
    world, current = watch.world, job.rounds.current
    if current.state is not COMPLETE or current.number != world.round:
        return None
    progress = watch.progress.get(world.members[0].worker)
    return None if progress is None or progress.round != world.round else progress


def _steps(progress: Progress) -> int:
    return max(progress.step, -1 if progress.reported is None else progress.reported)


def speed_seen(job: Job, watch: Stragglers) -> SpeedSeen | None:
    """Return how far the job is; None while a round forms, or before its first step."""
    world, settings, progress = watch.world, job.settings, _progress(job, watch)
    if progress is None:
        return None
    steps = _steps(progress)
    known = sorted(job.hosts.known.values(), key=job.hosts.preference)
    return SpeedSeen(
        round=world.round,
        size=world.size,
        wanted=job.capacity.wanted,
        worker=world.members[0].worker,
        steps=steps,
        at=progress.at,
        slots=tuple(host.slots for host in known if job.hosts.is_usable(host.name)),
        least=job.capacity.least,
        most=job.capacity.most,
        unit=settings.node_unit,
        held=job.capacity.target is not None,
        rest=None if progress.total is None else max(0, progress.total - steps),
        micro_batches=progress.micro_batches,
        noise=_noise(watch),
    )


def _noise(watch: Stragglers) -> float | None:
    """Return the noise scale of the gradients; None before all workers have measured theirs."""
    world, norms = watch.world, []
    for member in world.members:
        progress = watch.progress.get(member.worker)
        if progress is None or progress.round != world.round or progress.gradients is None:
            return None
        norms.append(progress.gradients)
    return noise_scale(norms)
