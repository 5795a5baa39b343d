"""Copies the journal of a run from etcd into a local database, from which a driver goes on.

A standby does so a few times a second, so that it has little left to copy when it takes over. A
local database that already has the beginning of the same run is gone on with; any other is made
anew from the newest snapshot.

A journal in etcd, with a copy in the run's folder (docs/standby.md).

Each batch goes to etcd first, in transactions that the key of the driver guards, and then to the
local database. So the local one never has an event that etcd lacks, and a standby that takes over
knows everything that has acted. While etcd does not answer the writer waits, and nothing acts that
is not written.

Events of a batch are one value, cut into pieces where it is large; the last piece makes it whole.
The keys carry the number of the last event and a number of the batch. What comes before the last
snapshot but one is deleted.
"""

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from elastic_driver.errors import ClusterError, TakenOverError, UsageError
from elastic_driver.reachability import reachable_url
from elastic_driver.runtime.journal import etcd
from elastic_driver.runtime.journal import journal_file as tables
from elastic_driver.runtime.journal.etcd import (
    MAX_OPERATIONS,
    MAX_VALUE,
    EtcdClient,
    EtcdError,
    KeyValue,
)
from elastic_driver.runtime.journal.journal_file import Batch, Head, Row, SqliteStore, drop_old
from elastic_driver.runtime.journal.tenure import DriverKey, RunKeys, Tenure, decode_key
from rendezvous.auth import parse_credentials, read_credentials, write_token_file
from rendezvous.tls import certificate_in
from rendezvous.wire import UNREADABLE

FORMAT = 2  # of the keys and values of a run in etcd
WHOLE = "-last"  # ends the key of the piece that makes a value whole
_AGAIN_S = 0.2  # between two attempts to write


class About(Struct, frozen=True):
    """The value of the key `about`: the run that a journal belongs to."""

    format: int
    run_id: str
    argv: tuple[str, ...]
    cwd: str
    began: float  # unix seconds; tells it from an earlier run of this name


class Ended(Struct, frozen=True):
    """The value of the key `end`: the job is over."""

    exit_code: int
    reason: str
    at: float  # unix seconds


def begin_anew(keys: RunKeys) -> list[etcd.Operation]:
    """Return the operations that delete what an earlier run of this name has left."""
    prefixes = (keys.events, keys.snapshots, keys.users)
    return [
        etcd.delete(keys.term(2), etcd.end_of(keys.terms)),
        *(etcd.delete(key) for key in (keys.about, keys.token, keys.tls, keys.end)),
        *(etcd.delete(prefix, etcd.end_of(prefix)) for prefix in prefixes),
    ]


