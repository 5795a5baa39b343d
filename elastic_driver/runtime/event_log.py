"""The event log of a job: one JSON object per line, for people and programs.

The driver appends the announced events; `runtime.status_routes` reads the newest ones from memory.
A broken log never harms the job: when a write fails (disk full, folder gone), the user sees one
line, and events wait in memory until the disk takes them again. A thread writes the file, so that a
disk that hangs holds nobody up.
An event is in the file when `append` returns, or at the end of a block `together`, unless the disk
is slow. A file that was moved is made again, and the numbers go on in it.

A line: `{"n": 7, "t": 1718000000.25, "event": "worker_exited", "round": 2, "host": "a",
"slot": 0, "rank": 1, "pid": 4711, "reason": "…", …}`. `n` counts from 1 within the file, `t` is
unix seconds. These nine fields stand in every line, null if they do not apply; the
event's other fields follow.
"""

import collections
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from elastic_driver.line_writer import PATIENCE_S, RETRY_S, AppendedFile, LineWriter, write_whole
from rendezvous.wire import UNREADABLE

RING_EVENTS = 10_000  # the newest, which /v1/events returns
_FIRST = ("n", "t", "event", "round", "host", "slot", "rank", "pid")  # fields of every line
_TAIL_BYTES = 1 << 20  # enough to hold the last line of any log
_WAITING_BYTES = 16 << 20  # of events that the disk has not taken yet
_PACKED = (".gz", ".bz2", ".xz", ".zst")
_CLOSE_S = 2.0  # for the disk to take them at the end


class LoggedEvent(msgspec.Struct, frozen=True):
    """One line of the log: its number, and its JSON without the line's end."""

    n: int
    line: bytes


class EventLog:
    """A log in a file and in a ring buffer; every method may be called by any thread."""

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], float],
        on_broken: Callable[[str], None],
        ring: int = RING_EVENTS,
        patience: float = PATIENCE_S,
    ) -> None:
        """Open nothing.

        Args:
            path: the file, or None to keep events in memory only.
            clock: unix seconds.
            on_broken: called once, with one line, when the file can no longer be written, or
                when the disk is so slow that events are left out.
            ring: how many events memory keeps.
            patience: seconds for which the disk may hold the job up, rarely.
        """
        self._path, self._clock, self._on_broken = path, clock, on_broken
        self._ring: collections.deque[LoggedEvent] = collections.deque(maxlen=ring)
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._patience = patience
        self._file: AppendedFile | None = None
        self._writer: LineWriter | None = None
        self._together = self._said = False
        self._counts: collections.Counter[str] = collections.Counter()
        self._next = 1
        self.closed = False  # no event follows

    def open(self) -> None:
        """Open the file for appending and go on with its numbering; raises OSError."""
        if self._path is None:
            return
        # Unbuffered: what is written stays written if the driver is killed.
        file = self._file = AppendedFile(self._path)
        self._next = _last_number_of_all(self._path) + 1
        self._writer = LineWriter(
            lambda lines: write_whole(file.current(), lines),
            limit=_WAITING_BYTES,
            patience=self._patience,
            retry=RETRY_S,
            on_broken=self._fail,
        )

    def append(self, event: str, **facts: Any) -> LoggedEvent:
        """Log an event; facts that are None are left out. Never raises for a broken file."""
        known = {name: value for name, value in facts.items() if value is not None}
        with self._lock:
            head = {"n": self._next, "t": round(self._clock(), 6), "event": event}
            record = dict.fromkeys(_FIRST) | {"reason": ""} | known | head
            logged = LoggedEvent(self._next, msgspec.json.encode(record))
            self._next += 1
            self._counts[event] += 1
            self._ring.append(logged)
            writer = self._writer
            late = writer is not None and not writer.put(logged.line + b"\n")
        self._call_listeners()
        if late:
            self._say("the disk is too slow")
        elif writer is not None and not self._together:
            writer.settle()
        return logged

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Wait for the disk only once, at the end of this block, and only if something was logged.

        Of the driver's thread alone.
        """
        before, self._together = self._next, True
        try:
            yield
        finally:
            self._together = False
            if self._writer is not None and self._next != before:
                self._writer.settle()

    def _fail(self, error: OSError) -> None:
        """Tell that the file cannot be written; called by the writer's thread."""
        self._say(error.strerror or str(error))

    def _say(self, problem: str) -> None:
        with self._lock:
            said, self._said = self._said, True
        if not said:
            kept = "events wait in memory until it can be written (make room; /v1/events has them)"
            self._on_broken(f"event log {self._path}: {problem}; the job goes on, and {kept}")

    def since(self, n: int) -> list[LoggedEvent]:
        """Return the events in memory with a number above `n`, the oldest first."""
        with self._lock:
            return [logged for logged in self._ring if logged.n > n]

    def counts(self) -> dict[str, int]:
        """Return the number of events by name since this log was opened."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Close the file; events appended later stay in memory only."""
        with self._lock:
            self.closed = True
            writer, self._writer = self._writer, None
        if self._file is not None and (writer is None or writer.close(_CLOSE_S)):
            self._file.close()
            self._file = None
        self._call_listeners()

    def _call_listeners(self) -> None:
        with self._lock:
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()

    @contextlib.contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` after each event and at the end, while the context is open.

        The listener runs in the appending thread and must neither block nor raise.
        """
        with self._lock:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)


def _last_number_of_all(path: Path) -> int:
    """Return the last number of the file, or of the files that were moved away from its name."""
    if not path.is_file() or path.stat().st_size:
        return _last_number(path)
    moved = path.parent.glob(f"{path.name}?*")
    return max((_last_number(file) for file in moved if file.suffix not in _PACKED), default=0)


class _Numbered(msgspec.Struct):
    n: int


def _last_number(path: Path) -> int:
    """Return the number of the file's last whole line, or 0; remove a line that was cut off."""
    if not path.is_file():  # a device has no last line
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read(_TAIL_BYTES)
        whole = tail[: tail.rfind(b"\n") + 1]
        if len(whole) != len(tail):
            file.truncate(start + len(whole))
    for line in reversed(whole.splitlines()):
        try:
            return msgspec.json.decode(line, type=_Numbered).n
        except UNREADABLE:
            continue
    return 0
