"""The journal: its cost for a round of READYs and for requests for shards, its size, and a replay.

The machines get the same events without a journal and with one, in turn. The figures are processor
time of both threads, as that says most on a shared machine. A journal is written in --folder, by
default on the disk of /tmp.

    python -m benchmarks.journal [--members 10,1000,10000] [--rounds 20] [--folder DIR]
                                 [--etcd etcd://h1:2379,h2:2379,h3:2379]

Last is the time until an event, or a round of READYs, is in the file; with --etcd, also until it is
in that etcd and in the file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import Figure, report
from elastic_driver.features.shards import messages as m
from elastic_driver.features.shards.machine import DataSets
from elastic_driver.job.decisions import GiveOrder, StartAgent
from elastic_driver.job.events import EventBatch, HostsDiscovered
from elastic_driver.job.job import Job
from elastic_driver.runtime.journal import etcd
from elastic_driver.runtime.journal.etcd import EtcdClient, read_access
from elastic_driver.runtime.journal.follower import EtcdStore, begin_anew
from elastic_driver.runtime.journal.journal_file import SqliteStore
from elastic_driver.runtime.journal.replay import Replay
from elastic_driver.runtime.journal.tenure import LEASE_S, Tenure, new_key
from elastic_driver.runtime.journal.writer import Journal
from elastic_driver.runtime.loop import MAX_TOGETHER
from elastic_driver.runtime.mailbox import collector_paused
from elastic_driver.settings import Settings
from elastic_driver.words import wire_events as ev
from elastic_driver.words.orders import StartWorkerOrder
from rendezvous.auth import write_token_file

SLOTS = 8
REQUESTS = 2000
DATA = m.RangeDescription(10**9, 100)


class Driver:
    """A machine, and a journal that its events go to (None: there is none)."""

    def __init__(self, name: Any, machine: Job | DataSets, journal: Journal | None) -> None:
        self.name, self.machine, self.journal = name, machine, journal
        self.number = self.size = 0
        if journal is not None:
            journal.open()
            journal.snapshot(0, 0.0, {name: machine.snapshot()})
            journal.settle()

    def handle(self, event: Any) -> list[Any]:
        """Do what the driver's loop does with an event, except for the decisions."""
        self.number += 1
        now = time.monotonic()
        if self.journal is None:
            return self.machine.handle(event, now)
        self.journal.note(self.number, now, self.name, event)
        decisions = self.machine.handle(event, now)
        if self.name == "shards":
            self.journal.then(lambda: None)  # an answer waits for it, the driver does not
        elif decisions:
            self.journal.settle()
        if self.journal.snapshot_due:
            self.journal.snapshot(self.number, now, {self.name: self.machine.snapshot()})
        return decisions


