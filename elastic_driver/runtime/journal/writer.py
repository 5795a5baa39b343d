"""Writes the journal of a run, by a thread of its own, to a `JournalStore`.

The driver's thread notes each event, and waits until it is written before the decisions that follow
from it act. "Written" means handed to the kernel: the journal survives the driver's death at any
moment, and loses the last moments when the host loses power. A disk that does not answer delays
nothing for long: after `WAIT_S` the driver acts without waiting, until the writer has caught up.
Only answers that hand out data wait longer, `DATA_WAIT_S`. While a journal fails (full disk,
read-only, too far behind) the job goes on without it; every few seconds it is tried to begin the
journal anew, with the states of that moment (docs/journal.md).

The kind of file system that holds a journal: one on a network may hang as long as its server.
"""

import collections
import contextlib
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import NamedTuple

from elastic_driver.errors import ClusterError, TakenOverError
from elastic_driver.job.decisions import Announce
from elastic_driver.runtime.journal.journal_file import Batch, Head, JournalStore, Row, SqliteStore
from elastic_driver.runtime.library_logs import described
from elastic_driver.runtime.machines import encode_event
from elastic_driver.words import host_log_events as host_log

_MOUNTS = Path("/proc/self/mountinfo")
_OF_A_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "fuse.")


def network_file_system(folder: Path) -> str:
    """Return the kind (`nfs4`) if this folder is on another machine; "" otherwise, or unknown."""
    with contextlib.suppress(OSError):
        kind = file_system(os.stat(folder).st_dev, _MOUNTS.read_text())
        return kind if kind.startswith(_OF_A_NETWORK) else ""
    return ""


