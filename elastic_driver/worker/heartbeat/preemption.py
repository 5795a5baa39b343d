"""The end of this worker: the signals that announce it, and its part in the job's last checkpoint.

A scheduler that takes a machine away often announces it by SIGTERM, SIGUSR1 or SIGUSR2. A worker
that gets one, and does not handle it itself, reports it to the driver, trains on until all leave at
a step boundary, and is stopped then. After the deadline it ends by the signal, as it would have at
once without us. So does a worker that cannot reach its driver. More of these signals are about the
same end: schedulers send them to all processes, and again. The agent's own SIGTERM is not an
announcement: it comes with `contract.STOP_MARK`, and ends the worker.
Where a job waits for its next driver, a worker leaves without one: at once if the wait is over
(then all agents tell their workers), else when half of its time has passed.

The training thread may sit in a collective and run no Python code for long. So the signals are
recorded in C (`signal.set_wakeup_fd`), and the heartbeat thread reads them. Times are seconds.

Where all workers of a job have to leave, the driver asks for a final checkpoint:
`FinalCheckpointTask` is one worker's part in it.
"""

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
from pathlib import Path
from types import FrameType
from typing import Protocol

from elastic_driver import contract
from elastic_driver.words.orders import SaveRequest
from elastic_driver.words.wire_events import WorkerLeaving, WorkerSaved
from elastic_driver.worker.worker_log import say
from rendezvous.errors import AbortedError, RendezvousError, UnreachableError

ANNOUNCING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STOP_MARK = signal.Signals[contract.STOP_MARK]
RETRY_S = 0.5  # until a driver that does not answer is told again
_HANDLED = 0x80  # marks a signal number that our Python handler wrote


class PreemptionWatch:
    """Counts the signals, reports once to the driver that this worker has to leave, and ends it.

    Belongs to the heartbeat thread, except for `listen` and `close`. Nothing changes before
    `listen`. Only signals without a handler are taken over; a handler or a wakeup descriptor that
    the script sets later stays in force.

    Args:
        worker: the name of this worker.
        notice: seconds from the signal to the end of the process; 0: signals are left alone.
        leave_alone: has this worker leave without a driver; gets the reason and the time that it
            has, in seconds, and returns False if it is too early for that. None: it ends instead.
    """

    def __init__(
        self,
        worker: str,
        notice: float,
        leave_alone: Callable[[str, float], bool] | None = None,
    ) -> None:
        self._worker = worker
        self._notice = notice
        self.end = end_by
        self._leave_alone = leave_alone
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._taken: list[signal.Signals] = []
        self._owns_wakeup = False  # whether the interpreter writes to our socket
        self._caught: Counter[int] = Counter()  # signal number → times written in C
        self._handled: Counter[int] = Counter()  # signal number → times our handler ran
        self._deadline: float | None = None  # set by the first signal
        self._told = False  # the driver knows, or this worker leaves without one
        self._first = signal.SIGTERM

    @property
    def has_come(self) -> bool:
        """Whether an announcing signal has come, as far as `check` knows; on any thread."""
        return self._deadline is not None

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to count."""
        return self._reader.fileno()

    def listen(self) -> None:
        """Install our signal handlers, in the first world only; on the main thread only."""
        on_main = threading.current_thread() is threading.main_thread()
        if self._taken or self._notice == 0 or not on_main:
            return
        unhandled = [n for n in (*ANNOUNCING, STOP_MARK) if signal.getsignal(n) is signal.SIG_DFL]
        if not set(unhandled) & set(ANNOUNCING):
            return
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._owns_wakeup = before == -1
        if not self._owns_wakeup:
            signal.set_wakeup_fd(before)  # an event loop uses it: our handler has to suffice
        self._taken = unhandled
        for number in unhandled:
            signal.signal(number, self._on_signal)
            signal.siginterrupt(number, False)  # system calls go on as if no signal had come

    def close(self) -> None:
        """Restore the signals' default actions, close the sockets; also in a forked child."""
        ours = [number for number in self._taken if self._is_ours(number)]
        for number in ours:
            _reset_in_c(number)
        with contextlib.suppress(ValueError):  # outside the main thread that has to be enough
            for number in ours:
                signal.signal(number, signal.SIG_DFL)
            if self._owns_wakeup:
                current = signal.set_wakeup_fd(-1)
                if current not in (-1, self._writer.fileno()):
                    signal.set_wakeup_fd(current)
        self._taken, self._owns_wakeup = [], False
        self._reader.close()
        self._writer.close()

    def wake(self) -> None:
        """Make `fileno` readable without a signal."""
        self._write(0)

    def wait(self, seconds: float) -> None:
        """Sleep until a signal comes, or `wake` is called, or `seconds` have passed."""
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self, select.POLLIN)
        poll.poll(seconds * 1000)

    def count(self) -> Counter[int]:
        """Return how often each announcing signal, and the mark, has come so far."""
        with contextlib.suppress(OSError):
            for byte in self._reader.recv(4096):
                number = byte & ~_HANDLED
                if byte & _HANDLED:
                    self._handled[number] += 1
                elif number == STOP_MARK or (number in self._taken and self._is_ours(number)):
                    self._caught[number] += 1  # any other signal is the script's own
        return self._caught | self._handled  # both may have recorded it: the larger count is right

    def check(self, report: Callable[[WorkerLeaving], object]) -> float | None:
        """Act on the signals that came; return the seconds until the next check is needed.

        `report` posts the event to the driver, or raises `RendezvousError`.
        """
        count = self.count()
        numbers = [number for number in ANNOUNCING if count[number]]
        if not numbers:
            return None
        if count[signal.SIGTERM] and count[STOP_MARK]:
            self.end(signal.SIGTERM)
        now = time.monotonic()
        if self._deadline is None:
            self._first, self._deadline = numbers[0], now + self._notice
        elif now >= self._deadline:
            say(f"still here {self._notice:g} s after {self._first.name}; ending by it")
            self.end(self._first)
        if not self._told:
            self._told = self._tell(report, round(self._deadline - now, 3))
        return max(0.0, self._deadline - now) if self._told else RETRY_S

    def _tell(self, report: Callable[[WorkerLeaving], object], left: float) -> bool:
        """Report the signal, or leave without a driver; return whether one of them was done."""
        name = self._first.name
        try:
            report(WorkerLeaving(self._worker, left, f"it got {name}"))
        except AbortedError:
            raise  # the script has ended by itself meanwhile
        except RendezvousError as error:
            if self._leave_alone is not None and isinstance(error, UnreachableError):
                return self._leave_alone(f"got {name} while no driver answers", left)
            say(f"got {name}, and the driver cannot be reached ({error}); ending by it")
            self.end(self._first)
        say(f"got {name}: leaving at a step boundary, within {left:g} s")
        return True

    def _is_ours(self, number: int) -> bool:
        return signal.getsignal(number) == self._on_signal

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Record a signal where the wakeup descriptor is not ours, or a script passes one on."""
        self._write(number | _HANDLED)

    def _write(self, byte: int) -> None:
        with contextlib.suppress(OSError):  # full, so it is readable already; or closed
            self._writer.send(bytes([byte]))


def end_by(number: signal.Signals) -> None:
    """End this process as the signal does by default; any thread may call it."""
    _reset_in_c(number)
    signal.pthread_kill(threading.get_ident(), number)
    os._exit(128 + number)  # a debugger may have kept the signal from us


def _reset_in_c(number: int) -> None:
    """Restore the signal's default action: `signal.signal` works on the main thread only."""
    ctypes.CDLL(None).signal(int(number), None)


