"""Writes about operations: lines on the worker's stderr, and a timeline.

`HOROVOD_LOG_LEVEL` says how important a line has to be, `HOROVOD_LOG_HIDE_TIME=0` that it begins
with the time. A line says who called what; data never stand in it.

The timeline has the format of Chrome's tracing (chrome://tracing, Perfetto), and the coordinator
writes it. Each operation is a row: when the first rank requested it, when each rank did, and its
transfer on rank 0. Times are microseconds since the timeline was started.
"""

import json
import os
import threading
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from elastic_driver.errors import UsageError
from elastic_driver.horovod.engine.requests import Agreement, Key, Request
from elastic_driver.line_writer import LineWriter
from elastic_driver.worker.current import say
from rendezvous.own_files import open_named

LEVEL = "HOROVOD_LOG_LEVEL"
HIDE_TIME = "HOROVOD_LOG_HIDE_TIME"
LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
TRACE, DEBUG, INFO, WARNING, ERROR, _ = range(len(LEVELS))
CLOSE_S = 5.0  # the longest wait until the last events are written
WAITING_BYTES = 16 * 2**20  # of events that may wait for a slow disk


class Log:
    """Writes the lines that are important enough; any thread calls it."""

    def __init__(self, level: int = WARNING, *, with_time: bool = False) -> None:
        self.level = level
        self._with_time = with_time

    def write(self, level: int, text: str) -> None:
        """Write a line, unless its level is below that of the log."""
        if level < self.level:
            return
        now = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S.%f} " if self._with_time else ""
        say(f"{now}{text}")

    def warn(self, text: str) -> None:
        """Write a warning."""
        self.write(WARNING, text)


def log_from_environment() -> Log:
    """Return the log that the variables ask for; raises `UsageError` for an unknown level."""
    name = os.environ.get(LEVEL) or "WARNING"
    if name.upper() not in LEVELS:
        raise UsageError(f"{LEVEL}={name}: give one of {', '.join(LEVELS)}")
    with_time = os.environ.get(HIDE_TIME, "").lower() in ("0", "false")
    return Log(LEVELS.index(name.upper()), with_time=with_time)


class Timeline:
    """Writes events to a file with a thread of its own; any thread calls it."""

    def __init__(self, path: str | Path, mark_cycles: bool = False) -> None:
        """Create the file; raises `UsageError` if that is not possible."""
        try:
            self._file = open(open_named(path), "wb", buffering=0)  # noqa: SIM115 - until `close`
        except OSError as error:
            raise UsageError(f"the timeline cannot be written: {error}") from error
        self._marks_cycles = mark_cycles
        self._began = time.monotonic()
        self._lock = threading.Lock()  # guards the next two
        self._rows: dict[Key, int] = {}
        self._requested: set[Key] = set()  # and not agreed on yet
        self._writer = LineWriter(self._file.write, limit=WAITING_BYTES)
        self._writer.put(b"[\n")
        start = {"start_time_since_epoch_in_micros": int(time.time() * 1e6)}
        self._put({"ph": "M", "name": "process_name", "pid": 0, "args": start})

    def requested(self, rank: int, request: Request) -> None:
        """Note that a rank has requested an operation."""
        with self._lock:
            new = request.key not in self._requested
            self._requested.add(request.key)
        if new:
            self._put({"ph": "B", "name": f"NEGOTIATE_{request.kind.upper()}"}, of=request.key)
        self._put({"ph": "X", "dur": 0, "name": str(rank)}, of=request.key)

    def agreed(self, agreement: Agreement) -> None:
        """Note that all ranks have requested an operation."""
        with self._lock:
            known = agreement.key in self._requested
            self._requested.discard(agreement.key)
        if known:
            self._put({"ph": "E"}, of=agreement.key)

    def began(self, batch: Iterable[Agreement]) -> None:
        """Note that the transfer of some operations has begun."""
        for agreement in batch:
            self._put({"ph": "B", "name": agreement.kind.upper()}, of=agreement.key)

    def ended(self, batch: Iterable[Agreement]) -> None:
        """Note that the transfer of some operations is over."""
        for agreement in batch:
            self._put({"ph": "E"}, of=agreement.key)

    def cycle(self) -> None:
        """Note that orders go to the ranks."""
        if self._marks_cycles:
            self._put({"ph": "i", "s": "g", "name": "CYCLE_START", "pid": 0})

    def close(self) -> None:
        """Write what waits, and end the file so that it is JSON."""
        self._writer.put(b"{}]\n")
        if self._writer.close(CLOSE_S):
            self._file.close()

    def _put(self, event: dict[str, Any], of: Key | None = None) -> None:
        event["ts"] = round((time.monotonic() - self._began) * 1e6)
        if of is not None:
            event["pid"] = self._row(of)
        self._writer.put(json.dumps(event).encode() + b",\n")

    def _row(self, key: Key) -> int:
        """Return the number of an operation's row, which is announced when it is new."""
        with self._lock:
            row = self._rows.get(key)
            if row is not None:
                return row
            row = self._rows[key] = len(self._rows) + 1
        kind, name, process_set = key
        shown = f"{kind}.{name}" if not process_set else f"{kind}.{name} (set {process_set})"
        self._put({"ph": "M", "name": "process_name", "pid": row, "args": {"name": shown}})
        self._put(
            {"ph": "M", "name": "process_sort_index", "pid": row, "args": {"sort_index": row}}
        )
        return row
