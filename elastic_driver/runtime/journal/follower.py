"""Copies the journal of a run from etcd into a local database, from which a driver goes on.

A standby does so a few times a second, so that it has little left to copy when it takes over. A
local database that already has the beginning of the same run is gone on with; any other is made
anew from the newest snapshot.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from elastic_driver.errors import UsageError
from elastic_driver.runtime.journal import etcd, tables
from elastic_driver.runtime.journal.etcd import EtcdClient, EtcdError, KeyValue
from elastic_driver.runtime.journal.mirror import FORMAT, WHOLE, About, Ended
from elastic_driver.runtime.journal.store import Row, drop_old
from elastic_driver.runtime.journal.tenure import DriverKey, RunKeys, decode_key
from rendezvous.auth import parse_credentials, write_token_file
from rendezvous.tls import certificate_in
from rendezvous.wire import UNREADABLE

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
