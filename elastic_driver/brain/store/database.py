"""One statistics database, for SQLite and PostgreSQL alike, and what its failures mean.

A method is one transaction, and raises what SQLAlchemy raises: `described` says it in a line. An
object belongs to one thread at a time. Nothing waits for longer than a few seconds on a server that
answers. Times are unix seconds.
"""

import contextlib
import errno
import logging
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, delete, event, select, true
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from elastic_driver.brain.grants import Kind
from elastic_driver.brain.store import statements
from elastic_driver.brain.store.address import Address, safe_parameters
from elastic_driver.brain.store.records import (
    COARSER,
    KEPT,
    JobKey,
    Node,
    Record,
    Row,
    Series,
    Summary,
    expired_before,
)
from elastic_driver.brain.store.statements import (
    STEPS,
    NewerSchemaError,
    Step,
    figures,
    jobs,
    migrate,
    series,
)
from elastic_driver.options import without_password
from rendezvous.own_files import open_own

LOCK_S = 1.0  # for another process to end its transaction
POSTGRES: dict[str, Any] = {  # a server that is gone is noticed
    "connect_timeout": 5,
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 10,
    "application_name": "elasticrun",
    "options": "-c lock_timeout=5s -c statement_timeout=20s",
}


class Database:
    """A database; it is opened by the first call that needs it."""

    def __init__(self, address: Address, steps: Sequence[Step] = STEPS) -> None:
        self._address, self._steps = address, steps
        self._engine: Engine | None = None
        self._file: tuple[int, int] | None = None  # device and inode of the file, once it was open
        self.file_removed = False  # it has vanished or is another one; whoever tells it resets this
        self._series: dict[tuple[JobKey, Series], int] = {}  # their numbers

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        self._series.clear()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose()

    def open(self) -> None:
        """Open the database and renew its schema; raises NewerSchemaError for a newer one."""
        with self._transaction():
            pass

    # ---- writing ---------------------------------------------------------------------------

    def write(self, job: JobKey, rows: Sequence[Row]) -> None:
        """Write rows of the shortest period; a row that is there already is replaced."""
        with self._transaction() as connection:
            numbers = self._numbers(connection, job, {row.series for row in rows})
            keyed = [(numbers[row.series], row.t, row.values) for row in rows]
            statements.put(connection, COARSER[0][0], keyed)

    def roll_up(self, job: JobKey, until: float | None) -> None:
        """Make the rows of longer periods that end until then (None: all) from the shorter ones."""
        with self._transaction() as connection:
            if (number := statements.job_number(connection, job)) is not None:
                statements.roll_up(connection, number, until)

    def remember(self, job: JobKey, record: Record) -> None:
        """Write what is known of a job; what an earlier driver of it knew stays known."""
        with self._transaction() as connection:
            statements.remember(connection, job, record)

    def put_nodes(self, nodes: Sequence[Node]) -> None:
        """Write the newest figures of machines."""
        with self._transaction() as connection:
            statements.put_nodes(connection, nodes)

    def expire(self, now: float) -> None:
        """Delete what is too old, of all jobs, once it is in the rows of longer periods."""
        with self._transaction() as connection:
            for job in list(connection.scalars(statements.jobs_with_old_rows(now))):
                statements.roll_up(connection, job, None)
            for period in KEPT:
                old = (figures.c.period == period) & (figures.c.t < expired_before(now, period))
                connection.execute(delete(figures).where(old))
            empty = ~select(true()).where(figures.c.series == series.c.id).exists()
            forgotten = series.c.job.in_(
                select(jobs.c.id).where(jobs.c.began < now - max(KEPT.values()))
            )
            connection.execute(delete(series).where(empty & forgotten))
        self._series.clear()

    # ---- reading ---------------------------------------------------------------------------

    def rows(self, job: JobKey, period: int, since: float = 0.0) -> list[Row]:
        """Return the rows of a job from then on, in the order of series and time."""
        query = (
            select(
                *(series.c.subject, series.c.name, figures.c.t, figures.c.n),
                *(figures.c.least, figures.c.mean, figures.c.most),
            )
            .join_from(figures, series)
            .join(jobs)
            .where(jobs.c.run == job.run, jobs.c.began == job.began)
            .where(figures.c.period == period, figures.c.t >= since)
        )
        with self._transaction() as connection:
            found = [
                Row(Series(subject, name), t, Summary(*values))
                for subject, name, t, *values in connection.execute(query)
            ]
        return sorted(found)  # databases order text in ways of their own

    def similar(self, kind: Kind, most: int) -> list[Record]:
        """Return the newest finished jobs like this one that were measured, the newest first."""
        with self._transaction() as connection:
            return statements.similar(connection, kind, most)

    def records(self) -> list[tuple[JobKey, Record]]:
        """Return all jobs of which more than figures is known, in the order of their beginnings."""
        with self._transaction() as connection:
            return statements.all_records(connection)

    def nodes(self, now: float) -> list[Node]:
        """Return the machines whose figures are fresh now, by their names."""
        with self._transaction() as connection:
            return statements.fresh_nodes(connection, now)

    def known_nodes(self) -> list[Node]:
        """Return all machines, however old their figures are: not to place anything there."""
        with self._transaction() as connection:
            return statements.known_nodes(connection)

    # ---- connections -----------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """Return a transaction of an open database; after an error the connection is closed."""
        try:
            if self._file not in (None, self._file_now()):
                self.close()
                self.file_removed = True
            if self._engine is None:
                self._engine = self._connect()
            with self._engine.begin() as connection:
                yield connection
        except BaseException:
            self.close()
            raise

    def _connect(self) -> Engine:
        engine = self._make_engine()
        try:
            with engine.begin() as connection:
                migrate(connection, self._steps)
        except BaseException:
            engine.dispose()
            raise
        self._file = self._file_now()
        return engine

    def _make_engine(self) -> Engine:
        if self._address.url:
            # It would warn of a lost connection, and then raise, too.
            logging.getLogger("psycopg").addHandler(logging.NullHandler())
            import psycopg  # noqa: PLC0415 - the extra `postgres`

            url = make_url(self._address.url).set(drivername="postgresql+psycopg")
            safe = safe_parameters(self._address.url, psycopg.pq.version(), os.environ)
            arguments = POSTGRES | safe
            return create_engine(url, pool_size=1, max_overflow=0, connect_args=arguments)
        # Readable by its owner alone, as everything in the run's folder.
        os.close(open_own(self._address.file, os.O_RDWR | os.O_CREAT, 0o600))
        url = make_url("sqlite+pysqlite://").set(database=self._address.file)
        arguments = {"timeout": LOCK_S, "check_same_thread": False}
        engine = create_engine(url, pool_size=1, max_overflow=0, connect_args=arguments)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _file_now(self) -> tuple[int, int] | None:
        if not self._address.file:
            return None
        try:
            found = os.stat(self._address.file)
        except FileNotFoundError:
            return (0, 0)
        return found.st_dev, found.st_ino

    def _numbers(
        self, connection: Connection, job: JobKey, wanted: Iterable[Series]
    ) -> dict[Series, int]:
        """Return the numbers of series; new ones are made."""
        known = {each: self._series.get((job, each)) for each in wanted}
        if None in known.values():
            statements.insert_new(connection, jobs, [job._asdict()])
            number = statements.job_number(connection, job)
            new = sorted(each for each, found in known.items() if found is None)
            statements.insert_new(
                connection, series, [{"job": number, **each._asdict()} for each in new]
            )
            query = select(series.c.subject, series.c.name, series.c.id)
            for subject, name, found in connection.execute(query.where(series.c.job == number)):
                self._series[job, Series(subject, name)] = found
        return {each: self._series[job, each] for each in known}


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    """Set a connection up; raises PermissionError for a file that runs what somebody has written.

    No version of ours has a view or a trigger.
    """
    connection.isolation_level = None  # `_begin_sqlite` begins transactions
    connection.execute("PRAGMA trusted_schema = OFF")
    strange = "SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index')"
    for kind, name in connection.execute(strange):
        raise PermissionError(errno.EPERM, f"it holds a {kind} {name[:60]!r}, which is not ours")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


