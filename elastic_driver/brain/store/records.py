"""What the database keeps of whole jobs and of nodes, and what that says about a new job. Pure.

`Trained` makes the record of a job from the samples that its driver takes. The speed of a size
counts once its mean step time is known from enough steps after the warm-up
(`features.sizes.gauge`); the newest measurement of a size replaces an older one.

`prior_of` says what finished jobs like a new one know of its best size, its memory and its speeds.
A prior is a guess that measurements replace. One that is wrong by more than a fifth at a size that
was measured is dropped as a whole: the data, the machines or the script have changed.

Times are unix seconds, memory is in bytes.
"""

from collections.abc import Iterable, Sequence
from statistics import median, median_low
from typing import NamedTuple

from msgspec.structs import replace

from elastic_driver.brain.algorithm import JobView, SpeedAt
from elastic_driver.brain.grants import Kind, Speed
from elastic_driver.brain.store.figures import Sample
from elastic_driver.features.sizes.gauge import Gauge
from elastic_driver.features.sizes.messages import WRONG

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