class EtcdStore:
    """A journal in etcd and in the run's folder (a `JournalStore`)."""

    must_be_written = True

    def __init__(
        self,
        client: EtcdClient,
        tenure: Tenure,
        local: SqliteStore,
        token_file: Path,
        say: Callable[[str], None],
    ) -> None:
        """Write as the driver that `tenure` says; `say` shows a line to the user."""
        self.trouble = ""  # etcd does not answer, for this reason; read by the driver's thread
        self.on_taken_over: Callable[[TakenOverError], None] = lambda _error: None
        self._end: Ended | None = None
        self._client, self._tenure, self._local = client, tenure, local
        self._token_file, self._say = token_file, say
        self._stopping = threading.Event()
        self._batches = 0  # written by this driver
        self._snapshot: int | None = None  # the newest one of this driver is after this event
        self._has_local = True

    def start(self) -> None:
        """Keep the key of the driver, which has been taken, from now on until `close`."""
        self._tenure.start(self._lost)

    def _lost(self, error: TakenOverError) -> None:
        self.on_taken_over(error)

    # ---- a store -------------------------------------------------------------------------

    def open(self, head: Head) -> None:
        """See `JournalStore.open`."""
        tenure, keys = self._tenure, self._tenure.keys
        credentials, certificate = self._credentials()
        changed = tenure.say(n=head.n, at=head.at, unix_offset=head.unix_offset)
        operations = [etcd.put(keys.token, credentials), *certificate, *changed]
        if head.term == 1:
            about = About(FORMAT, head.run_id, head.argv, head.cwd, tenure.own.unix)
            operations.append(etcd.put(keys.about, msgspec.json.encode(about)))
        self._transact(operations)
        self._copy(partial(self._local.open, head))

    def _credentials(self) -> tuple[bytes, list[etcd.Operation]]:
        """Return the lines of the token file, and how the run's certificate is written, if any."""
        files = certificate_in(self._token_file.parent)
        credentials = read_credentials(self._token_file).text.encode()
        if not files.exist:
            return credentials, []
        return credentials, [etcd.put(self._tenure.keys.tls, files.text().encode())]

    def write(self, batches: Sequence[Batch]) -> None:
        """See `JournalStore.write`; returns only when etcd has the batches."""
        for group in _groups(batches):
            self._write_group(group)
        self._write_keys({key: value for batch in batches for key, value in batch.keys.items()})
        if urls := [batch.url for batch in batches if batch.url]:
            self._transact(self._tenure.say(url=urls[-1], seen=self._seen(urls[-1])))
        for exit_code, reason in filter(None, (batch.end for batch in batches)):
            self._end = Ended(exit_code, reason, time.time())
        self._copy(partial(self._local.write, batches))

    def tidy(self, batches: Sequence[Batch]) -> None:
        """See `JournalStore.tidy`."""
        self._copy(partial(self._local.tidy, batches))

    def stop(self) -> None:
        """End a `write` that waits for etcd, and give the run back; called by any thread."""
        self._stopping.set()
        with contextlib.suppress(ClusterError):
            self._tenure.stop(release=True)

    def close(self) -> None:
        """See `JournalStore.close`; a job that is over leaves its result in etcd."""
        keys = self._tenure.keys
        if self._end is not None:
            self._transact(
                [
                    etcd.put(keys.end, msgspec.json.encode(self._end)),
                    *(etcd.delete(key) for key in (keys.token, keys.tls, keys.driver)),
                    *(
                        etcd.delete(all_, etcd.end_of(all_))
                        for all_ in (keys.events, keys.snapshots, keys.users)
                    ),
                ]
            )
        self._copy(self._local.close)

    def free(self) -> None:
        """See `JournalStore.free`."""
        self.stop()
        self._client.close()
        self._local.free()

    def _seen(self, url: str) -> str:
        """Return our address as the hosts of etcd see it."""
        with contextlib.suppress(OSError):  # the name of that host is not known any more
            return reachable_url(url, *self._client.access.endpoints[0])
        return url

    def _copy(self, write: Callable[[], None]) -> None:
        """Write to the local database; a disk that fails costs the copy, and not the journal."""
        try:
            if self._has_local:
                write()
        except (OSError, sqlite3.Error) as error:
            self._has_local = False
            self._say(f"the local copy of the journal has failed ({error}); etcd has all of it")

    # ---- etcd ----------------------------------------------------------------------------

    def _write_group(self, group: "_Group") -> None:
        keys = self._tenure.keys
        self._batches += 1
        for prefix, rows in ((keys.events, group.events), (keys.snapshots, group.states)):
            if not rows:
                continue
            name = f"{prefix}{rows[-1][0]:020d}/{self._tenure.own.term:06d}-{self._batches:012d}/"
            *pieces, last = _pieces(rows)
            for number, piece in enumerate(pieces):
                self._transact([etcd.put(f"{name}{number:04d}", piece)])
            whole = [etcd.put(f"{name}{len(pieces):04d}{WHOLE}", last)]
            if rows is group.states:
                whole += self._drop_old(rows[-1][0])
            self._transact(whole)

    def _write_keys(self, values: Mapping[str, bytes | None]) -> None:
        """Write or delete keys of users; one that is too large for etcd is not kept."""
        operations: list[etcd.Operation] = []
        size = 0
        for key, value in values.items():
            name = self._tenure.keys.users + key
            if value is not None and len(value) > MAX_VALUE:
                self._say(f"the key {key[:200]!r} is not kept in etcd: it is larger than 1 MiB")
                value = None  # noqa: PLW2901 - as if it were gone
            size += len(value or b"")
            if operations and (size > MAX_VALUE or len(operations) == MAX_OPERATIONS):
                self._transact(operations)
                operations, size = [], len(value or b"")
            operations.append(etcd.delete(name) if value is None else etcd.put(name, value))
        if operations:
            self._transact(operations)

    def _drop_old(self, newest: int) -> Iterator[etcd.Operation]:
        """Delete what comes before the snapshot before this one."""
        keys, kept = self._tenure.keys, self._snapshot
        self._snapshot = newest
        if kept is not None:
            yield etcd.delete(keys.events, keys.events_after(kept))
            yield etcd.delete(keys.snapshots, keys.snapshots_after(kept - 1))

    def _transact(self, operations: Sequence[etcd.Operation]) -> None:
        """Carry out a transaction as the driver; wait for etcd as long as it takes.

        Raises `TakenOverError` if another driver has the run.
        """
        while True:
            try:
                if self._client.transact([self._tenure.guard()], operations).succeeded:
                    self.trouble = ""
                    return
                self._tenure.regain()
            except EtcdError as error:
                self.trouble = str(error)
                if self._stopping.wait(_AGAIN_S):
                    raise OSError(self.trouble) from error


