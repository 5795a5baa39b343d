"""Writing a journal: disks that are slow, full or broken, and who waits for them."""

from __future__ import annotations

import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest

from elastic_driver.contract import EVENTS_PATH
from elastic_driver.errors import ExitCode, TakenOverError
from elastic_driver.features.shards.machine import DataSets
from elastic_driver.features.shards.messages import NextRequest, RangeDescription
from elastic_driver.features.tensorflow.machine import TfCluster
from elastic_driver.job.events import EventBatch, HostsDiscovered, Tick
from elastic_driver.job.workers import RUNNING
from elastic_driver.runtime import loop
from elastic_driver.runtime.journal import writer
from elastic_driver.runtime.journal import writer as file_system
from elastic_driver.runtime.journal.journal_file import Batch, Head, SqliteStore
from elastic_driver.runtime.journal.replay import Replay, load_run
from elastic_driver.runtime.journal.writer import WAIT_S, Journal
from elastic_driver.words.wire_events import WorkerReady
from rendezvous.client import RendezvousClient
from rendezvous.errors import UnreachableError
from tests.runtime.jobs import StartJob
from tests.runtime.journal.journals import (
    A0,
    A1,
    after_one,
    short_job,
)
from tests.runtime.waiting import until
from tests.support.job import ROOT


def test_every_event_that_was_settled_is_there_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    code = (
        "import os, signal; from pathlib import Path; "
        "from tests.runtime.journal.journals import write_some; "
        f"assert write_some(Path({str(path)!r}), 50, close=False) == []; "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.with_name("journal.db-wal").exists()
    replay = Replay(path)
    assert [step.n for step in replay.steps()] == list(range(1, 51))
    replay.close()


def test_a_folder_that_cannot_be_written_costs_the_journal_and_not_the_job(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SqliteStore, head: Head) -> sqlite3.Connection:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SqliteStore, "_create", refuse)
    job = short_job(start_job)
    failed = [event for event in job.logged() if event["event"] == "journal_failed"]
    assert len(failed) == 1
    assert "No space left on device; the job goes on without a journal" in failed[0]["reason"]
    assert job.stderr.getvalue().count("the journal has failed") == 1


def test_an_error_of_the_writer_itself_costs_the_journal_and_not_the_job(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqliteStore, "write", fail_unexpectedly)
    job = short_job(start_job)
    (failed,) = (event for event in job.logged() if event["event"] == "journal_failed")
    assert "a bug of ours: RuntimeError at test_writer.py:" in str(failed["reason"])
    assert "; the job goes on without a journal" in str(failed["reason"])
    assert "of a client" not in str(failed["reason"])
    (line,) = (line for line in job.stderr.getvalue().splitlines() if "journal" in line)
    assert "the journal has failed" in line