def start(driver: Driver, members: int) -> list[str]:
    """Have the job start its workers; return their names."""
    hosts = tuple((f"h{i}", SLOTS) for i in range(-(-members // SLOTS)))
    agents = [d for d in driver.handle(HostsDiscovered(hosts)) if isinstance(d, StartAgent)]
    ready = [ev.AgentReady(a.host, a.incarnation, 1, "127.0.0.1", (5000, 5001)) for a in agents]
    orders = [d.order for d in driver.handle(EventBatch(tuple(ready))) if isinstance(d, GiveOrder)]
    workers = [order.worker for order in orders if isinstance(order, StartWorkerOrder)]
    driver.handle(EventBatch(tuple(ev.WorkerStarted(worker, 1) for worker in workers)))
    return workers


def meet(driver: Driver, workers: list[str], left: int) -> float:
    """Return the seconds for a round in which all workers report READY."""
    ready = [ev.WorkerReady(w, left, left, True, "asked to leave") for w in workers]
    began = time.process_time()
    for first in range(0, len(ready), MAX_TOGETHER):
        driver.handle(EventBatch(tuple(ready[first : first + MAX_TOGETHER])))
    return time.process_time() - began


def ask(driver: Driver, together: int) -> float:
    """Return the seconds for a request for a shard, if so many are handled as one event."""
    began = time.process_time()
    for first in range(0, REQUESTS, together):
        requests = []
        for ticket in range(first, first + together):
            asked = m.NextRequest(f"h{ticket}.0.1", DATA)
            requests.append(m.ShardRequest(ticket, "numbers", asked))
        driver.handle(m.ShardBatch(tuple(requests)))
    if driver.journal is not None:
        driver.journal.settle()
    return (time.process_time() - began) / REQUESTS


def rounds(members: int, count: int, folder: Path) -> list[Figure]:
    """Measure rounds of READYs, the size of the journal and the replay."""
    settings = Settings(start_np=members, min_np=1, fruitless_restarts=10**6)
    path = folder / f"{members}.db"
    drivers = [
        Driver("job", Job(settings), None),
        Driver("job", Job(settings), Journal(path, "bench")),
    ]
    workers = [start(driver, members) for driver in drivers]
    took: tuple[list[float], list[float]] = ([], [])
    for left in range(count):
        for driver, those, seconds in zip(drivers, workers, took, strict=True):
            seconds.append(meet(driver, those, left) * 1e3)
    journal = drivers[1].journal
    assert journal is not None
    began = time.process_time()
    with collector_paused():
        drivers[1].machine.snapshot()
    snapshot = (time.process_time() - began) * 1e3
    journal.close()
    replay = Replay(path)
    began = time.process_time()
    events = sum(1 for _ in replay.steps())
    replayed = time.process_time() - began
    of, reports = f"n = {members}", members * count
    more = [1e3 * (late - early) / members for early, late in zip(*took, strict=True)]
    written = sum(length for (length,) in rows(path, "SELECT length(event) FROM events"))
    return [
        Figure("no journal", f"a round of READYs, {of}", "ms", tuple(took[0])),
        Figure("journal", f"a round of READYs, {of}", "ms", tuple(took[1])),
        Figure("journal", f"more for one READY, {of}", "us", tuple(more)),
        Figure("journal", f"bytes for one READY, {of}", "B", (written / reports,)),
        Figure("journal", f"a snapshot, {of}", "ms", (snapshot,)),
        Figure(
            "journal", f"the file, {of}", "KiB", (path.stat().st_size / 1024,), f"{events} events"
        ),
        Figure("journal", f"the whole replay, {of}", "s", (replayed,)),
    ]


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    """Return what a query finds in a journal."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


def requests(folder: Path, repeats: int) -> list[Figure]:
    """Measure requests for shards, one by one and many at once."""
    figures = []
    for together in (1, 32):
        took: tuple[list[float], list[float]] = ([], [])
        for turn in range(repeats):
            journal = Journal(folder / f"shards-{together}-{turn}.db", "bench")
            for it, seconds in zip((None, journal), took, strict=True):
                seconds.append(ask(Driver("shards", DataSets(), it), together) * 1e6)
            journal.close()
        figure = f"a request for a shard, {together} at once"
        figures += [
            Figure("no journal", figure, "us", tuple(took[0])),
            Figure("journal", figure, "us", tuple(took[1])),
        ]
    return figures


def waits(url: str | None, members: tuple[int, ...], repeats: int, folder: Path) -> list[Figure]:
    """Measure the time until an event is in the file, or in etcd (if there is one) and the file."""
    figures = []
    for system in ("journal", "etcd") if url else ("journal",):
        path = folder / f"waits-{system}.db"
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(in_etcd(url, path)) if url and system == "etcd" else None
            journal = Journal(path, "bench", store=place)
            journal.open()
            stack.callback(journal.close)
            journal.snapshot(0, 0.0, {"job": Job(Settings()).snapshot()})
            number = 0
            for count in (1, *members):
                ready = tuple(ev.WorkerReady(f"h{i}.0.1", 1, 1, True, "left") for i in range(count))
                took = []
                for _ in range(repeats):
                    number += 1
                    began = time.monotonic()
                    journal.note(number, began, "job", EventBatch(ready))
                    journal.settle()
                    while journal.holds:
                        journal.settle()
                    took.append((time.monotonic() - began) * 1e3)
                what = "an event" if count == 1 else f"{count} READYs"
                figures.append(Figure(system, f"{what} until written", "ms", tuple(took)))
    return figures


@contextlib.contextmanager
def in_etcd(url: str, path: Path) -> Iterator[EtcdStore]:
    """Give the place of a journal in this etcd, under a name of its own; it is removed."""
    with EtcdClient(read_access(url, os.environ)) as client:
        tenure = Tenure(client, f"bench-{os.getpid()}", new_key(1, 0, 0.0), LEASE_S)
        tenure.take(*begin_anew(tenure.keys))
        token = path.with_name("token")
        write_token_file(token, "bench")
        store = EtcdStore(client, tenure, SqliteStore(path), token, print)
        store.start()
        yield store
        prefix = tenure.keys.prefix
        with client.clone() as other:
            other.transact([], [etcd.delete(prefix, etcd.end_of(prefix))])


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", default="10,1000,10000")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--etcd", metavar="URL")
    options = parser.parse_args()
    members = tuple(map(int, options.members.split(",")))
    with tempfile.TemporaryDirectory(prefix="elastic-bench-", dir=options.folder) as folder:
        figures = requests(Path(folder), 5)
        for count in members:
            figures += rounds(count, options.rounds, Path(folder))
        figures += waits(options.etcd, members, 50, Path(folder))
    report("journal", figures)


if __name__ == "__main__":
    main()
