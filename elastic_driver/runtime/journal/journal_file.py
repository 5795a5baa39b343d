"""The places where a journal is kept; by default a SQLite database in WAL mode.

`Journal` (`writer`) calls a store from the thread that writes. Each driver of a run writes its term
first, and every later write checks that no driver with a higher term has begun.

Each row ends with a checksum of its other values, and is checked before it is used: SQLite notices
a damaged structure, but not a flipped bit inside a value. A file may have been made by somebody
else: a view or a trigger in it would run what it says when a table is read or written. So a file is
used only if it has our tables, as we make them, and nothing else.

SQLite ends its write-ahead log at the first frame whose checksum is wrong, without a word: after a
crash that is where the writing had stopped. A byte that has changed on the disk looks the same, and
all that is behind it is lost, at worst the whole journal. What tells them apart: a process writes
one frame after the other, so behind the frame at which it was killed there is none of the same log.
`log_damage` looks for one. The form of the files:
https://www.sqlite.org/fileformat2.html#the_write_ahead_log and https://www.sqlite.org/walformat.html
"""

import contextlib
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias
from urllib.parse import quote
from zlib import crc32

import msgspec

from elastic_driver.errors import TakenOverError

FORMAT = 3
UPGRADED = 2  # the format that has no checksums; a driver that goes on with it adds them
_COLUMNS = {
    "about": "run_id TEXT, argv TEXT, cwd TEXT",
    "terms": "term INTEGER PRIMARY KEY, n INTEGER, at REAL, unix REAL, unix_offset REAL, "
    "host TEXT, pid INTEGER, url TEXT",
    "events": "n INTEGER PRIMARY KEY, at REAL, machine TEXT, event BLOB",
    "snapshots": "n INTEGER, at REAL, machine TEXT, state BLOB",
    "keys": "key TEXT PRIMARY KEY, value BLOB",
}
_INDEX = "CREATE UNIQUE INDEX states ON snapshots (n, machine)"
_LONGEST_NAME = 60  # of what a file holds, in a message
_encode = msgspec.msgpack.Encoder().encode


def checksum(*values: Any) -> int:
    """Return the CRC-32 of the values of a row, as msgpack."""
    return crc32(_encode(values))


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a database, as a file that somebody else may have made; it loads no extensions."""
    where = f"file:{quote(str(path))}{'?mode=ro' * read_only}"
    database = sqlite3.connect(where, uri=True, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA trusted_schema=OFF")
        configure = getattr(database, "setconfig", None)  # from Python 3.12 on
        if configure is not None:
            configure(getattr(sqlite3, "SQLITE_DBCONFIG_DEFENSIVE"), True)  # noqa: B009
    except BaseException:
        database.close()
        raise
    return database


def stranger(database: sqlite3.Connection) -> str:
    """Return what a database holds that no journal has, in words; "": nothing. May be empty."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    last = "" if version == UPGRADED else ", sum INTEGER"
    own = {("table", each): f"CREATE TABLE {each} ({_COLUMNS[each]}{last})" for each in _COLUMNS}
    own[("index", "states")] = _INDEX
    for kind, name, text in database.execute("SELECT type, name, sql FROM sqlite_master"):
        made_by_sqlite = kind == "index" and text is None
        if own.get((kind, name)) != text and not made_by_sqlite:
            known = f"{'an' if kind == 'index' else 'a'} {kind}"
            known = f"another {kind}" if (kind, name) in own else known
            return f"{known} {str(name)[:_LONGEST_NAME]!r}"
    return ""


def create(database: sqlite3.Connection) -> None:
    """Make the tables in an empty database."""
    for table, columns in _COLUMNS.items():
        database.execute(f"CREATE TABLE {table} ({columns}, sum INTEGER)")
    database.execute(_INDEX)
    database.execute(f"PRAGMA user_version={FORMAT}")


