"""Files that lines are appended to: a hung disk holds nobody up, and logrotate may move them away.

The driver writes its lines on stderr and its event log with a `LineWriter`, which has a thread of
its own. A caller usually finds its lines written when it goes on; if that takes longer than a
moment, it goes on without them. What waits is bounded; lines beyond that are dropped, counted, and
told of by the next line. Lines for a disk that is full wait until it has room again. Every method
may be called by any thread.

The event log and the files of `--log-dir` are each an `AppendedFile`. Nobody has to be told of a
move: before a write the path is looked at, once a second at most. Times are seconds.
"""

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from rendezvous.own_files import open_own

PATIENCE_S = 0.25  # for which a caller waits until its lines are written
AGAIN_S = 5.0  # after it has waited in vain, before the next caller waits
WAITING_BYTES = 256 * 1024
RETRY_S = 1.0  # between two attempts to write to a disk that has failed
# Writes all of some lines, or nothing; raises OSError if that is not possible.
Write = Callable[[bytes], object]


class LineWriter:
    """Writes lines in the order of the calls, as long as that works.

    Args:
        write: called by the writer's thread only; it may block.
        limit: bytes that may wait.
        patience: seconds for which `settle` waits.
        retry: seconds until lines that cannot be written are tried again; None: never.
        on_broken: called by the writer's thread with the error of `write`: once, and with `retry`
            again if it fails after it has worked.
        on_lost: returns a line about this number of lines that were dropped.
    """

    def __init__(
        self,
        write: Write,
        *,
        limit: int = WAITING_BYTES,
        patience: float = PATIENCE_S,
        retry: float | None = None,
        on_broken: Callable[[OSError], None] = lambda _error: None,
        on_lost: Callable[[int], bytes] = lambda _count: b"",
    ) -> None:
        """Start nothing: the first line starts the thread."""
        self._write, self._limit, self._patience = write, limit, patience
        self._retry = retry
        self._on_broken, self._on_lost = on_broken, on_lost
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._bytes = 0  # waiting, or being written
        self._lost = 0  # lines, of which nothing was told yet
        self._hurried = 0.0  # until then nobody waits
        self._thread: threading.Thread | None = None
        self._closed = self._broken = self._failing = False

    def put(self, data: bytes, lines: int = 1) -> bool:
        """Take whole lines; return False if they are dropped. Returns at once."""
        with self._changed:
            if self._broken or self._closed:
                return False
            if self._bytes + len(data) > self._limit and self._bytes:
                self._lost += lines
                return False
            if self._lost and (told := self._on_lost(self._lost)):
                data = told + data
            self._lost = 0
            self._waiting.append(data)
            self._bytes += len(data)
            if self._thread is None:
                run = threading.Thread(target=self._run, name="line-writer", daemon=True)
                self._thread = run
                run.start()
            self._changed.notify_all()
        return True

    def settle(self) -> None:
        """Wait until everything is written, unless the writer is late anyway."""
        if self._failing or not self._bytes or time.monotonic() < self._hurried:
            return
        with self._changed:
            settled = self._changed.wait_for(
                lambda: not self._bytes or self._failing, self._patience
            )
        if not settled:
            self._hurried = time.monotonic() + AGAIN_S

    def flush(self, timeout: float) -> bool:
        """Wait until everything is written; return False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes, timeout)

    def close(self, timeout: float) -> bool:
        """Take no more lines, and write those that wait; return whether that was possible.

        A thread that still hangs in `write` after `timeout` seconds is left behind.
        """
        with self._changed:
            if self._lost and not self._broken and (told := self._on_lost(self._lost)):
                self._waiting.append(told)
                self._bytes += len(told)
            self._closed, self._lost = True, 0
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                data = self._waiting.popleft()
            error = self._carry_out(data)
            if error is not None:
                self._fail(data, error)
                if self._broken:
                    return
                continue
            with self._changed:
                self._bytes -= len(data)
                self._failing = False
                self._changed.notify_all()

    def _fail(self, data: bytes, error: OSError) -> None:
        """Drop what cannot be written, and all that follows; or wait until it is tried again."""
        with self._changed:
            known, self._failing = self._failing, True
            self._broken = self._retry is None or self._closed
            if self._broken:
                self._waiting.clear()
                self._bytes = 0
            else:
                self._waiting.appendleft(data)
            self._changed.notify_all()
        if not known:
            with contextlib.suppress(Exception):  # nobody else could tell of it
                self._on_broken(error)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._broken, self._retry)

    def _carry_out(self, data: bytes) -> OSError | None:
        try:
            self._write(data)
        except OSError as error:
            return error
        except Exception as error:  # a closed file (ValueError), or a bug: nobody waits in vain
            self._retry = None
            return OSError(f"{type(error).__name__}: {error}")
        return None


def write_whole(file: BinaryIO, data: bytes) -> None:
    """Write all of the data, or leave the file as it was: half a line would spoil the next.

    `file` appends and has no buffer. Raises OSError if the data cannot be written.
    """
    written = file.write(data)
    if written != len(data):
        file.truncate(file.tell() - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


LOOK_S = 1.0  # between two looks; until the next one, a moved file is written to


class AppendedFile:
    """The file that has this path now; it is made again if it was moved or deleted."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Open for appending, without a buffer; raises OSError, for another user's link, too."""
        self.path, self._clock = path, clock
        self._file = self._open()
        self._looked = clock()

    def current(self) -> BinaryIO:
        """Return the file to write to.

        It is the old one if the path leads nowhere and no file can be made there: what is written
        goes on to the moved file then.
        """
        now = self._clock()
        if now - self._looked >= LOOK_S and not self._file.closed:
            self._looked = now
            with contextlib.suppress(OSError):
                if not self._in_place():
                    fresh = self._open()
                    self._file.close()
                    self._file = fresh
        return self._file

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        self._file.close()

    def _open(self) -> BinaryIO:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return open(open_own(self.path, flags, 0o666), "ab", buffering=0)

    def _in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False
