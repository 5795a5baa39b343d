"""The record of a job that trains, from the samples that its driver takes. Pure.

The speed of a size counts once its mean step time is known from enough steps after the warm-up
(`policies.scaling.gauge`); the newest measurement of a size replaces an older one.
"""

from msgspec.structs import replace

from elastic_driver.brain.algorithm import SpeedAt
from elastic_driver.brain.documents import Speed
from elastic_driver.brain.store.figures import Sample
from elastic_driver.brain.store.records import Record, in_order
from elastic_driver.features.sizes.gauge import Gauge

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
