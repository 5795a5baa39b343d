"""The measurements of a job, as figures of its statistics. Pure.

A figure that is not known is absent.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from elastic_driver.brain.documents import Speed
from elastic_driver.brain.store.rows import Series
from elastic_driver.words.progress import HostUsage, Measured, WorkerMeasured

JOB, SCRIPT = "job", "script"  # subjects; others are "host:NAME" and "worker:NAME"
MOST_CHARS = 300  # of a subject or name
_TIMES = ("data", "compute", "exchange", "commit")


class Sample(NamedTuple):
    """The job at one moment; `t` in unix seconds, `workers` is the number that train.

    `speed` is None while it does not train. `parameters` of its model and the samples `batch` of a
    step are None where the script's objects do not tell.
    """

    t: float
    workers: int
    measured: Measured
    speed: Speed | None = None
    parameters: int | None = None
    batch: int | None = None


def figures_of(sample: Sample) -> Iterator[tuple[Series, float]]:
    """Yield what is known of a job, the script's own numbers, its hosts and its workers."""
    now = sample.measured
    job = {"workers": sample.workers, "step": now.step, "samples": now.samples}
    yield from _known(JOB, job)
    yield from _known(JOB, {"steps_per_s": now.steps_per_s, "samples_per_s": now.samples_per_s})
    yield from _known(SCRIPT, now.numbers)
    for host, used in now.hosts.items():
        yield from _known(f"host:{host}", _of_host(used))
    for name, worker in now.workers.items():
        yield from _known(f"worker:{name}", _of_worker(worker))


def _known(subject: str, values: Mapping[str, float | None]) -> Iterator[tuple[Series, float]]:
    for name, value in values.items():
        if value is not None:
            yield Series(_storable(subject), _storable(name)), value


def _of_host(used: HostUsage) -> dict[str, float | None]:
    found: dict[str, float | None] = {
        "cpu": used.cpu,
        "memory_used": used.memory_used,
        "memory_total": used.memory_total,
        "disk_used": used.disk_used,
        "disk_total": used.disk_total,
        "net_in": used.net_in,
        "net_out": used.net_out,
        "disk_read": used.disk_read,
        "disk_write": used.disk_write,
        "pressure_cpu": used.pressure.cpu,
        "pressure_memory": used.pressure.memory,
        "pressure_io": used.pressure.io,
    }
    for gpu in used.gpus:
        found[f"gpu{gpu.index}_used"] = gpu.used
        found[f"gpu{gpu.index}_memory_used"] = gpu.memory_used
        found[f"gpu{gpu.index}_memory_total"] = gpu.memory_total
    return found


def _of_worker(worker: WorkerMeasured) -> dict[str, float | None]:
    times = {} if worker.times is None else {n: getattr(worker.times, n) for n in _TIMES}
    return {
        "steps_per_s": worker.steps_per_s,
        "samples_per_s": worker.samples_per_s,
        "cpu": worker.cpu,
        "memory": worker.memory,
        "memory_peak": worker.memory_peak,
        "io_read": worker.io_read,
        "io_write": worker.io_write,
        **times,
    }


def _storable(text: str) -> str:
    """Return a text that every database takes: names come from scripts."""
    return text[:MOST_CHARS].replace("\0", "�").encode("utf-8", "replace").decode()