MAX_PROBLEM_CHARS = 1000


class Checkpointed(Protocol):
    """A state that can write a final checkpoint; see `State`, whose module imports this one."""

    def begin_final_checkpoint(self, request: SaveRequest, rank: int) -> Path | None:
        """Begin to write this rank's share; return the folder, None where there is none.

        Raises an exception that says why it cannot be written.
        """

    def final_checkpoint_problem(self, folder: Path) -> str | None:
        """Return "" once the checkpoint is complete, why it failed, or None meanwhile."""


class FinalCheckpointTask:
    """Writes this worker's part of the final checkpoint, and reports the result.

    The driver requests it while this worker waits for a world. The state writes its shares in the
    background; the first of the requested workers reports the result. All calls come from the
    training thread, which trains nothing meanwhile.
    """

    def __init__(self, worker: str, state: Checkpointed) -> None:
        self._worker, self._state = worker, state
        self._asked: tuple[int, tuple[str, ...]] | None = None  # number and members of the request
        self._folder: Path | None = None  # is being written; set where this worker reports
        self._unsent: WorkerSaved | None = None
        self._sent: WorkerSaved | None = None

    def begin(self, request: SaveRequest) -> None:
        """Carry out the driver's request; a failure becomes the result and is not raised.

        If a new driver repeats a request, its result is reported again, once it is known.
        """
        asked = request.number, request.members
        if asked == self._asked:
            self._unsent = self._unsent or self._sent
            return
        self._asked = asked
        self._folder = None
        self._unsent = None
        self._sent = None
        if self._worker not in request.members:
            return
        rank = request.members.index(self._worker)
        try:
            folder = self._state.begin_final_checkpoint(request, rank)
        except Exception as error:  # of any kind: the others must not wait for this worker
            self._conclude(str(error) or type(error).__name__)
        else:
            if rank == 0:
                self._folder = folder
                if folder is None:
                    self._conclude("")

    def report(self, post: Callable[[WorkerSaved], object]) -> bool:
        """Post the result once it is known; return whether it is still pending.

        The result is kept for the next call where `post` raises.
        """
        if self._folder is not None:
            problem = self._state.final_checkpoint_problem(self._folder)
            if problem is not None:
                self._conclude(problem)
        if self._unsent is not None:
            post(self._unsent)
            self._sent, self._unsent = self._unsent, None
        return self._folder is not None

    def _conclude(self, problem: str) -> None:
        number, _ = self._asked or (0, ())
        folder = "" if problem or self._folder is None else str(self._folder)
        problem = problem[:MAX_PROBLEM_CHARS]
        self._unsent = WorkerSaved(self._worker, number, folder, problem)
        self._folder = None
