"""A writer of lines with a thread of its own: a stopped terminal or a hung disk holds nobody up.

The driver writes its lines on stderr and its event log with one of these. A caller usually finds
its lines written when it goes on; if that takes longer than a moment, it goes on without them. What
waits is bounded; lines beyond that are dropped, counted, and told of by the next line.

Every method may be called by any thread. Times are seconds.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

PATIENCE_S = 0.25  # for which a caller waits until its lines are written
AGAIN_S = 5.0  # after it has waited in vain, before the next caller waits
WAITING_BYTES = 256 * 1024
# Writes lines; raises OSError if they, and all that follow, cannot be written.
Write = Callable[[bytes], object]


class LineWriter:
    """Writes lines in the order of the calls, as long as that works.

    Args:
        write: called by the writer's thread only; it may block.
        limit: bytes that may wait.
        patience: seconds for which `settle` waits.
        on_broken: called once, by the writer's thread, with the error of `write`.
        on_lost: returns a line about this number of lines that were dropped.
    """

    def __init__(
        self,
        write: Write,
        *,
        limit: int = WAITING_BYTES,
        patience: float = PATIENCE_S,
        on_broken: Callable[[OSError], None] = lambda _error: None,
        on_lost: Callable[[int], bytes] = lambda _count: b"",
    ) -> None:
        """Start nothing: the first line starts the thread."""
        self._write, self._limit, self._patience = write, limit, patience
        self._on_broken, self._on_lost = on_broken, on_lost
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._bytes = 0  # waiting, or being written
        self._lost = 0  # lines, of which nothing was told yet
        self._hurried = 0.0  # until then nobody waits
        self._thread: threading.Thread | None = None
        self._closed = self._broken = False

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
        if self._bytes and time.monotonic() >= self._hurried and not self.flush(self._patience):
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
            with self._changed:
                self._bytes -= len(data)
                if error is not None:
                    self._broken = True
                    self._waiting.clear()
                    self._bytes = 0
                self._changed.notify_all()
            if error is not None:
                with contextlib.suppress(Exception):  # nobody else could tell of it
                    self._on_broken(error)
                return

    def _carry_out(self, data: bytes) -> OSError | None:
        try:
            self._write(data)
        except OSError as error:
            return error
        except Exception as error:  # a closed file (ValueError), or a bug: nobody waits in vain
            return OSError(f"{type(error).__name__}: {error}")
        return None
