"""The writer keeps a job's samples, whatever happens to the database."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from sqlalchemy import Connection, text

from elastic_driver.brain.algorithm import SpeedAt
from elastic_driver.brain.grants import Kind, Speed
from elastic_driver.brain.store import statistics_writer as module
from elastic_driver.brain.store.address import Address
from elastic_driver.brain.store.database import Database
from elastic_driver.brain.store.records import (
    FINE,
    HOUR,
    MINUTE,
    JobKey,
    Prior,
    Record,
    Sample,
    Series,
    Summary,
)
from elastic_driver.brain.store.statements import STEPS
from elastic_driver.brain.store.statistics_writer import StatisticsWriter
from elastic_driver.runtime.library_logs import logs_shown
from elastic_driver.words.progress import Measured
from tests.support.job import eventually
from tests.support.postgres import Postgres

JOB = JobKey("mnist", 1.0)
SPEED = Series("job", "steps_per_s")
RECORD = Record(Kind(name="mnist", command="a"), 1, 4)
PAUSE_S = 0.05


class Run:
    """A writer that gets samples; `t` is the time of the next one."""

    def __init__(self, address: Address, record: Record = RECORD, **settings: Any) -> None:
        self.address, self.said = address, list[str]()
        self.writer = StatisticsWriter(
            address, JOB, record, self.said.append, pause=PAUSE_S, **settings
        )
        self.t = time.time() // HOUR * HOUR
        self.writer.start()

    def trains(self, seconds: int = 10) -> None:
        for _ in range(seconds):
            sample = Sample(self.t, 2, Measured(step=int(self.t), steps_per_s=self.t % 7))
            began = time.monotonic()
            self.writer.take(sample)
            assert time.monotonic() - began < 1.0, "the driver never waits"
            self.t += 1.0

    def rows(self, period: int = FINE) -> list[int]:
        """Return the times of the rows that are written, as seconds of the job."""
        database = Database(self.address)
        try:
            found = [row for row in database.rows(JOB, period) if row.series == SPEED]
        finally:
            database.close()
        return [int(row.t % HOUR) for row in found]

    def has_rows(self, *times: int) -> None:
        def there() -> bool:
            with contextlib.suppress(Exception):  # the database may be away for a moment
                return set(times) <= set(self.rows())
            return False

        eventually(there, within=20, what=f"rows {times}", context=lambda: str(self.said))


@contextlib.contextmanager
def run(address: Address, **settings: Any) -> Iterator[Run]:
    running = Run(address, **settings)
    try:
        yield running
    finally:
        running.writer.close()


def test_samples_become_rows_and_the_end_writes_all(address: Address) -> None:
    with run(address) as job:
        job.trains(63)
        job.has_rows(*range(0, 60, 5))
    assert job.rows() == list(range(0, 65, 5))
    assert job.rows(MINUTE) == [0, 60]
    assert job.rows(HOUR) == [0]
    assert job.said == []
    database = Database(address)
    hour = {row.series: row.values for row in database.rows(JOB, HOUR)}
    database.close()
    assert hour[Series("job", "workers")] == Summary(63, 2.0, 2.0, 2.0)


def test_the_end_of_a_job_is_kept_with_what_was_measured(address: Address) -> None:
    with run(address) as job:
        for second in range(20):
            speed = Speed(round=1, size=2, hosts=1, worker="w", steps=10 * second, at=job.t)
            now = Measured(steps_per_s=10.0)
            job.writer.take(Sample(job.t, 2, now, speed, parameters=7))
            job.t += 1.0
        job.has_rows(int((job.t - 20) % HOUR))
        began = time.time()
        job.writer.close(3)
    database = Database(address)
    ((key, found),) = database.records()
    database.close()
    assert key == JOB
    assert found.ended is not None
    assert began <= found.ended <= time.time()
    assert (found.exit_code, found.kind.parameters, found.best) == (3, 7, 2)
    assert found.speeds[0].step_time == pytest.approx(0.1)


def test_similar_jobs_are_looked_for_at_once_and_when_the_model_is_known(
    address: Address,
) -> None:
    speeds = (SpeedAt(size=2, hosts=1, step_time=0.5),)
    done = Record(RECORD.kind, speeds=speeds, ended=1.0, exit_code=0)
    of_model = Kind(name="another", command="a", parameters=7)
    database = Database(address)
    database.remember(JobKey("mnist", 0.0), done)
    database.remember(JobKey("another", 0.0), done._replace(kind=of_model))
    database.close()
    found: list[Prior] = []
    with run(address, on_prior=found.append):
        eventually(lambda: found, within=20, what="a prior without a sample")
    assert found == [Prior(1, 2, None, speeds)]
    found.clear()
    with run(address, record=Record(Kind(name="new", command="a")), on_prior=found.append) as job:
        job.trains()
        job.has_rows(0)
        assert found == []
        job.writer.take(Sample(job.t, 2, Measured(), parameters=7))
        eventually(lambda: found, within=20, what="a prior of the same model")
    assert job.said == []


def test_a_job_that_another_driver_goes_on_with_has_no_end(in_file: Address) -> None:
    with run(in_file) as job:
        job.trains()
        job.has_rows(0)
        job.writer.close()
    database = Database(in_file)
    ((_, found),) = database.records()
    database.close()
    assert found == RECORD


def test_a_locked_file_costs_a_sentence_and_no_row(in_file: Address) -> None:
    with run(in_file) as job:
        job.trains()
        job.has_rows(0)
        other = sqlite3.connect(in_file.file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        job.trains()
        eventually(lambda: job.said, within=20, what="a warning")
        job.trains()
        other.execute("ROLLBACK")
        other.close()
        job.has_rows(5, 10, 15, 20)
        eventually(lambda: len(job.said) == 2, within=20, what="a sentence that it goes on")
    first, second = job.said
    assert first == (
        f"statistics: {in_file.file} cannot be written: database is locked; "
        "the job goes on, and this is tried again"
    )
    assert second == f"statistics: {in_file.file} is written again; no row was lost meanwhile"


def test_a_corrupt_file_is_replaced(in_file: Address) -> None:
    with run(in_file) as job:
        job.trains()
        job.has_rows(0)
        for path in Path(in_file.file).parent.iterdir():
            path.unlink()
        Path(in_file.file).write_bytes(b"no database" * 1000)
        job.trains()
        job.has_rows(5, 10)
        eventually(lambda: len(job.said) == 2, within=20, what="both sentences")
    assert "was no whole database and is now" in job.said[0]
    assert Path(f"{in_file.file}.corrupt").read_bytes().startswith(b"no database")


def test_a_file_that_is_removed_is_told_and_made_again(in_file: Address) -> None:
    with run(in_file) as job:
        job.trains()
        job.has_rows(0)
        for path in Path(in_file.file).parent.iterdir():
            path.unlink()
        job.trains()
        job.has_rows(5, 10)
        eventually(lambda: job.said, within=20, what="a warning")
    assert job.said == [
        f"statistics: {in_file.file} was removed, with what was written; a new one is begun"
    ]


def test_a_vanished_folder_is_told_and_used_when_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    with run(Address(file=str(folder / "statistics.db"))) as job:
        job.trains()
        eventually(lambda: job.said, within=20, what="a warning")
        assert "cannot be written: No such file or directory; the job goes on" in job.said[0]
        folder.mkdir()
        job.has_rows(0)


def test_a_server_that_is_away_costs_a_sentence_and_no_row(
    server: Postgres, in_postgres: Address
) -> None:
    lines: list[str] = []
    with run(in_postgres) as job, logs_shown(lambda line, _library: lines.append(line)):
        job.trains()
        job.has_rows(0)
        server.stop()
        try:
            job.trains()
            eventually(lambda: job.said, within=20, what="a warning")
            job.trains()
        finally:
            server.start()
        job.has_rows(0, 5, 10, 15, 20)
        eventually(lambda: len(job.said) == 2, within=20, what="a sentence that it goes on")
    assert "secret" not in " ".join(job.said)
    assert lines == [], "its library says nothing beside"
    assert job.said[1].endswith("is written again; no row was lost meanwhile")


def test_a_server_that_hangs_does_not_hold_the_job_up(
    server: Postgres, in_postgres: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LAST_S", 0.5)
    other = Database(in_postgres)
    with run(in_postgres) as job:
        job.trains()
        job.has_rows(0)
        with other._transaction() as connection:
            connection.execute(text("LOCK TABLE figures"))
            job.trains(1000)  # more than may wait
            began = time.monotonic()
            job.writer.close()
            assert time.monotonic() - began < 5.0
    other.close()
    thread: threading.Thread = job.writer._thread
    thread.join(20)
    assert not thread.is_alive()


def test_a_server_that_is_halted_is_told_and_the_job_does_not_wait(
    server: Postgres, in_postgres: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 1.0)
    with run(in_postgres) as job:
        job.trains()
        job.has_rows(0)
        with server.halted():
            job.trains()
            eventually(lambda: job.trains(1) or job.said, within=20, what="a warning")
        job.has_rows(0, 5, 10)
        eventually(lambda: len(job.said) == 2, within=30, what="a sentence that it goes on")
        with server.halted():
            job.trains()
            eventually(lambda: job.trains(1) or len(job.said) == 3, within=20, what="a warning")
            began = time.monotonic()
            job.writer.close(0)
            assert time.monotonic() - began < 1.0, "nobody waits for a server that is mute"
    assert job.said[0] == f"statistics: {in_postgres} does not answer; the job goes on"
    assert job.said[1].startswith(f"statistics: {in_postgres} is written again; ")
    thread: threading.Thread = job.writer._thread
    thread.join(30)
    assert not thread.is_alive()


def test_a_full_disk_costs_a_sentence_and_no_row(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a file system of a bounded size cannot be mounted here (needs root)")
    try:
        with run(Address(file=str(folder / "statistics.db"))) as job:
            job.trains()
            job.has_rows(0)
            with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
                while file.write(b"x" * 512):
                    pass
            eventually(lambda: job.trains(5) or job.said, within=30, what="a warning")
            (folder / "filler").unlink()
            eventually(lambda: len(job.said) == 2, within=30, what="a sentence that it goes on")
        times = job.rows()
        assert times == list(range(0, times[-1] + 5, 5)), "no row is missing"
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert "is full; the job goes on, and this is tried again" in job.said[0]
    assert job.said[1].endswith("is written again; no row was lost meanwhile")


def test_the_oldest_rows_are_dropped_beyond_a_bound(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    with run(Address(file=str(folder / "statistics.db")), most_rows=8) as job:
        job.trains(200)
        eventually(lambda: job.said, within=20, what="a warning")
        folder.mkdir()
        eventually(lambda: len(job.said) == 2, within=20, what="it goes on")
        assert "rows and 0 samples were lost" in job.said[1]
        assert job.rows() == [185, 190], "each has four series"


def test_a_newer_schema_ends_the_tries(address: Address) -> None:
    def add(connection: Connection) -> None:
        connection.execute(text("ALTER TABLE jobs ADD COLUMN owner TEXT"))

    newer = Database(address, (*STEPS, add))
    newer.open()
    with run(address) as job:
        job.trains()
        eventually(lambda: not job.writer._thread.is_alive(), within=20, what="the thread ends")
    assert len(job.said) == 1
    now = len(STEPS)
    assert f"has schema {now + 1}, and this version knows schemas up to {now}" in job.said[0]
    assert newer.rows(JOB, FINE) == []
    newer.close()
