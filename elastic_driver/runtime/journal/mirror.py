"""A journal in etcd, with a copy in the run's folder (docs/standby.md).

Each batch goes to etcd first, in transactions that the key of the driver guards, and then to the
local database. So the local one never has an event that etcd lacks, and a standby that takes over
knows everything that has acted. While etcd does not answer the writer waits, and nothing acts that
is not written.

Events of a batch are one value, cut into pieces where it is large; the last piece makes it whole.
The keys carry the number of the last event and a number of the batch. What comes before the last
snapshot but one is deleted.
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from elastic_driver.errors import ClusterError, TakenOverError
from elastic_driver.reachability import reachable_url
from elastic_driver.runtime.journal import etcd
from elastic_driver.runtime.journal.etcd import MAX_OPERATIONS, MAX_VALUE, EtcdClient, EtcdError
from elastic_driver.runtime.journal.store import Batch, Head, Row, SqliteStore
from elastic_driver.runtime.journal.tenure import RunKeys, Tenure
from rendezvous.auth import read_credentials
from rendezvous.tls import certificate_in

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
