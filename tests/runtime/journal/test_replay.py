"""The replay of a journal is the run; a damaged journal is refused."""

from __future__ import annotations

import contextlib
import random
import re
import sqlite3
import stat
from pathlib import Path

import msgspec
import pytest

from elastic_driver.features.shards.messages import NextRequest, RangeDescription
from elastic_driver.features.shards.routes import SHARDS_PATH
from elastic_driver.runtime.journal import journal_file as tables
from elastic_driver.runtime.journal import writer
from elastic_driver.runtime.journal.journal_file import Head, SqliteStore
from elastic_driver.runtime.journal.replay import JournalError, NotBegunError, Replay, load_run
from tests.runtime.jobs import StartJob
from tests.runtime.journal.journals import (
    A0,
    A1,
    everything,
    short_job,
    write_everything,
    write_some,
)


def test_the_replay_of_a_job_gives_the_decisions_of_the_run(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SNAPSHOT_BYTES", 100)  # every few events; each is compared
    monkeypatch.setattr(writer, "SNAPSHOT_TIMES", 0)
    path = short_job(start_job).run_dir.journal_file
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.with_name("journal.db-wal").exists()
    replay = Replay(path)
    steps = list(replay.steps())
    assert len(replay._snapshots) > 2
    announced = [
        decision.event
        for step in steps
        for decision in step.decisions
        if decision.__struct_config__.tag == "announce"
    ]
    assert announced[0] == "round_opened"
    assert announced[-1] == "job_succeeded"
    assert all(decision.cause == step.n for step in steps for decision in step.decisions)
    assert replay.job.ending.end is not None
    replay.close()
    early = Replay(path)
    some = list(early.steps(steps[3].n))
    assert [step.n for step in some] == [step.n for step in steps[:4]]
    assert early.job.ending.end is None
    early.close()


def test_a_damaged_journal_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with pytest.raises(JournalError, match="there is no journal"):
        Replay(path)
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(JournalError, match="cannot be read: file is not a database"):
        Replay(path)
    path.unlink()
    write_some(path, 3)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(JournalError, match="cannot be read"):
        list(Replay(path).steps())


def test_a_journal_in_which_no_job_has_begun_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.touch()
    with pytest.raises(NotBegunError, match="the journal is empty"):
        load_run(path)
    first = SqliteStore(path)
    first.open(Head("run"))
    with pytest.raises(NotBegunError, match="the journal is empty"):
        load_run(path)
    first.free()


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ("CREATE VIEW extra AS SELECT * FROM events", "a view 'extra'"),
        (
            "CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM terms; END",
            "a trigger 't'",
        ),
        ("CREATE TABLE more (a)", "a table 'more'"),
        ("CREATE VIRTUAL TABLE words USING fts5(a)", "a table 'words'"),
        ("CREATE INDEX other ON events (abs(n))", "an index 'other'"),
        ("ALTER TABLE terms RENAME TO t2", "a table 't2'"),
        ("ALTER TABLE keys ADD COLUMN b AS (zeroblob(9))", "another table 'keys'"),
        (
            "ALTER TABLE events RENAME TO e; CREATE VIEW events AS SELECT * FROM e",
            "a table 'e'",
        ),
    ],
)
def test_a_journal_with_what_runs_by_itself_is_refused(
    made: str, named: str, tmp_path: Path
) -> None:
    """An earlier version read through a view, and let triggers run when it went on."""
    path = tmp_path / "journal.db"
    write_some(path, 3)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(made)
    before = path.read_bytes()
    refused = f"the file holds {named}, which no journal has"
    for read in (Replay, load_run):
        with pytest.raises(JournalError, match=re.escape(refused)):
            read(path)
    store = SqliteStore(path)
    with pytest.raises(sqlite3.DatabaseError, match=re.escape(refused)):
        store.open(Head("run", term=2, n=3))
    store.free()
    assert path.read_bytes() == before, "nothing is changed"


def test_a_journal_of_another_format_or_with_a_damaged_event_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    write_some(path, 3)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE events SET event = x'c1' WHERE n = 2")
    with pytest.raises(JournalError, match="event 2 is damaged"):
        list(Replay(path).steps())
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 9")
    with pytest.raises(JournalError, match="a journal of format 9, only 3 can be read"):
        Replay(path)


def test_a_journal_that_another_version_has_written_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    for event, state, named in (
        (b"\x81\xa4type\xa7Unknown", None, "event 2 is whole"),
        (None, b"a state of another form", "the journal is whole"),
    ):
        path.unlink(missing_ok=True)
        write_some(path, 3)
        with sqlite3.connect(path) as database:
            rows = database.execute("SELECT n, at, machine, event FROM events WHERE n = 2")
            *row, _ = rows.fetchone()
            if event is not None:
                tables.put(database, "events", [(*row, event)], replace=True)
            rows = database.execute("SELECT * FROM snapshots WHERE machine = 'tf'")
            *row, _, _ = rows.fetchone()
            if state is not None:
                database.execute("DELETE FROM snapshots WHERE machine = 'tf'")
                tables.put(database, "snapshots", [(*row, state)])
        with pytest.raises(JournalError, match=named) as refused:
            load_run(path)
        assert "written by another version of elastic-driver (" in str(refused.value)
        assert "damaged" not in str(refused.value).partition("(")[0]


def test_a_value_that_has_changed_on_the_disk_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    for table, change, named in (
        ("events", "event = CAST(x'81a474797065a0' AS BLOB)", "event 1 is damaged"),
        ("events", "at = at + 1", "event 1 is damaged"),
        ("snapshots", "state = substr(state, 2)", "snapshot 0 is damaged"),
        ("terms", "unix_offset = 3.0", "term 1 is damaged"),
        ("keys", "value = x'00'", "key mine/a is damaged"),
        ("about", "argv = '[]'", "about run is damaged"),
    ):
        path.unlink(missing_ok=True)
        write_everything(path)
        with sqlite3.connect(path) as database:
            database.execute(f"UPDATE {table} SET {change}")  # noqa: S608
        with pytest.raises(JournalError, match=named) as refused:
            everything(path)
        assert "its checksum is wrong" in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_bit_that_flips_anywhere_in_the_file_changes_no_replay(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    write_everything(path)
    content, told = path.read_bytes(), everything(path)
    choice, refused = random.Random(5), 0
    for _ in range(200):
        bit = choice.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert everything(path) == told, f"bit {bit}"
        except JournalError:
            refused += 1
    assert refused > 10


def test_requests_for_shards_come_back(start_job: StartJob) -> None:
    job = start_job()
    job.cluster.until_workers(A0, A1)
    asked = NextRequest(A0, RangeDescription(100, 10))
    job.cluster.client.post_json(f"{SHARDS_PATH}numbers:next", msgspec.json.encode(asked))
    job.driver.stop()
    replay = Replay(job.run_dir.journal_file)
    kinds = {type(step.event).__name__ for step in replay.steps()}
    assert "ShardBatch" in kinds
    assert replay.machines["shards"].check() == []
    replay.close()
