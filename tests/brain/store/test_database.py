"""Rows in SQLite and PostgreSQL: written, rolled up, kept for their time, and equal in both."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import stat
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from elastic_driver.brain.store.address import Address
from elastic_driver.brain.store.database import Database, is_corrupt, is_mistake, set_aside
from elastic_driver.brain.store.records import DAY, FINE, HOUR, MINUTE, JobKey, Row, Series, Summary
from elastic_driver.brain.store.statements import STEPS, NewerSchemaError

JOB = JobKey("mnist", 1_000_000.25)
SPEED = Series("job", "steps_per_s")
MEMORY = Series("worker:n1:0", "memory")


def row(t: int, value: float, series: Series = SPEED) -> Row:
    return Row(series, t, Summary(1, value, value, value))


def test_rows_come_back_as_they_were_written(address: Address) -> None:
    database = Database(address)
    rows = [row(10, 0.1), row(15, 1e300), row(10, 2.0**53 + 2, MEMORY)]
    database.write(JOB, rows)
    database.write(JobKey("mnist", 2.0), [row(10, 7.0)])
    assert database.rows(JOB, FINE) == sorted(rows)
    assert database.rows(JOB, FINE, since=15) == [row(15, 1e300)]
    assert database.rows(JobKey("mnist", 2.0), FINE) == [row(10, 7.0)]
    database.close()
    assert database.rows(JOB, FINE) == sorted(rows), "it opens again"
    database.close()


def test_a_row_that_is_there_is_replaced(address: Address) -> None:
    database = Database(address)
    database.write(JOB, [row(10, 1.0)])
    database.write(JOB, [row(10, 2.0), row(15, 3.0)])
    assert database.rows(JOB, FINE) == [row(10, 2.0), row(15, 3.0)]
    database.close()


def test_minutes_and_hours_are_made_once_they_are_over(address: Address) -> None:
    database = Database(address)
    database.write(JOB, [row(HOUR - 5, 1.0), row(HOUR, 2.0), row(HOUR + 5, 4.0)])
    database.roll_up(JOB, HOUR + 59.0)
    assert database.rows(JOB, MINUTE) == [row(HOUR - 60, 1.0)]
    assert database.rows(JOB, HOUR) == [row(0, 1.0)]
    database.roll_up(JOB, HOUR + 60.0)
    minute = Row(SPEED, HOUR, Summary(2, 2.0, 3.0, 4.0))
    assert database.rows(JOB, MINUTE) == [row(HOUR - 60, 1.0), minute]
    assert database.rows(JOB, HOUR) == [row(0, 1.0)]
    database.close()


def test_what_is_too_old_lives_on_in_longer_periods(address: Address) -> None:
    database = Database(address)
    database.write(JOB, [row(0, 1.0), row(70, 3.0)])  # the driver died before it made a minute
    database.expire(DAY + 65.0)
    assert database.rows(JOB, FINE) == [row(70, 3.0)]
    assert database.rows(JOB, MINUTE) == [row(0, 1.0), row(60, 3.0)]
    database.expire(30 * DAY + 2 * HOUR)
    assert database.rows(JOB, FINE) == database.rows(JOB, MINUTE) == []
    assert database.rows(JOB, HOUR) == [Row(SPEED, 0, Summary(2, 1.0, 2.0, 3.0))]
    database.expire(365 * DAY + HOUR + 1.0)
    assert database.rows(JOB, HOUR) == []
    database.close()


def test_both_kinds_of_database_have_equal_rows(in_file: Address, in_postgres: Address) -> None:
    numbers = random.Random(19)
    names = [Series("job", "é"), Series("job", "Z"), Series("host:n1", "cpu"), MEMORY]
    found = []
    written = [
        [row(5 * k, numbers.uniform(0, 10) ** numbers.randint(-9, 9), each) for each in names]
        for k in range(900)
    ]
    for address in (in_file, in_postgres):
        database = Database(address)
        for rows in written:
            database.write(JOB, rows)
        database.roll_up(JOB, 4500.0)
        found.append([database.rows(JOB, period) for period in (FINE, MINUTE, HOUR)])
        database.close()
    assert found[0] == found[1]
    assert [len(rows) for rows in found[0]] == [3600, 300, 4]


# ---- the schema ----------------------------------------------------------------------------


def add_owner(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE jobs ADD COLUMN owner TEXT"))


def test_an_older_schema_with_data_is_renewed_and_a_newer_one_refused(address: Address) -> None:
    old = Database(address, STEPS)
    old.write(JOB, [row(10, 1.0)])
    old.close()
    newer = Database(address, (*STEPS, add_owner))
    assert newer.rows(JOB, FINE) == [row(10, 1.0)]
    newer.close()
    with pytest.raises(NewerSchemaError, match=f"schema {len(STEPS) + 1}, .* up to {len(STEPS)}"):
        old.write(JOB, [row(15, 1.0)])
    assert newer.rows(JOB, FINE) == [row(10, 1.0)], "nothing was written"
    newer.close()


def test_a_step_that_fails_leaves_the_old_schema(address: Address) -> None:
    def breaks(connection: Connection) -> None:
        add_owner(connection)
        raise OSError("no space left")

    before = Database(address)
    before.open()
    before.close()
    with pytest.raises(OSError, match="no space"):
        Database(address, (*STEPS, breaks)).open()
    renewed = Database(address, (*STEPS, add_owner))  # the column is not there yet
    renewed.open()
    renewed.close()


# ---- files ---------------------------------------------------------------------------------


def test_a_file_is_the_owners_alone_and_in_wal_mode(in_file: Address) -> None:
    database = Database(in_file)
    database.open()
    assert stat.S_IMODE(Path(in_file.file).stat().st_mode) == 0o600
    with sqlite3.connect(in_file.file) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()
    database.close()


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ("CREATE VIEW v AS SELECT * FROM jobs", "a view 'v'"),
        ("CREATE TRIGGER t AFTER INSERT ON jobs BEGIN DELETE FROM jobs; END", "a trigger 't'"),
    ],
)
def test_a_file_with_what_runs_by_itself_is_refused(
    in_file: Address, made: str, named: str
) -> None:
    database = Database(in_file)
    database.write(JOB, [row(10, 1.0)])
    database.close()
    with contextlib.closing(sqlite3.connect(in_file.file)) as other:
        other.execute(made)
    with pytest.raises(PermissionError, match=f"it holds {named}, which is not ours") as refused:
        database.write(JOB, [row(15, 2.0)])
    assert is_mistake(refused.value)


def test_a_file_behind_a_link_of_another_user_is_not_made(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a link in another user's name")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    os.chown(link, 65534, 65534, follow_symlinks=False)
    with pytest.raises(PermissionError, match="it is a link that user 65534 has made"):
        Database(Address(file=str(link))).open()
    assert not (tmp_path / "target").exists()


def test_a_file_that_vanishes_is_made_again(in_file: Address) -> None:
    database = Database(in_file)
    database.write(JOB, [row(10, 1.0)])
    for path in Path(in_file.file).parent.iterdir():
        path.unlink()
    database.write(JOB, [row(15, 2.0)])
    assert database.rows(JOB, FINE) == [row(15, 2.0)]
    database.close()


def test_a_locked_file_fails_soon_and_is_no_corrupt_one(in_file: Address) -> None:
    database = Database(in_file)
    database.write(JOB, [row(10, 1.0)])
    other = sqlite3.connect(in_file.file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OperationalError, match="locked") as failed:
        database.write(JOB, [row(15, 2.0)])
    assert not is_corrupt(failed.value)
    other.execute("ROLLBACK")
    other.close()
    database.write(JOB, [row(15, 2.0)])
    assert database.rows(JOB, FINE) == [row(10, 1.0), row(15, 2.0)]
    database.close()


def test_a_corrupt_file_is_told_and_set_aside(in_file: Address) -> None:
    Path(in_file.file).write_bytes(os.urandom(8192))
    database = Database(in_file)
    with pytest.raises(Exception, match="not a database") as failed:
        database.open()
    assert is_corrupt(failed.value)
    assert set_aside(in_file.file) == f"{in_file.file}.corrupt"
    database.write(JOB, [row(10, 1.0)])
    assert database.rows(JOB, FINE) == [row(10, 1.0)]
    database.close()