class _Group(Struct, frozen=True):
    """Events, and the snapshots after the last one of them."""

    events: list[Row]
    states: list[Row]


def _groups(batches: Iterable[Batch]) -> Iterator[_Group]:
    """Join batches up to the next snapshot: no value has events from before and after it."""
    events: list[Row] = []
    for batch in batches:
        events = [*events, *batch.events]
        if batch.states:
            yield _Group(events, batch.states)
            events = []
    if events:
        yield _Group(events, [])


def _pieces(rows: Sequence[Row]) -> list[bytes]:
    value = msgspec.msgpack.encode(rows)
    return [value[at : at + MAX_VALUE] for at in range(0, len(value), MAX_VALUE)]


_TERMS = "SELECT term, n, at, host, pid FROM terms ORDER BY term"
T = TypeVar("T")


class RunState(NamedTuple):
    """A run as etcd knows it."""

    about: About
    term: int  # the newest
    driver: DriverKey | None  # None: no driver has the run
    end: Ended | None  # None: the job goes on
    is_copied: bool  # the local database has all of its events


class Follower(contextlib.AbstractContextManager["Follower"]):
    """Copies one run; one thread at a time uses it.

    All methods may raise EtcdError if etcd does not answer, and OSError or sqlite3.Error if the
    local files cannot be written.
    """

    def __init__(self, client: EtcdClient, run_id: str, journal: Path, token_file: Path) -> None:
        """Copy nothing yet; the folder of the files exists."""
        self._client, self._keys = client, RunKeys(run_id)
        self._path, self._token_file = journal, token_file
        self._database: sqlite3.Connection | None = None  # a copy of the run, or None
        self._n = self._snapshot = -1  # the last event and the newest snapshot there
        self._terms: list[tuple[object, ...]] = []  # as they are there
        self._token = b""

    def copy(self) -> RunState | None:
        """Copy what is new; return the state of the run, None if it has not begun.

        The state and the events are of one moment: without a driver, nothing is missing.
        """
        n = self._n
        about, driver, end, token, tls, terms, snapshots, events = self._find()
        if not about:
            return None
        state = RunState(
            _decode(about[0], About),
            max((decode_key(each).term for each in terms), default=0),
            decode_key(driver[0]) if driver else None,
            _decode(end[0], Ended) if end else None,
            is_copied=False,
        )
        if state.about.format != FORMAT:
            hint = "use the version of elastic-driver that began it"
            raise UsageError(
                f"the journal of {state.about.run_id} in etcd has format {state.about.format}, "
                f"only {FORMAT} can be read; {hint}"
            )
        whole = [name for name in map(_name, snapshots) if name.endswith(WHOLE)]
        if state.end is not None or not whole:
            return state
        drivers = [decode_key(each) for each in terms]
        if not self._goes_on(drivers, kept=_number(whole[0])):
            self._make_anew(state.about, drivers, whole[-1])
        if self._n != n:
            return self.copy()
        self._append(drivers, _rows(events))
        if _number(whole[-1]) > self._snapshot:
            self._copy_snapshot(whole[-1])
        if token and token[0].value != self._token:
            self._write_token(token[0].value, tls[0].value if tls else None)
        if state.driver is None:
            self._copy_keys()
        return state._replace(is_copied=True)

    def _find(self) -> Iterator[tuple[etcd.KeyValue, ...]]:
        """Return the keys of the run, as they are at one moment, in the order of the questions."""
        keys = self._keys
        operations = [
            etcd.find(keys.about),
            etcd.find(keys.driver),
            etcd.find(keys.end),
            etcd.find(keys.token),
            etcd.find(keys.tls),
            etcd.find(keys.terms, etcd.end_of(keys.terms)),
            etcd.find(keys.snapshots, etcd.end_of(keys.snapshots), keys_only=True),
            etcd.find(keys.events_after(self._n), etcd.end_of(keys.events)),
        ]
        return map(self._client.transact((), operations).found, range(len(operations)))

    def _write_token(self, token: bytes, certificate: bytes | None) -> None:
        """Write the driver's token, and the certificate by which clients know it."""
        self._token = token
        write_token_file(self._token_file, *parse_credentials(token.decode()))
        if certificate is not None:
            certificate_in(self._token_file.parent).write(certificate.decode())

    def close(self) -> None:
        """Close the local database, and the client."""
        self._client.close()
        self._forget()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the local database --------------------------------------------------------------

    def _forget(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
        self._n, self._snapshot, self._terms = -1, -1, []

    def _goes_on(self, drivers: Sequence[DriverKey], kept: int) -> bool:
        """Return whether the local database has this run up to the events that etcd still has."""
        if self._database is None:
            self._open()
        if self._database is None:
            return False
        known = {(d.term, d.n, d.at, d.host, d.pid) for d in drivers}
        return self._n >= kept and set(self._database.execute(_TERMS)) <= known

    def _open(self) -> None:
        """Open a database that an earlier driver or standby has left here."""
        if not self._path.is_file():
            return
        database = tables.connect(self._path)
        try:
            if tables.stranger(database):
                raise sqlite3.DatabaseError("it is no journal")
            (found,) = database.execute("PRAGMA user_version").fetchone()
            (n,) = database.execute("SELECT max(n) FROM events").fetchone()
            (snapshot,) = database.execute("SELECT max(n) FROM snapshots").fetchone()
        except sqlite3.Error:
            found = 0
        if found != tables.FORMAT or snapshot is None:
            database.close()
            return
        self._database, self._n, self._snapshot = database, max(n or 0, snapshot), snapshot

    def _make_anew(self, about: About, drivers: Iterable[DriverKey], snapshot: str) -> None:
        """Make a database that begins with this snapshot."""
        self._forget()
        states = self._read(snapshot)
        if not states:
            return  # it was deleted meanwhile, because newer ones were written
        for suffix in ("", "-wal", "-shm", "-journal"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, 0o600))
        self._database = tables.connect(self._path)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        argv = msgspec.json.encode(about.argv).decode()
        with self._database as database:
            database.execute("BEGIN")
            tables.create(database)
            tables.put(database, "about", [(about.run_id, argv, about.cwd)])
            tables.put(database, "terms", map(_term, drivers))
            tables.put(database, "snapshots", states)
        self._n = self._snapshot = states[0][0]

    def _append(self, drivers: Iterable[DriverKey], rows: Sequence[Row]) -> None:
        new = [row for row in rows if row[0] > self._n]
        terms = list(map(_term, drivers))
        if self._database is None or (not new and terms == self._terms):
            return
        with self._database as database:
            database.execute("BEGIN")
            tables.put(database, "terms", terms, replace=True)
            tables.put(database, "events", new, replace=True)
        self._terms, self._n = terms, new[-1][0] if new else self._n

    def _copy_snapshot(self, name: str) -> None:
        states = self._read(name)
        if self._database is not None and states and states[0][0] <= self._n:
            with self._database as database:
                database.execute("BEGIN")
                tables.put(database, "snapshots", states, replace=True)
            self._snapshot = states[0][0]
            drop_old(self._database, self._snapshot)

    def _copy_keys(self) -> None:
        """Copy the keys of users; nobody writes them while there is no driver."""
        prefix = self._keys.users
        found = self._client.range(prefix, etcd.end_of(prefix))
        if self._database is not None:
            with self._database as database:
                database.execute("BEGIN")
                database.execute("DELETE FROM keys")
                rows = ((_name(each).removeprefix(prefix), each.value) for each in found)
                tables.put(database, "keys", rows)

    def _read(self, name: str) -> Sequence[Row]:
        """Return the states of a snapshot, by the name of its last piece."""
        return _rows(self._client.range(name.rpartition("/")[0] + "/", name + "\0"))


