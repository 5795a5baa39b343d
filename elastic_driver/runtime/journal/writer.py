"""Writes the journal of a run: a SQLite database in WAL mode, written by a thread of its own.

The driver's thread notes each event, and waits until it is written before the decisions that follow
from it act. "Written" means handed to the kernel: the journal survives the driver's death at any
moment, and loses the last moments when the host loses power. A disk that does not answer delays
nothing for long: after `WAIT_S` the driver acts without waiting, until the writer has caught up. A
journal that fails (full disk, read-only, too far behind) is given up, and the job goes on
(docs/journal.md).
"""

import collections
import contextlib
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic_driver.core.decisions import Announce
from elastic_driver.policies.messages import MachineName
from elastic_driver.runtime.journal.codec import AnyEvent, encode

FORMAT = 1
WAIT_S = 0.25  # for a write; a page cache takes far less than a millisecond
MAX_BEHIND = 64 * 1024 * 1024  # bytes that wait for a disk
SNAPSHOT_BYTES = 256 * 1024  # of events between two snapshots, or …
SNAPSHOT_TIMES = 2  # … as many times the size of a snapshot, if that is more
KEPT_EVENTS = 100_000  # before the newest; older ones, and snapshots, are dropped
_CHECKPOINT_BYTES = 4 * 1024 * 1024  # of the write-ahead log, which then goes into the file
_CLOSE_S = 5.0  # for the writer to end

SCHEMA = """
CREATE TABLE about (run_id TEXT, unix_offset REAL);
CREATE TABLE events (n INTEGER PRIMARY KEY, at REAL, machine TEXT, event BLOB);
CREATE TABLE snapshots (n INTEGER, at REAL, machine TEXT, state BLOB, PRIMARY KEY (n, machine));
"""
_Event = tuple[int, float, MachineName, bytes]


@dataclass(frozen=True)
class _Batch:
    """Rows that are written in one transaction; `states`: snapshots after the last event."""

    number: int
    events: list[_Event]
    states: list[_Event]
    size: int  # bytes


