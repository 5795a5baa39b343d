"""The jobs that a database has recorded, as a replay wants them."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from elastic_driver.brain.replay import Recorded
from elastic_driver.brain.store.figures import JOB
from elastic_driver.brain.store.records import Record, work_of
from elastic_driver.brain.store.rows import HOUR, MINUTE, JobKey, Row

if TYPE_CHECKING:
    from elastic_driver.brain.store.database import Database


def recorded_jobs(database: "Database") -> tuple[list[Recorded], list[str]]:
    """Return the jobs that can be played, and the names of those that cannot.

    A job can be played if it has ended and was measured at one size at least.
    """
    found, left_out, names = [], [], Counter[str]()
    for key, record in database.records():
        names[key.run] += 1
        name = key.run if names[key.run] == 1 else f"{key.run}#{names[key.run]}"
        rows = [] if not record.speeds else database.rows(key, MINUTE) or database.rows(key, HOUR)
        job = _recorded(name, key, record, rows)
        if job is None:
            left_out.append(name)
        else:
            found.append(job)
    return sorted(found, key=lambda job: (job.began, job.name)), left_out


def _recorded(name: str, key: JobKey, record: Record, rows: Iterable[Row]) -> Recorded | None:
    series: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.series.subject == JOB:
            series.setdefault(row.series.name, {})[row.t] = row
    workers, steps = series.get("workers", {}), series.get("steps_per_s", {})
    looks = sum(row.values.n for row in workers.values())
    if record.ended is None or not record.speeds or not looks:
        return None
    batches = sum(
        row.values.n * row.values.mean * _batches(workers.get(t), record)
        for t, row in steps.items()
    )
    samples = sum(
        row.values.n * row.values.mean for row in series.get("samples_per_s", {}).values()
    )
    seconds = (record.ended - key.began) / looks  # of one look
    each = samples / batches if samples and batches else None
    return Recorded(name, key.began, record.ended, record, batches * seconds, each)


def _batches(workers: Row | None, record: Record) -> float:
    """Return the batches of a step, with the mean number of workers of a period."""
    if workers is None or record.micro_batches is not None:
        return work_of(1, record.micro_batches)
    return workers.values.mean