def _term(driver: DriverKey) -> tuple[object, ...]:
    who = driver.host, driver.pid, driver.url
    return driver.term, driver.n, driver.at, driver.unix, driver.unix_offset, *who


def _name(found: KeyValue) -> str:
    return found.key.decode()


def _number(name: str) -> int:
    """Return the number of the last event in the name of a batch or a snapshot."""
    return int(name.rsplit("/", 3)[1])


def _rows(pieces: Iterable[KeyValue]) -> list[Row]:
    """Return the rows of all values that are whole."""
    return [row for value in _values(pieces) for row in _decode_rows(value)]


def _values(pieces: Iterable[KeyValue]) -> Iterator[bytes]:
    value, of = b"", ""
    for piece in pieces:
        name = _name(piece)
        prefix = name.rpartition("/")[0]
        value = value + piece.value if prefix == of else piece.value
        of = prefix
        if name.endswith(WHOLE):
            yield value


def _decode_rows(value: bytes) -> list[Row]:
    try:
        return msgspec.msgpack.decode(value, type=list[Row])
    except UNREADABLE as error:
        raise EtcdError(f"the journal in etcd is damaged: {error}") from error


def _decode(found: KeyValue, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(found.value, type=kind)
    except UNREADABLE as error:
        raise EtcdError(f"the key {_name(found)} in etcd is not of this version") from error