def file_system(device: int, mounts: str) -> str:
    """Return the kind of the file system with this device number; proc(5), mountinfo."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        place, _, source = line.partition(" - ")
        if place.split()[2:3] == [number]:
            return source.split(" ", 1)[0]
    return ""


WAIT_S = 0.25  # for a write; a page cache takes far less than a millisecond
# The same, for an answer that hands out data: if it is lost, the next driver hands them out again.
DATA_WAIT_S = 10.0
UNREACHABLE_S = 2.0  # after which the user is told that a store which must be written is not
MAX_KEPT_KEYS = 16 * 1024 * 1024  # bytes of keys of users, with their values
MAX_BEHIND = 64 * 1024 * 1024  # bytes that wait for a disk
SNAPSHOT_BYTES = 256 * 1024  # of events between two snapshots, or …
SNAPSHOT_TIMES = 2  # … as many times the size of a snapshot, if that is more
AGAIN_S = 2.0  # from an error of the disk until it is tried again
_CLOSE_S = 5.0  # for the writer to end
OPEN_S = 10.0  # for the file of an earlier driver to be opened


class _Waiting(NamedTuple):
    """Something to do once a batch is written."""

    batch: int
    since: float
    wait: float  # seconds, the longest for a disk that does not answer
    act: Callable[[], None]


@dataclass
class Journal:
    """The journal of one run; methods without a remark belong to the driver's thread."""

    path: Path
    run_id: str
    _: KW_ONLY
    store: JournalStore | None = None  # None: the SQLite database at `path`
    clock: Callable[[], float] = time.monotonic  # seconds, for the waits here
    # Called by the writer's thread, once; afterwards `settle` and `then` raise the same error.
    on_taken_over: Callable[[TakenOverError], None] = lambda _error: None
    _noted: list[Row] = field(default_factory=list)  # not handed to the writer yet
    _states: list[Row] = field(default_factory=list)
    _url: str = ""
    _keys: dict[str, bytes | None] = field(default_factory=dict)
    _kept: dict[str, int] = field(default_factory=dict)  # bytes of each key with its value
    _kept_bytes: int = 0
    _size: int = 0  # bytes of both
    _since_snapshot: int = 0  # bytes of events
    _due_bytes: int = SNAPSHOT_BYTES
    _handed: int = 0  # batches
    _handed_bytes: int = 0
    _end: tuple[int, str] | None = None
    _late: bool = False  # the driver does not wait for the disk, or the user knows that it waits
    _late_from: float = 0.0  # when that began
    _held_since: float | None = None  # nothing may act since then
    _given_up: bool = False  # nothing is noted
    _again_at: float | None = None  # when it is tried to begin anew; None: never
    _tried: bool = False  # that is tried now, and nobody waits for it
    _serving_at: str = ""  # our address
    _on_the_way: dict[str, bytes | None] = field(default_factory=dict)  # keys, maybe not written

    def __post_init__(self) -> None:
        self._place = SqliteStore(self.path) if self.store is None else self.store
        self._head = Head(self.run_id)
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._moved = threading.Condition()
        # These are guarded by `_moved`.
        self._is_open = False
        self._written = self._written_bytes = 0  # batches and bytes
        self._failure = ""
        self._lasts = False  # the failure is not the disk's, and is not over with it
        self._taken_over: TakenOverError | None = None
        self._where = str(self.path)  # for the user; with its file system, if that is a network's
        self._waiting: collections.deque[_Waiting] = collections.deque()  # guarded by `_moved`
        self._writer = self._new_writer()

    def _new_writer(self) -> threading.Thread:
        return threading.Thread(target=self._write, name="journal", daemon=True)

    # ---- the driver's thread -------------------------------------------------------------

    def open(self, head: Head | None = None) -> None:
        """Begin to write; the first driver makes the journal anew. An error shows in `settle`."""
        self._head = head or self._head
        self._writer.start()

    def await_open(self) -> None:
        """Wait until this driver's term is written; raises ClusterError if that is impossible."""
        with self._moved:
            done = self._moved.wait_for(lambda: self._is_open or self._has_ended, OPEN_S)
            failure, taken_over = self._failure, self._taken_over
        if taken_over is not None:
            raise taken_over
        if failure or not done:
            slow = self._place.trouble or "the disk has not answered"
            why = failure or f"{slow} for {OPEN_S:g} s"
            hint = "make room or mend the disk, and resume again; the workers go on meanwhile"
            raise ClusterError(f"cannot go on with the journal {self.path}: {why}; {hint}")

    @property
    def snapshot_due(self) -> bool:
        """Return whether a snapshot is to be noted.

        Many events came since the last, so it bounds the replay; or a journal that has failed can
        begin anew with it.
        """
        if not self._given_up:
            return self._since_snapshot >= self._due_bytes
        due = self._again_at is not None and self.clock() >= self._again_at
        return due and not self._writer.is_alive()

    def note(self, n: int, at: float, machine: str, event: object) -> None:
        """Note an event with its number and time; `settle` or `flush` follows."""
        if not self._given_up:
            encoded = encode_event(event)
            self._noted.append((n, at, machine, encoded))
            self._size += len(encoded)
            self._since_snapshot += len(encoded)

    def snapshot(self, n: int, at: float, states: Mapping[str, bytes]) -> None:
        """Note the states of all machines after event `n`."""
        anew = self._given_up and self.snapshot_due
        if anew:
            self._begin_anew()
        if not self._given_up:
            self._states = [(n, at, machine, state) for machine, state in states.items()]
            size = sum(map(len, states.values()))
            self._size += size
            self._since_snapshot, self._due_bytes = 0, max(SNAPSHOT_BYTES, SNAPSHOT_TIMES * size)
            self._flush(anew=anew)

    def _begin_anew(self) -> None:
        """Have a new thread try it, with all that the last one may have lost."""
        with self._moved:
            self._failure, self._is_open = "", False
            self._written, self._written_bytes = self._handed, self._handed_bytes
        self._queue = queue.SimpleQueue()
        self._given_up, self._tried, self._again_at = False, True, None
        self._late, self._late_from = True, self.clock()
        self._url, self._keys = self._serving_at, self._on_the_way | self._keys
        self._noted, self._size = [], 0
        self._writer = self._new_writer()
        self._writer.start()

    def serves_at(self, url: str) -> None:
        """Note the address of this driver."""
        self._url = self._serving_at = url
        self.flush()

    def keep(self, values: Mapping[str, bytes | None]) -> list[Announce]:
        """Note keys of users for the next driver; return what the user has to know."""
        lost = ""
        for key, value in values.items():
            self._kept_bytes -= self._kept.pop(key, 0)
            size = len(key) + len(value or b"")
            fits = self._kept_bytes + size <= MAX_KEPT_KEYS
            if value is not None and fits:
                self._kept[key] = size
                self._kept_bytes += size
            elif value is not None:
                lost = key
            self._keys[key] = value if fits else None
            self._size += size
        if not lost:
            return []
        limit = f"the limit for keys that outlive the driver is {MAX_KEPT_KEYS >> 20} MiB"
        return [Announce(host_log.KeyNotKept(), f"{lost[:200]!r}: {limit}")]

    def job_ended(self, exit_code: int, reason: str) -> None:
        """Note that the job is over, and nobody has to go on with it."""
        self._end = exit_code, reason
        self.flush()

    def flush(self) -> None:
        """Hand what was noted to the writer, without waiting for it."""
        if not self._given_up:
            self._flush()

    def _flush(self, *, anew: bool = False) -> None:
        if self._noted or self._states or self._url or self._end or self._keys:
            with self._moved:
                written = self._written >= self._handed
            self._on_the_way = self._keys if written else self._on_the_way | self._keys
            self._handed += 1
            self._handed_bytes += self._size
            rows, end, keys = (self._noted, self._states), self._end, self._keys
            self._queue.put(Batch(self._handed, *rows, self._size, self._url, end, keys, anew))
            self._noted, self._states, self._size, self._url = [], [], 0, ""
            self._end, self._keys = None, {}

    @property
    def holds(self) -> bool:
        """Return whether nothing may act now: its store has to be written first, and it is not."""
        return not self._given_up and self._place.must_be_written and not self._is_settled

    def settle(self) -> list[Announce]:
        """Wait until everything noted is written; return what the user has to know.

        It waits at most `WAIT_S`, and not at all while an earlier wait was in vain; see `holds`
        then. Raises `TakenOverError` if another driver goes on with the run.
        """
        if self._given_up:
            return []
        earlier = self._handed
        self.flush()
        with self._moved:
            wait = 0.0 if self._late and self._written < earlier else WAIT_S
            done = self._moved.wait_for(self._has_settled, wait)
            failure, behind = self._failure, self._handed_bytes - self._written_bytes
            taken_over = self._taken_over
        if taken_over is not None:
            raise taken_over
        must = self._place.must_be_written
        if failure or (behind > MAX_BEHIND and not must):
            why = failure or f"the disk does not answer, {behind >> 20} MiB wait for it"
            return self._give_up(why)
        if must:
            return self._held_news(done=done)
        was, self._late = self._late, not done
        if was is self._late:
            return []
        if self._late:
            self._late_from = self.clock()
            slow = (
                f"{self._where}: the disk has not answered for {WAIT_S:g} s; the job does not wait"
            )
            return [Announce(host_log.JournalLate(), slow)]
        self._tried = False
        return [Announce(host_log.JournalCaughtUp(), f"{self.path}: every event is written again")]

    def _give_up(self, why: str) -> list[Announce]:
        """Go on without a journal until it can begin anew; return what the user has to know."""
        known, self._tried, self._given_up = self._tried, False, True
        self._queue.put(None)  # a thread that hangs ends once the disk answers
        with self._moved:
            lasts = self._lasts
        self._again_at = None if lasts else self.clock() + AGAIN_S
        hint = "" if lasts else " until it can be written (make room, or mend the disk)"
        text = f"{self._where}: {why}; the job goes on without a journal{hint}"
        return [] if known else [Announce(host_log.JournalFailed(), text)]

    def then(self, act: Callable[[], None], wait: float | None = None) -> list[Announce]:
        """Have `act` called, by any thread, once everything noted is written; do not wait for it.

        So one transaction serves many requests. `wait`: the seconds that a disk which does not
        answer may delay it (default: `WAIT_S`). Returns what the user has to know. Raises
        `TakenOverError` as `settle` does.
        """
        now = self.clock()
        waiting = _Waiting(0, now, WAIT_S if wait is None else wait, act)
        over = self._late and self._ends(waiting) <= now
        if self._given_up or (over and not self._place.must_be_written):
            news = self.settle()
            act()
            return news
        self.flush()
        with self._moved:
            if self._taken_over is not None:
                raise self._taken_over
            if not self._has_settled():
                self._waiting.append(waiting._replace(batch=self._handed))
                return []
        act()
        return []

    @property
    def deadline(self) -> float | None:
        """The time at which `overdue` is to be called; None: nothing waits."""
        with self._moved:
            if not self._waiting:
                return None
            if self._place.must_be_written:  # `overdue` only has news then
                return max(self._waiting[0].since, self.clock()) + WAIT_S
            if not self._late:
                return self._waiting[0].since + WAIT_S
            return min(map(self._ends, self._waiting))

    def overdue(self) -> list[Announce]:
        """Do what waits for a disk that does not answer; return what the user has to know."""
        with self._moved:
            late = self._waiting and self.clock() >= self._waiting[0].since + WAIT_S
            if self._given_up or not (late or self._late or self._failure):
                return []
            if self._place.must_be_written and not self._failure:
                return self._held_news(done=self._has_settled())
        self._end_waits()
        news = self.settle()
        self._end_waits()
        return news

    def _ends(self, waiting: _Waiting) -> float:
        """Return when this has waited long enough for a disk that does not answer."""
        end = waiting.since + waiting.wait
        return min(end, self._late_from + (waiting.wait - WAIT_S)) if self._late else end

    def _end_waits(self) -> None:
        """Do what has waited long enough."""
        with self._moved:
            now, left = self.clock(), self._waiting
            over = [each for each in left if self._ends(each) <= now]
            self._waiting = collections.deque(each for each in left if self._ends(each) > now)
        for each in over:
            each.act()

    def close(self) -> None:
        """Write what was noted, and close the file; a disk that does not answer is left alone."""
        if self._writer.ident is not None:
            self.flush()
            self._queue.put(None)
            self._writer.join(_CLOSE_S)

    def _held_news(self, *, done: bool) -> list[Announce]:
        """Return what the user has to know of a store that must be written."""
        if done:
            was, self._late, self._held_since = self._late, False, None
            back = f"{self.path}: the journal takes events again; membership changes go on"
            return [Announce(host_log.JournalReachable(), back)] if was else []
        if self._held_since is None:
            self._held_since = self.clock()
        if self._late or self.clock() < self._held_since + UNREACHABLE_S:
            return []
        self._late = True
        why = self._place.trouble or f"no answer for {UNREACHABLE_S:g} s"
        waits = "training goes on, and membership changes wait for it"
        return [Announce(host_log.JournalUnreachable(), f"{why}; {waits}")]

    @property
    def _is_settled(self) -> bool:
        with self._moved:
            return self._has_settled()

    def _has_settled(self) -> bool:
        return self._has_ended or self._written >= self._handed

    @property
    def _has_ended(self) -> bool:
        return bool(self._failure) or self._taken_over is not None

    def _due_acts(self, written: int) -> list[Callable[[], None]]:
        """Take out what waits for batches up to this one; the caller holds `_moved`."""
        acts = []
        while self._waiting and self._waiting[0].batch <= written:
            acts.append(self._waiting.popleft().act)
        return acts

    # ---- the writer's thread -------------------------------------------------------------

    def _write(self) -> None:
        try:
            if kind := network_file_system(self.path.parent):
                self._where = f"{self.path} ({kind}; a local disk is safer: --state-dir)"
            self._place.open(self._head)
            self._moved_on(written=0)
            self._write_batches()
            self._place.close()
        except TakenOverError as error:
            self._replace(error)
        except sqlite3.Error as error:
            self._fail((str(error) or type(error).__name__) + self._refusal())
        except OSError as error:
            self._fail(str(error))
        except Exception as error:  # nobody may wait for this thread in vain
            self._lasts = True
            self._fail(described(error))
        finally:
            self._place.free()

    def _fail(self, why: str) -> None:
        """Have the job go on without a journal; or have this driver end.

        It ends if nothing may act that is not written. A standby then takes the run, or a driver
        that resumes.
        """
        if self._place.must_be_written:
            hint = "the workers go on, and wait for a standby, or for --resume"
            self._replace(
                TakenOverError(f"the journal has failed ({why}); this driver ends: {hint}")
            )
            return
        with self._moved:
            self._failure = why
            self._moved.notify_all()
            acts = self._due_acts(self._handed)
        for act in acts:
            act()

    def _refusal(self) -> str:
        """Return why the file system refuses to write the file: SQLite names an I/O error only."""
        try:
            os.close(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            return f": {error.strerror}"
        return ""

    def _replace(self, error: TakenOverError) -> None:
        """Acknowledge nothing any more, and have the driver end."""
        with self._moved:
            self._taken_over = error
            self._waiting.clear()
            self._moved.notify_all()
        self.on_taken_over(error)

    def _write_batches(self) -> None:
        batch = self._queue.get()
        while batch is not None:
            batches = [batch]
            while not self._queue.empty() and (batch := self._queue.get()) is not None:
                batches.append(batch)
            self._place.write(batches)
            self._moved_on(batches[-1].number, sum(each.size for each in batches))
            self._place.tidy(batches)
            batch = batch and self._queue.get()

    def _moved_on(self, written: int, size: int = 0) -> None:
        """Tell the driver that everything up to this batch is written, and do what waits for it."""
        with self._moved:
            self._is_open = True
            self._written = written
            self._written_bytes += size
            self._moved.notify_all()
            acts = self._due_acts(written)
        for act in acts:
            act()
