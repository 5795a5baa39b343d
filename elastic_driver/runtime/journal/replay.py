"""Reads a journal: replays it through the pure machines, and makes the run for the next driver.

The same events at the same times give the same decisions. Each snapshot on the way is compared with
the state that the replay has come to, so a replay that differs from the run is reported. Reading
changes nothing, and is possible while the driver writes. For a next driver, the replay begins at
the newest snapshot, so it is short however old the job is.
"""

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from elastic_driver.errors import UsageError
from elastic_driver.job.decisions import EndJob
from elastic_driver.job.job import Job
from elastic_driver.kernel.kernel import Machines
from elastic_driver.kernel.tables import Snapshots
from elastic_driver.runtime.journal.journal_file import (
    FORMAT,
    UPGRADED,
    checksum,
    connect,
    log_damage,
    stranger,
)
from elastic_driver.runtime.machines import ENDS, MACHINES, PASSING, decode_event
from elastic_driver.runtime.mailbox import collector_paused
from elastic_driver.settings import Settings

_KINDS = {each.name: each.kind for each in MACHINES.journalled if each.kind is not None}
_LATER = "SELECT * FROM events WHERE n > ? AND n <= ? ORDER BY n"
_STATES = "SELECT * FROM snapshots WHERE n = ?"
NEWEST = 2**62  # larger than any event's number
MEMORY = "memory"  # the name under which a snapshot keeps the executor's memory; it is no machine


class JournalError(UsageError):
    """A file that is no journal, is damaged, or is of another version."""


class NotBegunError(JournalError):
    """A journal without a job: its driver died in the moment in which it made the file."""


class Term(NamedTuple):
    """One of the drivers that have written a journal, one after the other."""

    term: int  # 1, 2, 3, …
    n: int  # the last event before its own
    at: float  # machine time of its beginning
    unix: float  # the same in unix seconds
    unix_offset: float  # unix seconds minus machine time
    host: str
    pid: int
    url: str


class Step(NamedTuple):
    """An event, and what its machine decided."""

    n: int
    at: float  # machine time (`runtime.mailbox`)
    machine: str
    event: Any
    decisions: list[Any]  # each knows `n` as its cause


def refuse_damage(path: Path, *, indexed: bool = False) -> None:
    """Raise `JournalError` if events are missing because the log behind them has changed.

    `indexed` as for `log_damage`.
    """
    try:
        found = log_damage(path, indexed=indexed)
    except OSError as error:
        found = f"its write-ahead log cannot be read: {error.strerror}"
    if found:
        raise JournalError(f"{path}: the journal is damaged: {found}")


