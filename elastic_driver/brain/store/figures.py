"""The figures of a job over time: of a sample, and as rows of the database. Pure.

A figure that is not known is absent. A row sums up the values of one series in the period that
begins at `t` (unix seconds) and lasts `period` seconds. Rows of 5 seconds become rows of a minute,
and these rows of an hour.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from elastic_driver.brain.grants import Speed
from elastic_driver.words.progress import HostUsage, Measured, WorkerMeasured

FINE, MINUTE, HOUR = 5, 60, 3600  # the periods
DAY = 24 * HOUR
COARSER = ((FINE, MINUTE), (MINUTE, HOUR))  # what becomes what
KEPT = {FINE: DAY, MINUTE: 30 * DAY, HOUR: 365 * DAY}  # for how long


class JobKey(NamedTuple):
    """One job: the name of its run, and when that began (unix seconds)."""

    run: str
    began: float


class Series(NamedTuple):
    """One figure over time: `subject` is "job", "script", "host:NAME" or "worker:NAME"."""

    subject: str
    name: str


class Summary(NamedTuple):
    """The values of one period."""

    n: int  # how many
    least: float
    mean: float
    most: float


class Row(NamedTuple):
    """The values of a series in the period that begins at `t`."""

    series: Series
    t: int
    values: Summary


def begin_of(t: float, period: int) -> int:
    """Return the beginning of the period that `t` is in."""
    return math.floor(t / period) * period


def expired_before(now: float, period: int) -> int:
    """Return the time before which rows of this period are too old.

    It is the beginning of a longer period: such a row never loses a part of what it is made of.
    """
    longer = next((coarse for fine, coarse in COARSER if fine == period), period)
    return begin_of(now - KEPT[period], longer)


def summed_up(parts: Iterable[Summary]) -> Summary:
    """Return one summary for several; there is at least one."""
    all_parts = list(parts)
    n = sum(part.n for part in all_parts)
    least, most = min(part.least for part in all_parts), max(part.most for part in all_parts)
    mean = math.fsum(part.mean * (part.n / n) for part in all_parts)
    return Summary(n, least, min(max(mean, least), most), most)


def coarser(
    rows: Iterable[tuple[int, int, Summary]], period: int
) -> Iterator[tuple[int, int, Summary]]:
    """Yield the rows of a longer period; each is the key of a series, `t` and the values.

    `rows` are in the order of series and time.
    """
    for (series, t), group in groupby(rows, lambda row: (row[0], begin_of(row[1], period))):
        yield series, t, summed_up(row[2] for row in group)


class Buckets:
    """Values that come one by one, gathered into rows of `FINE` seconds."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, Series], list[float]] = {}
        self.newest = 0  # the beginning of the newest row; older ones are complete

    def add(self, t: float, series: Series, value: float) -> None:
        """Take in a value; what is no finite number is left out."""
        if math.isfinite(value):
            begin = begin_of(t, FINE)
            self.newest = max(self.newest, begin)
            self._open.setdefault((begin, series), []).append(float(value))

    def take(self, *, all_rows: bool = False) -> list[Row]:
        """Remove and return the rows that are complete, or all of them, oldest first."""
        ready = [key for key in self._open if all_rows or key[0] < self.newest]
        return [Row(key[1], key[0], _summary(self._open.pop(key))) for key in sorted(ready)]


def _summary(values: list[float]) -> Summary:
    return summed_up([Summary(1, value, value, value) for value in values])


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
