"""Measures the job in the driver's thread, and keeps samples of it in a database.

A look takes in the newest progress of the workers, and asks for the usage of the hosts. A sample is
kept while that is new. The database may know similar jobs, which all parts are told of. Times are
seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastic_driver.brain.store.records import JobKey, Prior, Record, Sample
from elastic_driver.brain.store.statistics_writer import StatisticsWriter
from elastic_driver.features.statistics.measurements import Measurements
from elastic_driver.job.events import MemoryExpected
from elastic_driver.job.workers import RUNNING
from elastic_driver.runtime.brain_link import kind_of
from elastic_driver.runtime.driver_parts import (
    DriverThread,
    Measuring,
    Watch,
    progress_of,
    speed_of,
)

if TYPE_CHECKING:
    from elastic_driver.job.job import Job
    from elastic_driver.runtime.resources import DriverSetup
    from elastic_driver.words.progress import History, Measured
    from rendezvous.wire import Entry


def part(setup: DriverSetup, began: float) -> Measuring:
    """Return the part of a driver."""
    return Statistics(lambda job, tell: _writer(setup, began, job, tell))


def _writer(
    setup: DriverSetup, began: float, job: Job, tell: Callable[[Prior], None]
) -> StatisticsWriter | None:
    """Return what writes the statistics of a job; None if there is no database for them."""
    if setup.statistics is None:
        return None
    settings = job.settings
    return StatisticsWriter(
        setup.statistics,
        JobKey(setup.spec.run_id, began),
        Record(kind_of(setup.spec), settings.min_np, settings.max_np),
        setup.reporter.note,
        on_prior=tell if settings.auto_scale else None,
    )


MakeWriter = Callable[["Job", Callable[[Prior], None]], StatisticsWriter | None]


class Statistics(Measuring):
    """The part of a driver; `make_writer` is called with the job, and with what takes a `Prior`."""

    def __init__(self, make_writer: MakeWriter = lambda _job, _tell: None) -> None:
        self._make_writer = make_writer
        self._writer: StatisticsWriter | None = None
        self.measurements = Measurements()
        self.keep: Callable[[Sample], None] | None = None  # takes samples; None: none are kept

    @property
    def due(self) -> float | None:
        """See `DriverPart.due`."""
        return self.measurements.due

    @property
    def job(self) -> Measured:
        """See `Measuring.job`."""
        return self.measurements.job

    def history(self, since: float) -> History:
        """See `Measuring.history`."""
        return self.measurements.history(since)

    def idle_memory(self) -> tuple[tuple[str, int], ...]:
        """See `Measuring.idle_memory`."""
        return self.measurements.idle_memory()

    def attach(self, thread: DriverThread) -> None:
        """See `DriverPart.attach`."""
        self._thread = thread

    def job_begins(self, job: Job) -> None:
        """See `DriverPart.job_begins`."""
        self.measurements.due = self._thread.clock()
        self._writer = self._make_writer(job, self._tell_prior)
        if self._writer is not None:
            self.keep = self._writer.take
            self._writer.start()

    def look(self, now: float) -> None:
        """Take in the newest progress of the workers, and ask for the usage of the hosts."""
        job, thread, measurements = self._thread.job, self._thread, self.measurements
        if job is None:
            return
        began = time.thread_time()
        unix, size = now + thread.clock.unix_offset, job.workers.count(RUNNING)
        measurements.take(now, unix, thread.watch.world, thread.watch.progress, size)
        agents = ((host, agent.incarnation) for host, agent in job.fleet.agents.items())
        if keys := measurements.usage_keys(now, agents):
            thread.read(keys, lambda found: thread.call(lambda: self._take_usage(found)))
        else:
            self._keep_sample(job, now, measurements.job)
        tell_machines = thread.tell_measured(measurements.document)
        # A search that thinks for long, or a busy machine, puts off no look.
        measurements.looked(now, time.thread_time() - began)
        tell_machines()

    def _take_usage(self, entries: dict[str, Entry]) -> None:
        """Take in the newest usage of the hosts; statistics get it while it is new."""
        if self._thread.job is None:
            return
        began, now = time.thread_time(), self._thread.clock()
        self.measurements.usage_read(entries)
        self._keep_sample(self._thread.job, now, self.measurements.record())
        self.measurements.recorded(now, time.thread_time() - began)

    def _tell_prior(self, prior: Prior) -> None:
        """Tell the job and all parts what similar jobs have measured; the writer calls it."""
        if prior.memory is not None:
            self._thread.post(MemoryExpected(prior.memory, prior.memory_reason))
        self._thread.tell_prior(prior)

    def _keep_sample(self, job: Job, now: float, measured: Measured) -> None:
        if self.keep is not None:
            unix = now + self._thread.clock.unix_offset
            self.keep(sample_of(job, self._thread.watch, unix, measured))

    def status(self) -> dict[str, Any]:
        """See `DriverPart.status`."""
        return {"measured": self.measurements.document()}

    def close(self, exit_code: int | None) -> None:
        """See `DriverPart.close`."""
        if self._writer is not None:
            self._writer.close(exit_code)


def sample_of(job: Job, watch: Watch, t: float, measured: Measured) -> Sample:
    """Return the job at the time `t` (unix seconds), as its statistics want it."""
    progress, speed = progress_of(job, watch), speed_of(job, watch)
    return Sample(
        t,
        job.workers.count(RUNNING),
        measured,
        speed if speed is not None and speed.at else None,
        None if progress is None else progress.parameters,
        None if progress is None else progress.batch,
    )
