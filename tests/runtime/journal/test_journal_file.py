"""The journal on disk: one driver after the other, and what is kept."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import msgspec
import pytest

from elastic_driver.contract import EVENTS_PATH
from elastic_driver.errors import ClusterError, ExitCode, TakenOverError
from elastic_driver.features.tensorflow.machine import TfCluster
from elastic_driver.job.events import Tick
from elastic_driver.job.workers import WorkerState
from elastic_driver.runtime.journal import journal_file as store
from elastic_driver.runtime.journal.journal_file import Head, SqliteStore
from elastic_driver.runtime.journal.replay import JournalError, Replay, ResumedRun, load_run
from elastic_driver.runtime.journal.writer import Journal
from elastic_driver.words import wire_events as ev
from elastic_driver.words.wire_events import WorkerReady
from rendezvous.errors import UnreachableError
from tests.runtime.jobs import JobUnderTest, StartJob
from tests.runtime.journal.journals import (
    A0,
    A1,
    after_one,
    everything,
    write_everything,
    write_some,
)
from tests.runtime.waiting import until


def settled_run(job: JobUnderTest) -> ResumedRun | None:
    """The run as it is in the journal, once that has the workers."""
    run = load_run(job.run_dir.journal_file)
    return run if len(list(run.job.workers.having(WorkerState.STARTING))) == 2 else None


def test_a_new_job_of_the_same_name_begins_a_new_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"something else")
    path.with_name("journal.db-wal").write_bytes(b"and its log")
    assert write_some(path, 3) == []
    replay = Replay(path)
    assert [step.n for step in replay.steps()] == [1, 2, 3]
    replay.close()


def test_a_journal_that_goes_on_has_the_events_of_both_drivers(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    write_some(path, 3, close=False)
    after_one(path, n=3)
    replay = Replay(path)
    assert [step.n for step in replay.steps()] == [1, 2, 3, 4]
    assert [(term.term, term.n, term.pid) for term in replay.terms] == [
        (1, 0, os.getpid()),
        (2, 3, os.getpid()),
    ]
    assert replay.unix(3.0) == 3.0  # the first driver's offset was 0
    assert replay.unix(4.0) == 1004.0
    replay.close()


def test_a_driver_that_was_replaced_writes_nothing_more_and_learns_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    told: list[TakenOverError] = []
    old = Journal(path, "run", on_taken_over=told.append)
    old.open()
    old.snapshot(0, 0.0, {"tf": TfCluster(30.0).snapshot()})
    old.note(1, 1.0, "tf", Tick())
    assert old.settle() == []
    after_one(path, n=1)
    old.note(2, 2.0, "tf", Tick())
    answered: list[int] = []
    assert old.then(lambda: answered.append(1)) == []
    with pytest.raises(TakenOverError, match=r"driver 2 .* goes on with this run; driver 1 ends"):
        old.settle()
    with pytest.raises(TakenOverError):
        old.then(lambda: answered.append(2))
    assert (len(told), answered) == (1, [])
    old.close()


@pytest.mark.parametrize(("n", "term"), [(1, 2), (2, 1), (2, 2)])
def test_one_of_two_drivers_gets_a_term_and_none_skips_events(
    tmp_path: Path, n: int, term: int
) -> None:
    path = tmp_path / "journal.db"
    write_some(path, 2)
    after_one(path, n=2, term=2)
    journal = Journal(path, "run")
    journal.open(Head("run", term=term + 1, n=n))
    with pytest.raises(TakenOverError):
        journal.await_open()
    journal.close()


def test_a_journal_that_cannot_go_on_is_one_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db", "run")
    journal.open(Head("run", term=2))
    with pytest.raises(ClusterError, match=r"cannot go on .* there is no journal"):
        journal.await_open()
    journal.close()


def test_a_driver_that_was_replaced_ends_and_leaves_its_agents_to_the_other(
    start_job: StartJob,
) -> None:
    job = start_job()
    job.cluster.until_workers(A0, A1)
    run = until(lambda: settled_run(job), "the journal is written")
    next_driver = SqliteStore(job.run_dir.journal_file)
    next_driver.open(Head("run", term=2, n=run.n + 1000))
    client, ready = job.cluster.client.clone(2.0), WorkerReady(A0, 0, -1, True, "waits")
    with pytest.raises(UnreachableError):  # no answer, so it goes to the next driver
        client.post_json(EVENTS_PATH, msgspec.json.encode(ready))
    client.close()
    outcome = job.outcome()
    assert outcome.exit_code == ExitCode.UNAVAILABLE
    *_, line = job.stderr.getvalue().splitlines()
    assert "goes on with this run; driver 1 ends" in line
    assert job.cluster.closed == 0
    assert job.cluster.workers() == [A0, A1]
    assert job.run_dir.token_file.exists()
    assert job.logged()[-1]["event"] != "job_failed"
    next_driver.close()


def test_a_driver_adds_checksums_to_a_journal_of_the_format_before(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    write_everything(path)
    told = everything(path)
    with sqlite3.connect(path) as database:
        for table in ("about", "terms", "events", "snapshots", "keys"):
            database.execute(f"ALTER TABLE {table} DROP COLUMN sum")
        database.execute("PRAGMA user_version = 2")
    assert everything(path) == told
    after_one(path, n=30, term=3)
    assert len(everything(path)[5]) == 31
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (3,)
        database.execute("UPDATE events SET at = 0.0 WHERE n = 7")
    with pytest.raises(JournalError, match="event 7 is damaged"):
        everything(path)


def test_old_events_are_dropped_and_the_replay_begins_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "KEPT_EVENTS", 20)
    journal = Journal(tmp_path / "journal.db", "run")
    journal.open()
    machine = TfCluster(30.0)
    for n in range(1, 101):
        journal.note(n, float(n), "tf", Tick())
        machine.handle(Tick(), float(n))
        if n % 10 == 0:
            journal.snapshot(n, float(n), {"tf": machine.snapshot()})
        assert journal.settle() == []
    journal.close()
    replay = Replay(tmp_path / "journal.db")
    assert [step.n for step in replay.steps()] == list(range(81, 101))
    with pytest.raises(JournalError, match="begins after event 80"):
        list(replay.steps(5))
    replay.close()


def test_events_that_are_large_are_dropped_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "KEPT_BYTES", 200_000)
    path, machine = tmp_path / "journal.db", TfCluster(30.0)
    journal = Journal(path, "run")
    journal.open()
    for n in range(1, 101):
        journal.note(n, float(n), "tf", ev.WorkerExited("a.0.1", 1, "x" * 10_000))
        if n % 5 == 0:
            journal.snapshot(n, float(n), {"tf": machine.snapshot()})
        assert journal.settle() == []
    journal.close()
    assert path.stat().st_size < 400_000, "a hundred of them take 1 MB"
    with sqlite3.connect(path) as database:
        numbers = [n for (n,) in database.execute("SELECT n FROM events ORDER BY n")]
        assert numbers == list(range(81, 101))
        assert database.execute("SELECT min(n) FROM snapshots").fetchone() == (80,)
