"""What the database keeps of jobs and of nodes, and what that says about a new job. Pure.

The figures of a job over time come as samples (`figures_of`). A figure that is not known is absent.
A row sums up the values of one series in the period that begins at `t` and lasts `period` seconds.
Rows of 5 seconds become rows of a minute, and these rows of an hour.

`Trained` makes the record of a job from the samples that its driver takes. The speed of a size
counts once its mean step time is known from enough steps after the warm-up
(`features.sizes.gauge`); the newest measurement of a size replaces an older one.

`prior_of` says what finished jobs like a new one know of its best size, its memory and its speeds.
A prior is a guess that measurements replace. One that is wrong by more than a fifth at a size that
was measured is dropped as a whole: the data, the machines or the script have changed.

Times are unix seconds, memory is in bytes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median, median_low
from typing import NamedTuple

from msgspec.structs import replace

from elastic_driver.brain.algorithm import JobView, SpeedAt
from elastic_driver.brain.grants import Kind, Speed
from elastic_driver.features.sizes.gauge import Gauge
from elastic_driver.features.sizes.messages import WRONG
from elastic_driver.words.progress import HostUsage, Measured, WorkerMeasured

FINE, MINUTE, HOUR = 5, 60, 3600  # the periods
DAY = 24 * HOUR
COARSER = ((FINE, MINUTE), (MINUTE, HOUR))  # what becomes what
KEPT = {FINE: DAY, MINUTE: 30 * DAY, HOUR: 365 * DAY}  # for how long


# ---- figures over time ---------------------------------------------------------------------


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


# ---- the figures of a sample ---------------------------------------------------------------

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


# ---- records of whole jobs, and nodes ------------------------------------------------------

FRESH_S = 30.0  # a node's figures that are older place nothing
CLOSE = 0.95  # a size this near to the fastest one is as good


class Record(NamedTuple):
    """One job: what it trains, within which limits, how fast it was, and how it has ended.

    `micro_batches`: into which a step of a fixed batch is divided. `memory`: the most that one of
    its workers had. `ended` and `exit_code` are None while it runs, and for ever if its driver was
    killed.
    """

    kind: Kind
    least: int = 1
    most: int | None = None
    micro_batches: int | None = None
    memory: int | None = None
    speeds: tuple[SpeedAt, ...] = ()
    ended: float | None = None
    exit_code: int | None = None

    def rate(self, speed: SpeedAt) -> float:
        """Return the work per second at a measured size: batches, or those of all workers."""
        return work_of(speed.size, self.micro_batches) / speed.step_time

    @property
    def best(self) -> int | None:
        """The smallest size that was within 5 % of the fastest one; None: none was measured."""
        if not self.speeds:
            return None
        fastest = max(self.rate(speed) for speed in self.speeds)
        return min(each.size for each in self.speeds if self.rate(each) >= CLOSE * fastest)


class Node(NamedTuple):
    """One machine at the time `seen`; None: not known.

    `slots` are all of them, `idle` those that nobody uses. `cpu` is the part of its processors that
    is in use.
    """

    name: str
    seen: float
    slots: int | None = None
    idle: int | None = None
    cpu: float | None = None
    memory_free: int | None = None
    memory_total: int | None = None


def work_of(size: int, micro_batches: int | None) -> float:
    """Return the batches of one step: without a fixed batch, each worker brings its own."""
    return 1.0 if micro_batches is not None else float(size)


def in_order(speeds: Iterable[SpeedAt]) -> tuple[SpeedAt, ...]:
    """Return speeds by size, then by hosts."""
    return tuple(sorted(speeds, key=lambda speed: (speed.size, speed.hosts)))


LEAST_STEPS = 20  # of a measurement that counts


class Trained:
    """Keeps the record of one job; `record` is the newest one."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._gauge = Gauge()
        self._gauged: tuple[int, str] | None = None  # the round and the worker it belongs to
        self._speeds: dict[tuple[int, int], SpeedAt] = {}

    def take(self, sample: Sample) -> None:
        """Take in a sample of the job."""
        workers, kind = sample.measured.workers.values(), self.record.kind
        peaks = [self.record.memory, *(each.memory_peak or each.memory for each in workers)]
        self.record = self.record._replace(
            memory=max((peak for peak in peaks if peak is not None), default=None),
            kind=replace(
                kind,
                parameters=kind.parameters if sample.parameters is None else sample.parameters,
                batch=kind.batch if sample.batch is None else sample.batch,
            ),
        )
        if sample.speed is not None:
            self._measure(sample.speed)

    def _measure(self, speed: Speed) -> None:
        if self._gauged != (speed.round, speed.worker):
            self._gauge, self._gauged = Gauge(), (speed.round, speed.worker)
        self._gauge.take(speed.steps, speed.at)
        if speed.micro_batches is not None:
            self.record = self.record._replace(micro_batches=speed.micro_batches)
        if self._gauge.steps >= LEAST_STEPS:
            found = SpeedAt(
                size=speed.size,
                hosts=speed.hosts,
                step_time=self._gauge.mean,
                error=self._gauge.error,
            )
            self._speeds[speed.size, speed.hosts] = found
            self.record = self.record._replace(speeds=in_order(self._speeds.values()))