def put(
    database: sqlite3.Connection,
    table: str,
    rows: Iterable[tuple[Any, ...]],
    *,
    replace: bool = False,
) -> None:
    """Write rows, each with its checksum; `replace`: there may be rows with these keys."""
    verb = "REPLACE" if replace else "INSERT"
    marks = ", ".join("?" for _ in range(_COLUMNS[table].count(",") + 2))
    summed = ((*row, checksum(*row)) for row in rows)
    database.executemany(f"{verb} INTO {table} VALUES ({marks})", summed)


def upgrade(database: sqlite3.Connection) -> None:
    """Add the checksums to a database of format 2; part of the caller's transaction."""
    if database.execute("PRAGMA user_version").fetchone()[0] != UPGRADED:
        return
    database.create_function("checksum", -1, checksum, deterministic=True)
    for table, columns in _COLUMNS.items():
        names = ", ".join(column.split()[0] for column in columns.split(", "))
        database.execute(f"ALTER TABLE {table} ADD COLUMN sum INTEGER")
        database.execute(f"UPDATE {table} SET sum = checksum({names})")  # noqa: S608
    database.execute(f"PRAGMA user_version={FORMAT}")


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
                put(database, "events", batch.events)
                if batch.states:
                    database.execute("DELETE FROM snapshots WHERE n = ?", batch.states[0][:1])
                    put(database, "snapshots", batch.states)
                gone = [(key,) for key, value in batch.keys.items() if value is None]
                kept = [pair for pair in batch.keys.items() if pair[1] is not None]
                database.executemany("DELETE FROM keys WHERE key = ?", gone)
                put(database, "keys", kept, replace=True)
                if batch.url:
                    own = "SELECT * FROM terms WHERE term = ?"
                    *row, _url, _sum = database.execute(own, (self._term,)).fetchone()
                    put(database, "terms", [(*row, batch.url)], replace=True)

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
        database = self._open = connect(self._path)
        database.execute("PRAGMA synchronous=OFF")  # for an empty file
        _log_ahead(database)
        with _transaction(database):
            create(database)
            about = head.run_id, msgspec.json.encode(head.argv).decode(), head.cwd
            put(database, "about", [about])
            _begin_term(database, head)
        return database

    def _go_on(self, head: Head) -> sqlite3.Connection:
        """Open the file of an earlier driver; raises `TakenOverError` if it is not as it was."""
        if not self._path.is_file():
            raise FileNotFoundError(f"there is no journal {self._path}")
        database = self._open = connect(self._path)
        if what := stranger(database):
            raise sqlite3.DatabaseError(f"the file holds {what}, which no journal has")
        _log_ahead(database)
        with _transaction(database):
            newest = "SELECT (SELECT max(term) FROM terms), (SELECT max(n) FROM events)"
            term, n = database.execute(newest).fetchone()
            if term >= head.term or (n or 0) > head.n:
                raise self._taken_over()
            upgrade(database)
            _begin_term(database, head)
        return database

    def _own(self) -> sqlite3.Connection:
        """Open the file that this driver has written to; `write` looks whether it is still ours."""
        if not self._path.is_file():
            raise FileNotFoundError(f"there is no journal {self._path}")
        database = self._open = connect(self._path)
        _log_ahead(database)
        return database

    def _taken_over(self) -> TakenOverError:
        newest = "SELECT term, host, pid FROM terms ORDER BY term DESC LIMIT 1"
        with contextlib.closing(connect(self._path)) as database:
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
    put(database, "terms", [row])


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


SUFFIX, INDEX_SUFFIX = "-wal", "-shm"
_HEADER = struct.Struct(">IIIIIIII")  # magic, version, page size, number, two salts, two sums
_FRAME = struct.Struct(">IIIIII")  # page, pages after a commit, two salts, two sums
_LOG_INDEX = struct.Struct("=16xI12x8s8x")  # frames, salts; of this machine's byte order
_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}  # and the byte order of the sums
_MASK = (1 << 32) - 1
_TRIES = 3  # at a log that a driver begins anew in the same moment