def test_an_error_of_the_writer_ends_a_driver_that_may_not_act_without_it(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job()
    job.cluster.until_workers(A0, A1)
    monkeypatch.setattr(SqliteStore, "must_be_written", True)
    monkeypatch.setattr(SqliteStore, "write", fail_unexpectedly)
    client, ready = job.cluster.client.clone(2.0), WorkerReady(A0, 0, -1, True, "waits")
    with pytest.raises(UnreachableError):  # no answer, so it goes to the next driver
        client.post_json(EVENTS_PATH, msgspec.json.encode(ready))
    client.close()
    assert job.outcome().exit_code == ExitCode.UNAVAILABLE
    (line,) = (line for line in job.stderr.getvalue().splitlines() if "journal" in line)
    assert "Traceback" not in job.stderr.getvalue()
    assert "the journal has failed (a bug of ours: RuntimeError at " in line
    assert "the workers go on, and wait for a standby, or for --resume" in line
    assert job.cluster.closed == 0
    assert job.cluster.workers() == [A0, A1]
    assert job.run_dir.token_file.exists()


def fail_unexpectedly(self: SqliteStore, batches: Sequence[Batch]) -> None:
    raise RuntimeError("words of a client")


def test_a_full_disk_is_reported_once(tmp_path: Path) -> None:
    """The disk is a real one of 1 MiB, in a mount namespace of its own."""
    script = f"""
mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec {sys.executable} -c '
from pathlib import Path
from elastic_driver.job.events import Tick
from elastic_driver.runtime.journal.writer import WAIT_S, Journal
journal = Journal(Path("{tmp_path}/journal.db"), "run")
journal.open()
found = []
for n in range(1, 200):
    journal.note(n, 1.0, "job", Tick())
    journal.snapshot(n, 1.0, {{"job": bytes(20_000)}})
    found += journal.settle()
journal.close()
print(len(found), found[0].event, found[0].reason)
'"""
    command = ["unshare", "-Urm", "bash", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip("no mount namespaces here")
    assert done.stderr == ""
    assert done.stdout.startswith("1 journal_failed ")
    assert "database or disk is full; the job goes on without a journal" in done.stdout


def test_a_journal_begins_anew_once_the_disk_has_room_again(tmp_path: Path) -> None:
    """The disk is a real one of 1 MiB, in a mount namespace of its own."""
    script = f"""
mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec {sys.executable} -c '
from tests.runtime.journal.journals import outlive_a_full_disk
print(*outlive_a_full_disk(__import__("pathlib").Path("{tmp_path}")), sep=chr(10))
'"""
    command = ["unshare", "-Urm", "bash", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0 and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip("no mount namespaces here")
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "journal_failed",
        "journal_caught_up",
        "steps 201..250 of term 1 at http://127.0.0.1:1",
        "keys {'before': b'1', 'on the way': b'2', 'meanwhile': b'3'}",
    ]


def test_a_job_has_its_journal_again_once_the_disk_takes_it(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "AGAIN_S", 0.05)
    full, write = threading.Event(), SqliteStore.write

    def refuse(self: SqliteStore, batches: Sequence[Batch]) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        write(self, batches)

    monkeypatch.setattr(SqliteStore, "write", refuse)
    job = start_job()
    job.cluster.until_workers(A0, A1)
    full.set()
    job.cluster.ready(A0, A1)  # of this the journal never hears
    job.cluster.world(1)
    logged = lambda name: [e for e in job.logged() if e["event"] == name]  # noqa: E731
    until(lambda: logged("journal_failed"), "the journal fails")
    full.clear()
    until(lambda: logged("journal_caught_up"), "it begins anew")
    run = load_run(job.run_dir.journal_file)
    assert {worker.id for worker in run.machines["job"].workers.having(RUNNING)} == {A0, A1}
    job.cluster.exits(A0, 0)
    job.cluster.exits(A1, 0)
    assert job.outcome().exit_code == 0


def test_a_driver_whose_run_was_taken_over_while_its_disk_was_full_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, path, write = [0.0], tmp_path / "journal.db", SqliteStore.write
    journal = Journal(path, "run", clock=lambda: now[0])
    journal.open()
    journal.snapshot(0, 0.0, {"tf": TfCluster(30.0).snapshot()})
    assert journal.settle() == []

    def refuse(self: SqliteStore, batches: Sequence[Batch]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SqliteStore, "write", refuse)
    journal.note(1, 1.0, "tf", Tick())
    assert [news.event for news in journal.settle()] == ["journal_failed"]
    journal._writer.join(30.0)
    monkeypatch.setattr(SqliteStore, "write", write)
    after_one(path, 0)
    now[0] += writer.AGAIN_S
    assert journal.snapshot_due
    journal.snapshot(1, 1.0, {"tf": TfCluster(30.0).snapshot()})
    journal._writer.join(30.0)
    with pytest.raises(TakenOverError):
        journal.settle()
    replay = Replay(path)
    assert [term.term for term in replay.terms] == [1, 2]
    assert [step.n for step in replay.steps()] == [1]
    replay.close()


def test_a_disk_that_hangs_holds_the_driver_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's thread stands still in a write, as it does on a disk that does not answer."""
    monkeypatch.setattr(writer, "MAX_BEHIND", 10_000)
    monkeypatch.setattr(writer, "_CLOSE_S", 0.1)
    fifo, path = tmp_path / "hangs", tmp_path / "journal.db"
    os.mkfifo(fifo)
    create = SqliteStore._create

    def hang_first(self: SqliteStore, head: Head) -> sqlite3.Connection:
        fifo.read_bytes()  # until someone opens it for writing
        return create(self, head)

    monkeypatch.setattr(SqliteStore, "_create", hang_first)
    journal = Journal(path, "run")
    journal.open()
    journal.snapshot(0, 0.0, {"tf": TfCluster(30.0).snapshot(), "shards": DataSets().snapshot()})
    names = []
    for n in range(1, 100):
        journal.note(n, float(n), "tf", Tick())
        names += [news.event for news in journal.settle()]
    assert names == ["journal_late"]
    fifo.write_bytes(b"")  # the disk answers
    until(lambda: journal._written == journal._handed, "the writer catches up")
    journal.note(100, 100.0, "tf", Tick())
    assert [news.event for news in journal.settle()] == ["journal_caught_up"]
    journal.close()
    replay = Replay(path)
    assert len(list(replay.steps())) == 100
    replay.close()


def test_a_journal_on_a_network_says_so_when_it_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    major, minor = os.major(tmp_path.stat().st_dev), os.minor(tmp_path.stat().st_dev)
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"36 35 0:999 / /other rw - ext4 /dev/sda rw\n"
        f"37 35 {major}:{minor} / /home rw,noatime shared:1 - nfs4 server:/home rw\n"
    )
    assert file_system.network_file_system(Path("/proc")) == ""
    monkeypatch.setattr(file_system, "_MOUNTS", mounts)
    monkeypatch.setattr(SqliteStore, "write", fail)
    (tmp_path / "run").mkdir()
    assert "(nfs4; a local disk is safer: --state-dir): no answer" in news_of_failure(
        tmp_path / "run" / "journal.db"
    )


def fail(*_: object) -> None:
    raise OSError("no answer")


def news_of_failure(path: Path) -> str:
    journal = Journal(path, "run")
    journal.open()
    journal.snapshot(0, 0.0, {"tf": TfCluster(30.0).snapshot()})
    (news,) = until(journal.settle, "it has failed")
    journal.close()
    return news.reason


def test_a_disk_that_hangs_for_ever_costs_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_BEHIND", 5_000_000)
    monkeypatch.setattr(writer, "_CLOSE_S", 0.1)
    fifo = tmp_path / "hangs"
    os.mkfifo(fifo)

    def hang(self: SqliteStore, head: Head) -> sqlite3.Connection:
        fifo.read_bytes()
        raise OSError("it is mended, too late")

    monkeypatch.setattr(SqliteStore, "_create", hang)
    journal = Journal(tmp_path / "journal.db", "run")
    journal.open()
    found = []
    for n in range(1, 10):
        journal.note(n, 1.0, "job", HostsDiscovered((("a" * 1_000_000, 1),)))
        found += journal.settle()
    assert [news.event for news in found] == ["journal_late", "journal_failed"]
    assert "the disk does not answer, " in found[1].reason
    journal.close()
    fifo.write_bytes(b"")


def test_answers_that_wait_for_a_disk_that_hangs_are_given_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "hangs"
    os.mkfifo(fifo)
    create = SqliteStore._create

    def hang_first(self: SqliteStore, head: Head) -> sqlite3.Connection:
        fifo.read_bytes()
        return create(self, head)

    monkeypatch.setattr(SqliteStore, "_create", hang_first)
    journal = Journal(tmp_path / "journal.db", "run")
    journal.open()
    given: list[int] = []
    for n in (1, 2):
        journal.note(n, 1.0, "shards", Tick())
        assert journal.then(partial(given.append, n)) == []
    assert given == []
    assert journal.overdue() == []  # it is not late yet
    assert journal.deadline is not None
    news = until(journal.overdue, "the journal is late")
    assert [each.event for each in news] == ["journal_late"]
    assert given == [1, 2]
    journal.note(3, 1.0, "shards", Tick())
    journal.then(partial(given.append, 3))
    assert given == [1, 2, 3]
    assert journal.deadline is None
    fifo.write_bytes(b"")
    journal.close()


def test_an_answer_that_hands_out_data_waits_longer_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, hangs, write = [0.0], threading.Event(), SqliteStore.write

    def hang(self: SqliteStore, batches: Sequence[Batch]) -> None:
        assert hangs.wait(30.0)
        write(self, batches)

    monkeypatch.setattr(SqliteStore, "write", hang)
    journal = Journal(tmp_path / "journal.db", "run", clock=lambda: now[0])
    journal.open()
    journal.snapshot(0, 0.0, {"shards": DataSets().snapshot()})
    given: list[str] = []
    numbers = itertools.count(1)

    def ask(answer: str, wait: float | None = None) -> None:
        journal.note(next(numbers), now[0], "shards", Tick())
        journal.then(partial(given.append, answer), wait)

    ask("a shard", 10.0)
    ask("a report")
    assert journal.deadline == WAIT_S
    now[0] = WAIT_S
    assert [news.event for news in journal.overdue()] == ["journal_late"]
    assert given == ["a report"]
    ask("another report")
    assert given == ["a report", "another report"]
    assert journal.deadline == 10.0
    now[0] = 9.9
    ask("the next shard", 10.0)
    assert journal.overdue() == []
    assert len(given) == 2
    now[0] = 10.0
    assert journal.overdue() == []
    assert given[2:] == ["a shard", "the next shard"], "a disk that hangs delays only once"
    ask("one more", 10.0)
    assert given[4:] == ["one more"]
    hangs.set()
    until(lambda: journal._written == journal._handed, "the writer catches up")
    assert [news.event for news in journal.overdue()] == ["journal_caught_up"]
    journal.close()


def test_a_shard_is_handed_out_when_a_late_journal_has_it(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "DATA_WAIT_S", 60.0)
    job = start_job((), start_np=1)
    hanging, goes_on, write = threading.Event(), threading.Event(), SqliteStore.write

    def hang(self: SqliteStore, batches: Sequence[Batch]) -> None:
        hanging.set()
        assert goes_on.wait(30.0)
        write(self, batches)

    monkeypatch.setattr(SqliteStore, "write", hang)
    request = NextRequest("a", RangeDescription(30, 10, 1))
    answered = threading.Event()

    def ask() -> None:
        with RendezvousClient(job.driver.endpoint, job.cluster.token) as client:
            client.post_json("/v1/shards/d:next", msgspec.json.encode(request), 60.0)
        answered.set()

    asking = threading.Thread(target=ask)
    asking.start()
    assert hanging.wait(30.0)
    job.cluster.until_event("journal_late")
    assert not answered.is_set()
    goes_on.set()
    asking.join(30.0)
    assert answered.is_set()
    shards = load_run(job.run_dir.journal_file).machines["shards"]
    assert shards._ledgers["d"].counts().doing == 1


def test_answers_are_given_when_their_events_are_written_and_when_the_journal_fails(
    tmp_path: Path,
) -> None:
    given: list[int] = []
    journal = Journal(tmp_path / "journal.db", "run")
    journal.open()
    for n in range(1, 500):
        journal.note(n, 1.0, "shards", Tick())
        assert journal.then(partial(given.append, n)) == []
    until(lambda: len(given) == 499, "every answer is given")
    assert sorted(given) == list(range(1, 500))
    journal.close()
    broken = Journal(tmp_path, "run")  # a folder is no file
    broken.open()
    broken.note(1, 1.0, "shards", Tick())
    broken.then(partial(given.append, 500))
    until(lambda: given[-1] == 500, "the answer does not wait for a broken journal")
    assert [each.event for each in broken.overdue()] == ["journal_failed"]
    assert broken.overdue() == []
    broken.close()


def test_a_report_is_answered_when_the_journal_has_it(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "WAIT_S", 30.0)  # far longer than the disk takes here
    job = start_job()
    job.cluster.until_workers(A0, A1)
    hanging, goes_on, write = threading.Event(), threading.Event(), SqliteStore.write

    def hang(self: SqliteStore, batches: Sequence[Batch]) -> None:
        hanging.set()
        assert goes_on.wait(20.0)
        write(self, batches)

    monkeypatch.setattr(SqliteStore, "write", hang)
    reporting = threading.Thread(target=job.cluster.ready, args=(A0,))
    reporting.start()
    assert hanging.wait(10.0)
    reporting.join(0.3)
    assert reporting.is_alive()
    goes_on.set()
    reporting.join(10.0)
    assert not reporting.is_alive()
    found = [step.event for step in load_run(job.run_dir.journal_file).since]
    for batch in (each for each in found if isinstance(each, EventBatch)):
        found += batch.events
    assert any(isinstance(each, WorkerReady) for each in found)


def test_a_journal_that_is_late_keeps_nobody_from_reporting(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job()
    job.cluster.until_workers(A0, A1)
    goes_on, write = threading.Event(), SqliteStore.write

    def hang(self: SqliteStore, batches: Sequence[Batch]) -> None:
        goes_on.wait(20.0)
        write(self, batches)

    monkeypatch.setattr(SqliteStore, "write", hang)
    job.cluster.ready(A0, A1)
    job.cluster.world(1)
    job.cluster.until_event("journal_late")
    goes_on.set()


def test_keys_beyond_the_limit_are_not_kept_and_the_user_learns_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_KEPT_KEYS", 100)
    journal = Journal(tmp_path / "journal.db", "run")
    journal.open()
    journal.snapshot(0, 0.0, {"tf": TfCluster(30.0).snapshot()})
    assert journal.keep({"mine/a": bytes(60), "mine/b": b"1"}) == []
    (news,) = journal.keep({"mine/c": bytes(60)})
    assert news.reason.startswith("'mine/c': the limit for keys that outlive the driver is ")
    assert journal.keep({"mine/a": None, "mine/d": bytes(60)}) == []
    journal.close()
    replay = Replay(tmp_path / "journal.db")
    assert replay.keys() == {"mine/b": b"1", "mine/d": bytes(60)}
    replay.close()