_CORRUPT = (11, 26)  # SQLITE_CORRUPT and SQLITE_NOTADB; Python names them since 3.11
# What is said of a mistake that no waiting mends: by a server, by its client, by a resolver.
_MISTAKES = re.compile(
    "authentication failed|no password supplied|does not exist|no pg_hba.conf entry"
    "|permission denied|unable to open database file"
    r"|invalid connection option|invalid \w+ value"
    "|Name or service not known|No address associated|nodename nor servname"
)
# What libpq says of a server that has not proved itself, and what to do.
_TRUST = "give ?sslrootcert=FILE of its CA, or a Unix socket (?host=/var/run/postgresql)"
_UNPROVED = {
    "does not support SSL": f"it speaks no TLS; {_TRUST}; ?sslmode=disable trusts the network",
    "root certificate file": f"its certificate cannot be checked; {_TRUST}",
    "certificate verify failed": f"another CA has signed its certificate; {_TRUST}",
    "does not match host name": "its certificate is another host's; name the host as it does",
    "authentication method requirement|channel binding": "it does not prove that it knows the "
    "password (scram-sha-256); have the server ask that way, or write ?require_auth=METHOD",
}
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def is_final(error: BaseException) -> bool:
    """Return whether no later try can succeed."""
    return isinstance(error, NewerSchemaError)


def is_mistake(error: BaseException) -> bool:
    """Return whether the user has to mend something: the address, a password or a right."""
    too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    known = isinstance(error, _NO_FILE) or too_long or is_final(error)
    text = described(error)
    return known or _MISTAKES.search(text) is not None or text in _UNPROVED.values()


def is_bad_row(error: BaseException) -> bool:
    """Return whether the database refuses what was written, and would always do so."""
    return isinstance(error, DataError | IntegrityError)


def is_corrupt(error: BaseException) -> bool:
    """Return whether a file is no whole database of SQLite."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)  # since Python 3.11
    if code is not None:
        return code & 0xFF in _CORRUPT
    words = ("malformed", "not a database")
    return isinstance(cause, sqlite3.DatabaseError) and any(each in str(cause) for each in words)


def described(error: BaseException) -> str:
    """Return an error in a line, without statements and passwords."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    text = (getattr(cause, "strerror", None) or str(cause)).strip() or type(cause).__name__
    for words, meaning in _UNPROVED.items():
        if isinstance(error, DBAPIError) and re.search(words, text):
            return meaning
    # Of several addresses the last one; a hint stands behind a tab.
    lines = [line for line in text.splitlines() if not line.startswith("\t")]
    return without_password((lines or [text])[-1].strip())


def set_aside(file: str) -> str:
    """Rename a file that is corrupt, so that a new database can begin; return its new name."""
    new = f"{file}.corrupt"
    for end in ("-wal", "-shm"):
        Path(file + end).unlink(missing_ok=True)
    Path(file).replace(new)
    return new
