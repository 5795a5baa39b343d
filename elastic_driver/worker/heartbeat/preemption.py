"""Signals that announce this worker's end, and what it makes of them.

Whoever takes machines or processes away often says so first: SIGTERM, SIGUSR1 or SIGUSR2. A worker
that gets one and does not handle it itself passes it on to the driver, trains on until all leave
at a step boundary, and is stopped then. What is not out by the deadline ends by the signal, as it
would have at once without us; so does a worker whose driver cannot be told, or that gets a SIGTERM
behind a notice. The agent's own SIGTERM is no notice: it comes with `contract.STOP_MARK`.

The training thread may sit in a collective and run no Python for long, so the signals are written
down in C (`signal.set_wakeup_fd`), and the heartbeat thread reads. Times are seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType

from elastic_driver import contract
from elastic_driver.core.events import WorkerLeaving
from elastic_driver.worker.worker_log import say

ANNOUNCING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STOP_MARK = signal.Signals[contract.STOP_MARK]
_AGAIN = 0x80  # added to a number that Python's own handler writes


class Signals:
    """Which signals this process got, readable by another thread than the main one.

    Nothing is changed before `listen`. Only signals that nobody handles are taken over, and a
    handler or a wakeup descriptor that the script sets later stays in force.
    """

    def __init__(self) -> None:
        self._hears, self._writes = socket.socketpair()
        self._hears.setblocking(False)
        self._writes.setblocking(False)
        self._taken: list[signal.Signals] = []
        self._wakes = False  # the interpreter writes to us
        self._caught: Counter[int] = Counter()  # number → times written by C
        self._handled: Counter[int] = Counter()  # number → times our handler ran

    def fileno(self) -> int:
        """Readable when there is something to count."""
        return self._hears.fileno()

    def listen(self) -> None:
        """Take the signals over, once; does nothing outside the main thread, where it cannot."""
        if self._taken or threading.current_thread() is not threading.main_thread():
            return
        unhandled = [n for n in (*ANNOUNCING, STOP_MARK) if signal.getsignal(n) is signal.SIG_DFL]
        if not set(unhandled) & set(ANNOUNCING):
            return
        before = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
        self._wakes = before == -1
        if not self._wakes:
            signal.set_wakeup_fd(before)  # an event loop's: then our handler has to do
        self._taken = unhandled
        for number in unhandled:
            signal.signal(number, self._on_signal)
            signal.siginterrupt(number, False)  # system calls go on, as if nothing had come

    def let_go(self) -> None:
        """Give the signals back, and close."""
        main = threading.current_thread() is threading.main_thread()
        for number in filter(self._is_ours, self._taken):
            if main:
                signal.signal(number, signal.SIG_DFL)
            else:
                _die_of(number)
        if self._wakes and main:
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._writes.fileno()):
                signal.set_wakeup_fd(current)
        self._taken, self._wakes = [], False
        self._hears.close()
        self._writes.close()

    def wake(self) -> None:
        """Make `fileno` readable without a signal."""
        with contextlib.suppress(OSError):  # full: it is readable already; or closed
            self._writes.send(b"\0")

    def count(self) -> Counter[int]:
        """How often each announcing signal, and the mark, has come so far."""
        with contextlib.suppress(OSError):
            for byte in self._hears.recv(4096):
                self._note(byte)
        return self._caught | self._handled  # whoever wrote: the larger number of the two

    def _note(self, byte: int) -> None:
        number = byte & ~_AGAIN
        if byte & _AGAIN:
            self._handled[number] += 1
        elif number == STOP_MARK or (number in self._taken and self._is_ours(number)):
            self._caught[number] += 1  # else it is the script's own business

    def _is_ours(self, number: int) -> bool:
        return signal.getsignal(number) == self._on_signal

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """For when the descriptor is not ours, or the script's handler passes a signal on."""
        with contextlib.suppress(OSError):
            self._writes.send(bytes([number | _AGAIN]))


class Notices:
    """Tells the driver, once, that this worker has to go, and sees that it is kept.

    Belongs to the heartbeat thread, but for `listen` and `let_go`. `notice`: seconds in which to
    leave; 0: signals are left alone.
    """

    def __init__(
        self, worker: str, notice: float, end: Callable[[signal.Signals], None] | None = None
    ) -> None:
        self.signals = Signals()
        self._worker, self._notice = worker, notice
        self._end = end_by if end is None else end
        self._until: float | None = None  # when to end by `_first`, the driver having been told
        self._first = signal.SIGTERM

    def listen(self) -> None:
        """Begin; for the main thread, when there is a world that can be left in good order."""
        if self._notice > 0:
            self.signals.listen()

    def wait(self, seconds: float) -> None:
        """Sleep, until there is a signal to heed at most."""
        select.select([self.signals], [], [], seconds)

    def heed(self, tell: Callable[[WorkerLeaving], str]) -> float | None:
        """Do what the signals ask for; seconds until the next look is needed.

        `tell` hands the event to the driver and returns why that cannot be done, or nothing.
        """
        heard = self.signals.count()
        numbers = [number for number in ANNOUNCING if heard[number]]
        if not numbers:
            return None
        times = sum(heard[number] for number in numbers)
        if heard[signal.SIGTERM] and (times > 1 or heard[STOP_MARK]):
            self._end(signal.SIGTERM)
        now = time.monotonic()
        if self._until is None:
            self._first, self._until = numbers[0], now + self._notice
            self._announce(tell)
        elif now >= self._until:
            say(f"still here {self._notice:g} s after {self._first.name}; ending by it")
            self._end(self._first)
        return max(0.0, self._until - now)

    def _announce(self, tell: Callable[[WorkerLeaving], str]) -> None:
        name = self._first.name
        trouble = tell(WorkerLeaving(self._worker, self._notice, f"it got {name}"))
        if trouble:
            say(f"got {name}, and the driver cannot be told ({trouble}); ending by it")
            self._end(self._first)
        else:
            say(f"got {name}: leaving at a step boundary, within {self._notice:g} s")


def end_by(number: signal.Signals) -> None:
    """End this process as the signal does by default; from any thread."""
    _die_of(number)
    signal.pthread_kill(threading.get_ident(), number)
    os._exit(128 + number)  # a debugger may have kept the signal from us


def _die_of(number: signal.Signals) -> None:
    """Have the signal do what it does by default.

    Python's `signal.signal` is for the main thread alone, and that may hear nothing now.
    """
    ctypes.CDLL(None).signal(int(number), None)