@dataclass
class Journal:
    """The journal of one run; methods without a remark belong to the driver's thread."""

    path: Path
    run_id: str
    _noted: list[_Event] = field(default_factory=list)  # not handed to the writer yet
    _states: list[_Event] = field(default_factory=list)
    _size: int = 0  # bytes of both
    _since_snapshot: int = 0  # bytes of events
    _due_bytes: int = SNAPSHOT_BYTES
    _handed: int = 0  # batches
    _handed_bytes: int = 0
    _late: bool = False  # the driver does not wait for the disk
    _given_up: bool = False

    def __post_init__(self) -> None:
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._moved = threading.Condition()
        self._written = self._written_bytes = 0  # batches and bytes; guarded by `_moved`
        self._failure = ""  # guarded by `_moved`
        # Guarded by `_moved`: the batch that each waits for, since when, and what is done then.
        self._waiting: collections.deque[tuple[int, float, Callable[[], None]]] = (
            collections.deque()
        )
        self._writer = threading.Thread(target=self._write, name="journal", daemon=True)

    # ---- the driver's thread -------------------------------------------------------------

    def open(self) -> None:
        """Begin to write; the file is made anew. An error shows in `settle`."""
        self._writer.start()

    @property
    def snapshot_due(self) -> bool:
        """Return whether the next snapshot bounds the replay: many events came since the last."""
        return not self._given_up and self._since_snapshot >= self._due_bytes

    def note(self, n: int, at: float, machine: MachineName, event: AnyEvent) -> None:
        """Note an event with its number and time; `settle` or `flush` follows."""
        if not self._given_up:
            encoded = encode(event)
            self._noted.append((n, at, machine, encoded))
            self._size += len(encoded)
            self._since_snapshot += len(encoded)

    def snapshot(self, n: int, at: float, states: Mapping[MachineName, bytes]) -> None:
        """Note the states of all machines after event `n`."""
        if not self._given_up:
            self._states = [(n, at, machine, state) for machine, state in states.items()]
            size = sum(map(len, states.values()))
            self._size += size
            self._since_snapshot, self._due_bytes = 0, max(SNAPSHOT_BYTES, SNAPSHOT_TIMES * size)
            self.flush()

    def flush(self) -> None:
        """Hand what was noted to the writer, without waiting for it."""
        if self._noted or self._states:
            self._handed += 1
            self._handed_bytes += self._size
            self._queue.put(_Batch(self._handed, self._noted, self._states, self._size))
            self._noted, self._states, self._size = [], [], 0

    def settle(self) -> list[Announce]:
        """Wait until everything noted is written; return what the user has to know.

        It waits at most `WAIT_S`, and not at all while an earlier wait was in vain.
        """
        if self._given_up:
            return []
        earlier = self._handed
        self.flush()
        with self._moved:
            wait = 0.0 if self._late and self._written < earlier else WAIT_S
            done = self._moved.wait_for(self._has_settled, wait)
            failure, behind = self._failure, self._handed_bytes - self._written_bytes
        if failure or behind > MAX_BEHIND:
            self._given_up = True
            why = failure or f"the disk does not answer, {behind >> 20} MiB wait for it"
            hint = "the job goes on without a journal (make room, or mend the disk)"
            return [Announce("journal_failed", f"{self.path}: {why}; {hint}")]
        was, self._late = self._late, not done
        if was is self._late:
            return []
        if self._late:
            slow = f"{self.path}: the disk has not answered for {WAIT_S:g} s; the job does not wait"
            return [Announce("journal_late", slow)]
        return [Announce("journal_caught_up", f"{self.path}: every event is written again")]

    def then(self, act: Callable[[], None]) -> list[Announce]:
        """Have `act` called, by any thread, once everything noted is written; do not wait for it.

        So one transaction serves many requests. Returns what the user has to know.
        """
        if self._late or self._given_up:
            news = self.settle()
            act()
            return news
        self.flush()
        with self._moved:
            if not self._has_settled():
                self._waiting.append((self._handed, time.monotonic(), act))
                return []
        act()
        return []

    @property
    def deadline(self) -> float | None:
        """The time at which `overdue` is to be called; None: nothing waits."""
        with self._moved:
            return self._waiting[0][1] + WAIT_S if self._waiting else None

    def overdue(self) -> list[Announce]:
        """Do what waits for a disk that does not answer; return what the user has to know."""
        with self._moved:
            late = self._waiting and time.monotonic() >= self._waiting[0][1] + WAIT_S
            if self._given_up or not (late or self._failure):
                return []
            acts = self._due_acts(self._handed)
        for act in acts:
            act()
        return self.settle()

    def close(self) -> None:
        """Write what was noted, and close the file; a disk that does not answer is left alone."""
        if self._writer.ident is not None:
            self.flush()
            self._queue.put(None)
            self._writer.join(_CLOSE_S)

    def _has_settled(self) -> bool:
        return bool(self._failure) or self._written >= self._handed

    def _due_acts(self, written: int) -> list[Callable[[], None]]:
        """Take out what waits for batches up to this one; the caller holds `_moved`."""
        acts = []
        while self._waiting and self._waiting[0][0] <= written:
            acts.append(self._waiting.popleft()[2])
        return acts

    # ---- the writer's thread -------------------------------------------------------------

    def _write(self) -> None:
        try:
            with contextlib.closing(self._create()) as database:
                self._write_batches(database)
                # One file, without a log beside it: it can be copied into a report of a fault.
                database.execute("PRAGMA journal_mode=DELETE")
        except (sqlite3.Error, OSError) as error:
            with self._moved:
                self._failure = str(error) or type(error).__name__
                self._moved.notify_all()
                acts = self._due_acts(self._handed)
            for act in acts:
                act()

    def _create(self) -> sqlite3.Connection:
        """Create the file anew, readable by its owner alone."""
        for suffix in ("", "-wal", "-shm", "-journal"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        os.close(os.open(self.path, os.O_CREAT | os.O_EXCL, 0o600))
        database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA synchronous=OFF")  # for an empty file
        mode = database.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise sqlite3.OperationalError("this file system takes no write-ahead log")
        database.executescript(f"{SCHEMA} PRAGMA user_version={FORMAT};")
        offset = time.time() - time.monotonic()
        database.execute("INSERT INTO about VALUES (?, ?)", (self.run_id, offset))
        # NORMAL: a commit reaches the kernel. The disk is asked to keep it only at checkpoints,
        # which come after the answer to the driver.
        database.executescript("PRAGMA synchronous=NORMAL; PRAGMA wal_autocheckpoint=0")
        return database

    def _write_batches(self, database: sqlite3.Connection) -> None:
        uncopied = 0  # bytes in the write-ahead log
        batch = self._queue.get()
        while batch is not None:
            batches = [batch]
            while not self._queue.empty() and (batch := self._queue.get()) is not None:
                batches.append(batch)
            _insert(database, batches)
            size = sum(each.size for each in batches)
            with self._moved:
                self._written = batches[-1].number
                self._written_bytes += size
                self._moved.notify_all()
                acts = self._due_acts(self._written)
            for act in acts:
                act()
            uncopied += size
            for each in batches:
                if each.states:
                    _drop_old(database, each.states[0][0])
            if uncopied > _CHECKPOINT_BYTES:
                database.execute("PRAGMA wal_checkpoint(PASSIVE)")
                uncopied = 0
            batch = batch and self._queue.get()


def _insert(database: sqlite3.Connection, batches: list[_Batch]) -> None:
    """Write batches in one transaction."""
    database.execute("BEGIN")
    for batch in batches:
        database.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", batch.events)
        if batch.states:
            database.execute("DELETE FROM snapshots WHERE n = ?", batch.states[0][:1])
            database.executemany("INSERT INTO snapshots VALUES (?, ?, ?, ?)", batch.states)
    database.execute("COMMIT")


def _drop_old(database: sqlite3.Connection, newest: int) -> None:
    """Drop what is older than the last snapshot before the events that are kept."""
    oldest = "SELECT max(n) FROM snapshots WHERE n <= ?"
    (first,) = database.execute(oldest, (newest - KEPT_EVENTS,)).fetchone()
    if first is not None:
        database.execute("BEGIN")
        database.execute("DELETE FROM events WHERE n <= ?", (first,))
        database.execute("DELETE FROM snapshots WHERE n < ?", (first,))
        database.execute("COMMIT")