class _Log(NamedTuple):
    """A log whose header is whole."""

    content: bytes
    salts: bytes
    frame: int  # bytes of a frame, with its page
    order: str  # of the bytes in the sums
    sums: tuple[int, int]  # of the header

    @property
    def frames(self) -> range:
        """The places of all whole frames, also of those that are a rest of an earlier log."""
        return range(_HEADER.size, len(self.content) - self.frame + 1, self.frame)

    def owns(self, at: int) -> bool:
        """Return whether a frame is of this log; one of its salts may be damaged.

        The salts of two logs that follow each other both differ.
        """
        first, second = self.content[at + 8 : at + 12], self.content[at + 12 : at + 16]
        return first == self.salts[:4] or second == self.salts[4:]


def log_damage(path: Path, *, indexed: bool = False) -> str:
    """Return what is wrong with the log beside this database, "" if nothing is.

    `indexed`: SQLite has read the log just now, and its index says how far: nothing is added up if
    that is all. No connection of this process may be open then, since its locks would be lost.
    Raises OSError where the log cannot be read. A log that is being written may be read.
    """
    place = path.with_name(path.name + SUFFIX)
    for _ in range(_TRIES):
        content = _read_log(place)
        log = _header_of_log(content) if content else None
        if log is None or (indexed and _is_indexed(path, log)):
            return ""
        found = log if isinstance(log, str) else _first_change(log)
        if not found or _read_log(place, _HEADER.size) == content[: _HEADER.size]:
            return found
    return ""


def _read_log(place: Path, size: int = -1) -> bytes:
    """Return the bytes of a file from its beginning; none if it is not there."""
    try:
        with place.open("rb") as file:
            return file.read(size)
    except FileNotFoundError:
        return b""


def _header_of_log(content: bytes) -> _Log | str:
    """Return the log with these bytes, or what is wrong with its header."""
    order = _MAGIC.get(int.from_bytes(content[:4], "big"))
    if len(content) < _HEADER.size or order is None:
        return "its write-ahead log has no header"
    _magic, _version, page, *_salts, first, second = _HEADER.unpack_from(content)
    sums = _sum(order, content[: _HEADER.size - 8], (0, 0))
    if sums != (first, second):
        return "the header of its write-ahead log has changed since it was written"
    return _Log(content, content[16:24], _FRAME.size + page, order, sums)


def _is_indexed(path: Path, log: _Log | str) -> bool:
    """Return whether SQLite has found all frames of this log whole."""
    index = _read_log(path.with_name(path.name + INDEX_SUFFIX), _LOG_INDEX.size)
    if isinstance(log, str) or len(index) < _LOG_INDEX.size:
        return False
    return _LOG_INDEX.unpack(index) == (len(log.frames), log.salts)


def _first_change(log: _Log) -> str:
    """Return where the log has changed since it was written, "" if it may just end there."""
    content, sums = log.content, log.sums
    for at in log.frames:
        *_fields, first, second = _FRAME.unpack_from(content, at)
        sums = _sum(log.order, content[at : at + 8], sums)
        sums = _sum(log.order, content[at + _FRAME.size : at + log.frame], sums)
        if content[at + 8 : at + 16] == log.salts and sums == (first, second):
            continue
        end = at + log.frame
        is_last = end == len(content) and log.owns(at)
        if is_last or any(log.owns(later) for later in log.frames if later >= end):
            return f"its write-ahead log has changed between the bytes {at} and {end}"
        break
    return ""


def _sum(order: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    """Return SQLite's checksum of data, which goes on from that of what is before."""
    first, second = sums
    for left, right in struct.iter_unpack(f"{order}II", data):
        first = (first + left + second) & _MASK
        second = (second + right + first) & _MASK
    return first, second
