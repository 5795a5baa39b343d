"""A real job keeps its statistics: in its folder, or in a PostgreSQL that stops in between."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from elastic_driver.brain.store.address import Address, read_address
from elastic_driver.brain.store.database import Database
from elastic_driver.brain.store.records import FINE, HOUR, JobKey, Record, Row
from tests.support.job import JOBS, RunningJob, elasticrun
from tests.support.postgres import postgres, why_not

JOB = ("-H", "localhost:2", "-np", "2", "--min-np", "1")
TRAIN = ("--", str(JOBS / "train.py"))
ENV = {"STEPS": "100000", "STEP_MS": "20"}


def rows(job: RunningJob, address: Address, began: float, period: int) -> list[Row]:
    database = Database(address)
    try:
        return database.rows(JobKey(job.run_dir.name, began), period)
    finally:
        database.close()


def kept(address: Address) -> Record:
    """Return the record of the only job in a database."""
    database = Database(address)
    try:
        ((_key, record),) = database.records()
    finally:
        database.close()
    return record


def began(job: RunningJob) -> float:
    """Return when the run began; its endpoint is there while it lives."""
    return float(json.loads((job.run_dir / "endpoint.json").read_text())["started"])


def test_a_job_leaves_its_speed_and_usage_in_its_folder() -> None:
    with elasticrun(*JOB, *TRAIN, env=ENV) as job:
        members = job.until_size(2, steps=10)
        address = Address(file=str(job.run_dir / "statistics.db"))
        start = began(job)
        job.until(lambda: Path(address.file).exists(), "the database")
        job.until(lambda: rows(job, address, start, FINE), "rows of five seconds")
        job.until(
            lambda: any(row.series.name == "memory" for row in rows(job, address, start, FINE)),
            "the memory of a worker",
        )
        job.kill(next(iter(members)))
        job.until_size(2, steps=10)
        job.process.terminate()
        assert job.wait(60) == 143, job.describe()
        found = {row.series: row.values for row in rows(job, address, start, HOUR)}
        subjects = {series.subject for series in found}
        assert {"job", "script", "host:localhost"} <= subjects
        assert len([name for name in subjects if name.startswith("worker:")]) >= 2
        names = {series.name: values for series, values in found.items() if series.subject == "job"}
        assert 5 < names["steps_per_s"].most < 50
        assert names["workers"].most == 2
        assert names["step"].most <= len({record.step for record in job.steps()})
        record = kept(address)
        assert (record.kind.name, record.exit_code) == (job.run_dir.name, 143)
        assert record.kind.parameters
        assert record.memory
        assert record.memory > 2**20


def test_a_server_that_stops_costs_no_step() -> None:
    if reason := why_not():
        pytest.skip(reason)
    with postgres() as server:
        url = server.url()
        with elasticrun(*JOB, "--stats-db", url, *TRAIN, env=ENV) as job:
            job.until_size(2)
            address, start = read_address(url), began(job)
            job.until(lambda: rows(job, address, start, FINE), "rows of five seconds")
            server.stop()
            job.until(lambda: "cannot be written" in job.stderr, "a warning")
            server.start()
            job.until(lambda: "is written again" in job.stderr, "a sentence that it goes on")
            job.process.terminate()
            assert job.wait(60) == 143, job.describe()
            times = sorted({row.t for row in rows(job, address, start, FINE)})
            records = job.steps()
            assert "secret" not in (job.run_dir / "events.jsonl").read_text() + job.stderr
    assert times == list(range(times[0], times[-1] + FINE, FINE)), "no row is missing"
    of_first = [record.t for record in records if record.worker == records[0].worker]
    assert max(b - a for a, b in itertools.pairwise(of_first)) < 1.0
    assert not (job.run_dir / "statistics.db").exists()