# ---- what similar jobs say -----------------------------------------------------------------

JOBS = 5  # so many of the newest similar jobs count
MEMORY_FACTOR = 1.5  # of the largest memory of a worker


class Prior(NamedTuple):
    """The experience of similar jobs; None: they say nothing about it.

    `jobs`: how many there are. `memory`: the bytes that one worker should find.
    """

    jobs: int
    size: int | None
    memory: int | None
    speeds: tuple[SpeedAt, ...]

    @property
    def memory_reason(self) -> str:
        """Why a worker is expected to need this memory."""
        what = f"{MEMORY_FACTOR:g} times the largest peak of similar jobs ({self.jobs} of them)"
        return f"{(self.memory or 0) / 2**20:.0f} MiB, {what}"


def prior_of(records: Sequence[Record]) -> Prior | None:
    """Return what the records of similar jobs say, None if there is none of them.

    Of what several of them have measured the median counts.
    """
    if not records:
        return None
    times: dict[tuple[int, int], list[SpeedAt]] = {}
    for record in records:
        for speed in record.speeds:
            times.setdefault((speed.size, speed.hosts), []).append(speed)
    sizes = [record.best for record in records if record.best is not None]
    most = max((record.memory for record in records if record.memory is not None), default=None)
    return Prior(
        jobs=len(records),
        size=median_low(sizes) if sizes else None,
        memory=None if most is None else round(MEMORY_FACTOR * most),
        speeds=in_order(_middle(measured) for measured in times.values()),
    )


def is_wrong(prior: Prior, measured: Iterable[SpeedAt]) -> bool:
    """Return whether a speed that was measured differs from the prior's by more than a fifth."""
    expected = {(each.size, each.hosts): each.step_time for each in prior.speeds}
    return any(
        abs(each.step_time / expected[each.size, each.hosts] - 1) > WRONG
        for each in measured
        if (each.size, each.hosts) in expected
    )


def with_prior(view: JobView, prior: Prior | None) -> JobView:
    """Return a job with the prior's memory and speeds where it has none of its own.

    A prior that is wrong changes nothing.
    """
    if prior is None or is_wrong(prior, view.speeds):
        return view
    known = {(each.size, each.hosts) for each in view.speeds}
    more = [each for each in prior.speeds if (each.size, each.hosts) not in known]
    return replace(
        view,
        speeds=in_order([*view.speeds, *more]),
        memory=prior.memory if view.memory is None else view.memory,
    )


def _middle(measured: Sequence[SpeedAt]) -> SpeedAt:
    """Return one speed for several at the same size."""
    return replace(
        measured[0],
        step_time=median(each.step_time for each in measured),
        error=max(each.error for each in measured),
    )
