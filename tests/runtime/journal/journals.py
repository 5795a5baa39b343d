"""Journals to test with, and what a replay says of them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from elastic_driver.features.shards.machine import DataSets
from elastic_driver.features.tensorflow.machine import TfCluster
from elastic_driver.job.events import Tick
from elastic_driver.runtime.journal.journal_file import Head, SqliteStore
from elastic_driver.runtime.journal.replay import Replay
from elastic_driver.runtime.journal.writer import Journal
from tests.runtime.jobs import JobUnderTest, StartJob
from tests.runtime.waiting import until

A0, A1 = "a.0.1", "a.1.1"


def short_job(start_job: StartJob) -> JobUnderTest:
    job = start_job()
    job.cluster.until_workers(A0, A1)
    job.cluster.ready(A0, A1)
    job.cluster.world(1)
    job.cluster.exits(A0, 0)
    job.cluster.exits(A1, 0)
    assert job.outcome().exit_code == 0
    return job


def write_some(path: Path, count: int, *, close: bool = True) -> list[str]:
    """Write events of a TensorFlow cluster; return the names of what the user has to know."""
    journal = Journal(path, "run")
    journal.open()
    journal.snapshot(0, 0.0, {"tf": TfCluster(30.0).snapshot(), "shards": DataSets().snapshot()})
    found = []
    for n in range(1, count + 1):
        journal.note(n, float(n), "tf", Tick())
        found += [news.event for news in journal.settle()]
    if close:
        journal.close()
    return found


def outlive_a_full_disk(folder: Path) -> list[str]:
    """Write events while the folder's disk is filled and cleared; return what was told and kept."""
    path, filler, found = folder / "journal.db", folder / "filler", []
    tf = TfCluster(30.0).snapshot()
    journal = Journal(path, "run")
    journal.open()
    journal.serves_at("http://127.0.0.1:1")
    journal.snapshot(0, 0.0, {"tf": tf})
    found += journal.keep({"before": b"1", "gone": b"0"}) + journal.settle()
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    journal.keep({"on the way": b"2", "gone": None})
    for n in range(1, 200):
        journal.note(n, float(n), "tf", Tick())
        found += journal.settle()
    journal.keep({"meanwhile": b"3"})
    until(lambda: journal.snapshot_due, "it is tried again")
    journal.snapshot(199, 199.0, {"tf": tf})  # the disk is full yet
    until(lambda: journal.overdue() or journal.snapshot_due, "and once more")
    filler.unlink()
    journal.snapshot(200, 200.0, {"tf": tf})
    until(lambda: found.extend(journal.overdue()) or len(found) > 1, "it takes events")
    for n in range(201, 251):
        journal.note(n, float(n), "tf", Tick())
        found += journal.settle()
    journal.close()
    replay = Replay(path)
    numbers, term = [step.n for step in replay.steps()], replay.terms[-1]
    steps = f"steps {numbers[0]}..{numbers[-1]} of term {term.term} at {term.url}"
    keys = f"keys {dict(sorted(replay.keys().items(), key=lambda pair: pair[1]))}"
    replay.close()
    return [*(news.event for news in found), steps, keys]


def after_one(path: Path, n: int, term: int = 2) -> None:
    """Go on with the journal of an earlier driver, and write one event."""
    journal = Journal(path, "run")
    journal.open(Head("run", term=term, n=n, at=float(n), unix_offset=1000.0))
    journal.await_open()
    journal.note(n + 1, n + 1.0, "tf", Tick())
    assert journal.settle() == []
    journal.close()


def write_everything(path: Path) -> None:
    """Write rows of all kinds: two drivers, events, snapshots, and keys of users."""
    first = Journal(path, "run", store=SqliteStore(path))
    first.open(Head("run", ("elasticrun", "train.py"), "/home"))
    first.snapshot(0, 0.0, {"tf": TfCluster(30.0).snapshot(), "shards": DataSets().snapshot()})
    first.serves_at("http://127.0.0.1:1234")
    for n in range(1, 30):
        first.note(n, n + 0.25, "tf", Tick())
    first.keep({"mine/a": b"kept", "mine/b": bytes(300)})
    assert first.settle() == []
    first.close()
    after_one(path, n=29)


def everything(path: Path) -> list[Any]:
    """What a replay tells of a journal."""
    with contextlib.closing(Replay(path)) as replay:
        head = [replay.run_id, replay.argv, replay.cwd, replay.terms, replay.keys()]
        steps = list(replay.steps())
        return [*head, steps, {n: m.snapshot() for n, m in replay.machines.items()}]