class Replay:
    """The replay of one journal; raises `JournalError` for a file that is none.

    `may_be_torn`: the machine has lost power since, so the end of the journal may be missing.
    """

    def __init__(self, path: Path, *, may_be_torn: bool = False) -> None:
        if not path.is_file():
            raise JournalError(f"there is no journal {path}")
        self.path, self._may_be_torn = path, may_be_torn
        self._run = Machines()
        self.machines: dict[str, Any] = self._run.machines  # as they were after the last step
        self.now = 0.0  # machine time of the last step
        self.first = 0  # the event before the first step
        self.memory = b""  # of the executor, at the newest snapshot that was passed
        try:
            self._database = connect(path, read_only=True)
        except sqlite3.Error as error:
            raise JournalError(f"{path}: the journal cannot be read: {error}") from error
        try:
            self._read_head()
        except BaseException:
            self.close()
            raise

    def _read_head(self) -> None:
        """Read what a journal has once, and check its format."""
        (found,) = self._rows("PRAGMA user_version")[0]
        if found == 0:
            self._refuse_damage()
            raise NotBegunError(f"{self.path}: the journal is empty")
        columns = [name for _id, name, *_ in self._rows("PRAGMA table_info(events)")]
        self._has_sums = "sum" in columns
        if found not in (FORMAT, UPGRADED):
            hint = "use the version of elastic-driver that wrote it"
            raise JournalError(
                f"{self.path}: a journal of format {found}, only {FORMAT} can be read; {hint}"
            )
        if what := self._stranger():
            raise JournalError(f"{self.path}: the file holds {what}, which no journal has")
        if found == FORMAT and columns and not self._has_sums:
            raise JournalError(f"{self.path}: the journal is damaged: it has no checksums")
        about = self._sound("about", self._rows("SELECT * FROM about"))
        terms = self._sound("term", self._rows("SELECT * FROM terms ORDER BY term"))
        self.terms = tuple(map(Term._make, terms))  # the newest driver last
        self._snapshots = [n for (n,) in self._rows("SELECT DISTINCT n FROM snapshots ORDER BY n")]
        if not about or not self.terms or not self._snapshots:
            self._refuse_damage()
            raise NotBegunError(f"{self.path}: the journal is empty")
        self.run_id: str = about[0][0]
        self.argv: tuple[str, ...] = tuple(json.loads(about[0][1]))  # of the first driver
        self.cwd: str = about[0][2]
        self.began = self.terms[0].at

    def unix(self, at: float) -> float:
        """Return a machine time as unix seconds."""
        # A driver that resumes begins at the time of the last event before its own.
        of = next((term for term in reversed(self.terms) if term.at < at), self.terms[0])
        return at + of.unix_offset

    def keys(self) -> dict[str, bytes]:
        """Return the keys of users in the driver's store, with their values."""
        return dict(self._sound("key", self._rows("SELECT * FROM keys ORDER BY key")))

    def steps(self, until: int = NEWEST, *, from_newest: bool = False) -> Iterator[Step]:
        """Yield every event up to this number, from the oldest snapshot on, or from the newest.

        Raises `JournalError` at the first one that is damaged. Whether events are missing at the
        end is looked at only if all are read.
        """
        first, *later = self._snapshots[-1:] if from_newest else self._snapshots
        self.first = first
        if until < first:
            raise JournalError(f"{self.path}: the journal begins after event {first}")
        self._take_states(first)
        for row in self._rows(_LATER, first, until):
            ((n, at, name, data),) = self._sound("event", [row])
            while later and later[0] < n:
                self._take_states(later.pop(0))
            try:
                event = decode_event(data)
                decisions = self._run.handle(n, at, name, event)
            except (ValueError, LookupError) as error:
                raise JournalError(self.refusal(f"event {n}", str(error))) from error
            if any(isinstance(decision, ENDS) for decision in decisions):
                self._run.end(name)
            self.now = at
            yield Step(n, at, name, event, decisions)
        if until == NEWEST and not from_newest:
            self._refuse_damage()

    @property
    def job(self) -> Job:
        """The job after the last step."""
        job: Job = self.machines["job"]
        return job

    def refusal(self, what: str, problem: str) -> str:
        """Return a sentence about something that cannot be read, though its checksum is right."""
        if not self._has_sums:
            return f"{self.path}: {what} is damaged: {problem}"
        return (
            f"{self.path}: {what} is whole, but was written by another version of elastic-driver "
            f"({problem}); use the version that wrote it"
        )

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _refuse_damage(self) -> None:
        if not self._may_be_torn:
            refuse_damage(self.path)

    def _take_states(self, n: int) -> None:
        """Restore the machines that begin at this snapshot; compare the others with it."""
        rows = self._sound("snapshot", self._rows(_STATES, n))
        for _n, _at, name, state in rows:
            if name == MEMORY:
                self.memory = state
            elif name not in self.machines:
                found: Any = _KINDS[name].restored(state)
                self._run.begin(name, found)
            elif not _is_same(self.machines[name], state):
                why = f"{name} is another one after event {n} than it was in the run"
                raise JournalError(f"{self.path}: {why}; was another version running?")
        self.now = max(at for _n, at, _name, _state in rows)

    def _sound(self, what: str, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return rows without their checksums; raises `JournalError` if one is not as written."""
        if not self._has_sums:
            return [*rows]
        for *row, found in rows:
            if checksum(*row) != found:
                why = "its checksum is wrong, a disk or a program has changed it"
                raise JournalError(f"{self.path}: {what} {row[0]} is damaged: {why}")
        return [row[:-1] for row in rows]

    def _stranger(self) -> str:
        try:
            return stranger(self._database)
        except sqlite3.Error as error:
            raise JournalError(f"{self.path}: the journal cannot be read: {error}") from error

    def _rows(self, query: str, *values: int) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise JournalError(f"{self.path}: the journal cannot be read: {error}") from error


def _is_same(machine: Snapshots, state: bytes) -> bool:
    """Return whether a machine is in the state of a snapshot, perhaps of an older version."""
    now = machine.snapshot()
    return now == state or now == type(machine).restored(state).snapshot()


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """A run as its journal knows it, after the last event."""

    run_id: str
    argv: tuple[str, ...]  # the command line of `elasticrun`
    cwd: str  # its folder
    term: int  # of the last driver; the next one has the next number
    url: str  # of the last driver that was reachable; "": the next one may listen anywhere
    began: float  # unix seconds of the job's beginning
    unix_offset: float  # of the last driver: unix seconds minus machine time
    n: int  # the number of the last event
    at: float  # its machine time
    machines: dict[str, Any]  # by their names; without a node check, which does not go on
    memory: bytes = b""  # of the executor, at the newest snapshot
    keys: dict[str, bytes] = field(default_factory=dict)  # of users, in the driver's store
    since: tuple[Step, ...] = ()  # the events after that snapshot, with what was decided

    @property
    def job(self) -> Job:
        """The job after the last event."""
        job: Job = self.machines["job"]
        return job

    @property
    def settings(self) -> Settings:
        """The settings that the job has had from its beginning."""
        return self.job.settings

    @property
    def end(self) -> EndJob | None:
        """The job's end, if it was decided."""
        return self.job.ending.end

    @property
    def port(self) -> int:
        """The port at which agents and workers look for their driver; 0: any."""
        return urlsplit(self.url).port or 0


def load_run(path: Path, *, may_be_torn: bool = False, alone: bool = False) -> ResumedRun:
    """Return the run of this journal; raises `JournalError` for one that cannot go on.

    `may_be_torn`: the machine has lost power since, so the end of the journal may be missing.
    `alone`: this process has the file open nowhere else, so its log is checked faster.
    """
    with collector_paused():
        run = _load(path, may_be_torn)
    if not may_be_torn:
        refuse_damage(path, indexed=alone)
    return run


def _load(path: Path, may_be_torn: bool) -> ResumedRun:
    with contextlib.closing(Replay(path, may_be_torn=may_be_torn)) as replay:
        try:
            return _newest(replay)
        except (JournalError, MemoryError):
            raise
        except Exception as error:  # a state that it does not know may break any machine
            if not may_be_torn:
                refuse_damage(path)  # events may be missing
            problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise JournalError(replay.refusal("the journal", problem)) from error


def _newest(replay: Replay) -> ResumedRun:
    since = tuple(replay.steps(from_newest=True))
    if "job" not in replay.machines:
        raise JournalError(f"{replay.path}: the job has not begun")
    last = replay.terms[-1]
    return ResumedRun(
        run_id=replay.run_id,
        argv=replay.argv,
        cwd=replay.cwd,
        term=last.term,
        url=next((term.url for term in reversed(replay.terms) if term.url), ""),
        began=replay.unix(replay.began),
        unix_offset=last.unix_offset,
        n=max(last.n, since[-1].n if since else replay.first),
        at=max(last.at, replay.now),
        machines={name: found for name, found in replay.machines.items() if name not in PASSING},
        memory=replay.memory,
        keys=replay.keys(),
        since=since,
    )
