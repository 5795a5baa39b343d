"""The places where a journal is kept; by default a SQLite database in WAL mode.

`Journal` (`writer`) calls a store from the thread that writes. Each driver of a run writes its term
first, and every later write checks that no driver with a higher term has begun.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from elastic_driver.errors import TakenOverError
from elastic_driver.runtime.journal import tables

# Before the newest event; older ones, and snapshots, are dropped.
KEPT_EVENTS = 100_000
KEPT_BYTES = 256 * 1024 * 1024
CHECKPOINT_BYTES = 4 * 1024 * 1024  # of the write-ahead log, which then goes into the file
# An event or a state: its number, machine time, the machine, and the bytes.
Row: TypeAlias = tuple[int, float, str, bytes]


class Head(NamedTuple):
    """The run that a journal belongs to, and the driver that begins to write it."""

    run_id: str
    argv: tuple[str, ...] = ()  # the command line of `elasticrun`
    cwd: str = ""  # its folder
    term: int = 1  # of this driver; above 1, the journal of an earlier one goes on
    n: int = 0  # the number of the last event of the drivers before
    at: float = 0.0  # machine time of the beginning
    unix_offset: float = 0.0  # unix seconds minus machine time


@dataclass(frozen=True)
class Batch:
    """Rows that are written in one transaction; `states`: snapshots after the last event."""

    number: int
    events: list[Row] = field(default_factory=list)
    states: list[Row] = field(default_factory=list)
    size: int = 0  # bytes
    url: str = ""  # the address of this driver, once it is known
    end: tuple[int, str] | None = None  # of a job that is over: exit status and reason
    keys: dict[str, bytes | None] = field(default_factory=dict)  # of users; None: it is gone
    anew: bool = False  # `states` begin the journal anew: what is between them and it is missing


class JournalStore(Protocol):
    """A place for a journal. All methods are called by one thread, and may take their time.

    Each of them may raise `OSError` or `sqlite3.Error` (the journal is given up, and the job goes
    on) and `TakenOverError` (the driver ends).
    """

    must_be_written: bool  # nothing acts before it is written, however long that takes
    trouble: str  # why it takes long, "" if nothing is known; read by other threads
    on_taken_over: Callable[[TakenOverError], None]  # set by the driver; called by any thread

    def open(self, head: Head) -> None:
        """Begin a journal, or go on with one; this driver's term is kept when it returns.

        Called again after an error, with the same head, it goes on with this driver's own.
        """

    def write(self, batches: Sequence[Batch]) -> None:
        """Write these batches, all or none; they survive this process when it returns."""

    def tidy(self, batches: Sequence[Batch]) -> None:
        """Drop what is old, and move what was written to its place; nobody waits for this."""

    def close(self) -> None:
        """Put the journal of a driver that ends in good order in its last form."""

    def free(self) -> None:
        """Close files and connections, whatever has happened before; never raises."""


class SqliteStore:
    """A journal in a SQLite database (a `JournalStore`)."""

    must_be_written, trouble = False, ""
    on_taken_over: Callable[[TakenOverError], None] = staticmethod(lambda _error: None)

    def __init__(self, path: Path) -> None:
        self._path = path
        self._term = 0
        self._unmoved = 0  # bytes in the write-ahead log
        self._begun = False  # the file has this driver's term
        self._open: sqlite3.Connection | None = None

    def open(self, head: Head) -> None:
        """See `JournalStore.open`."""
        self._term = head.term
        if self._begun:
            database = self._own()
        else:
            database = self._create(head) if head.term == 1 else self._go_on(head)
        self._begun = True
        # NORMAL: a commit reaches the kernel. The disk is asked to keep it only at checkpoints,
        # which come after the answer to the driver. A log that begins anew is cut
        # at its end, so that what is behind a damaged frame is known to be of the same log.
        database.executescript(
            "PRAGMA synchronous=NORMAL; PRAGMA wal_autocheckpoint=0; PRAGMA journal_size_limit=0"
        )

    def write(self, batches: Sequence[Batch]) -> None:
        """See `JournalStore.write`."""
        database = self._database
        with _transaction(database):
            (newest,) = database.execute("SELECT max(term) FROM terms").fetchone()
            if newest != self._term:
                raise self._taken_over()
            for batch in batches:
                if batch.anew:
                    database.execute("DELETE FROM events")
                    database.execute("DELETE FROM snapshots")
                tables.put(database, "events", batch.events)
                if batch.states:
                    database.execute("DELETE FROM snapshots WHERE n = ?", batch.states[0][:1])
                    tables.put(database, "snapshots", batch.states)
                gone = [(key,) for key, value in batch.keys.items() if value is None]
                kept = [pair for pair in batch.keys.items() if pair[1] is not None]
                database.executemany("DELETE FROM keys WHERE key = ?", gone)
                tables.put(database, "keys", kept, replace=True)
                if batch.url:
                    own = "SELECT * FROM terms WHERE term = ?"
                    *row, _url, _sum = database.execute(own, (self._term,)).fetchone()
                    tables.put(database, "terms", [(*row, batch.url)], replace=True)

    def tidy(self, batches: Sequence[Batch]) -> None:
        """See `JournalStore.tidy`."""
        self._unmoved += sum(batch.size for batch in batches)
        for batch in batches:
            if batch.states:
                drop_old(self._database, batch.states[0][0])
        if self._unmoved > CHECKPOINT_BYTES:
            self._database.execute("PRAGMA wal_checkpoint(PASSIVE)")
            self._unmoved = 0

    def close(self) -> None:
        """See `JournalStore.close`."""
        # One file, without a log beside it: it can be copied into a report of a fault.
        self._database.execute("PRAGMA journal_mode=DELETE")

    def free(self) -> None:
        """See `JournalStore.free`."""
        if self._open is not None:
            with contextlib.suppress(sqlite3.Error):
                self._open.close()
            self._open = None

    @property
    def _database(self) -> sqlite3.Connection:
        if self._open is None:
            raise sqlite3.ProgrammingError("the journal is not open")
        return self._open

    def _create(self, head: Head) -> sqlite3.Connection:
        """Create the file anew, readable by its owner alone."""
        for suffix in ("", "-wal", "-shm", "-journal"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, 0o600))
        database = self._open = tables.connect(self._path)
        database.execute("PRAGMA synchronous=OFF")  # for an empty file
        _log_ahead(database)
        with _transaction(database):
            tables.create(database)
            about = head.run_id, msgspec.json.encode(head.argv).decode(), head.cwd
            tables.put(database, "about", [about])
            _begin_term(database, head)
        return database

    def _go_on(self, head: Head) -> sqlite3.Connection:
        """Open the file of an earlier driver; raises `TakenOverError` if it is not as it was."""
        if not self._path.is_file():
            raise FileNotFoundError(f"there is no journal {self._path}")
        database = self._open = tables.connect(self._path)
        if what := tables.stranger(database):
            raise sqlite3.DatabaseError(f"the file holds {what}, which no journal has")
        _log_ahead(database)
        with _transaction(database):
            newest = "SELECT (SELECT max(term) FROM terms), (SELECT max(n) FROM events)"
            term, n = database.execute(newest).fetchone()
            if term >= head.term or (n or 0) > head.n:
                raise self._taken_over()
            tables.upgrade(database)
            _begin_term(database, head)
        return database

    def _own(self) -> sqlite3.Connection:
        """Open the file that this driver has written to; `write` looks whether it is still ours."""
        if not self._path.is_file():
            raise FileNotFoundError(f"there is no journal {self._path}")
        database = self._open = tables.connect(self._path)
        _log_ahead(database)
        return database

    def _taken_over(self) -> TakenOverError:
        newest = "SELECT term, host, pid FROM terms ORDER BY term DESC LIMIT 1"
        with contextlib.closing(tables.connect(self._path)) as database:
            found = database.execute(newest).fetchone()
        who = "driver {} (host {}, process {})".format(*found)
        return TakenOverError(f"{who} goes on with this run; driver {self._term} ends")


def _log_ahead(database: sqlite3.Connection) -> None:
    if database.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
        raise sqlite3.OperationalError("this file system takes no write-ahead log")


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Write all that is done in the context, or nothing."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _begin_term(database: sqlite3.Connection, head: Head) -> None:
    who = os.uname().nodename, os.getpid(), ""
    row = head.term, head.n, head.at, time.time(), head.unix_offset, *who
    tables.put(database, "terms", [row])


def drop_old(database: sqlite3.Connection, newest: int) -> None:
    """Drop what is older than the last snapshot before the events that are kept."""
    oldest = "SELECT max(n) FROM snapshots WHERE n <= ?"
    last = max(newest - KEPT_EVENTS, _last_beyond_bytes(database))
    (first,) = database.execute(oldest, (last,)).fetchone()
    if first is not None:
        with _transaction(database):
            database.execute("DELETE FROM events WHERE n <= ?", (first,))
            database.execute("DELETE FROM snapshots WHERE n < ?", (first,))


def _last_beyond_bytes(database: sqlite3.Connection) -> int:
    """Return the newest event behind which there are `KEPT_BYTES` of events; 0: there is none."""
    pages, free, size = (
        database.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    if (pages - free) * size <= KEPT_BYTES:
        return 0  # nearly always, and without a look at each event
    sums = (
        "SELECT max(n) FROM (SELECT n, sum(length(event)) OVER (ORDER BY n DESC) AS bytes "
        "FROM events) WHERE bytes > ?"
    )
    return database.execute(sums, (KEPT_BYTES,)).fetchone()[0] or 0
