"""What the heartbeat thread watches: signals that announce the end, and the training thread.

**Signals.** A scheduler that takes a machine away often announces it by SIGTERM, SIGUSR1 or
SIGUSR2. A worker that gets one, and does not handle it itself, reports it to the driver, trains on
until all leave at a step boundary, and is stopped then. After the deadline it ends by the signal,
as it would have at once without us. So does a worker that cannot reach its driver. More of these
signals are about the same end: schedulers send them to all processes, and again. The agent's own
SIGTERM is not an announcement: it comes with `contract.STOP_MARK`, and ends the worker. Where a job
waits for its next driver, a worker leaves without one: at once if the wait is over (then all agents
tell their workers), else when half of its time has passed. The training thread may sit in a
collective and run no Python code for long. So the signals are recorded in C
(`signal.set_wakeup_fd`), and the heartbeat thread reads them.

**Stalls.** The heartbeat thread checks before each heartbeat whether the training thread has made
no progress for too long. Progress is a commit, a reported step or any other report of the script.
The limit follows from the step times seen so far, unless the user has set one. A stall is reported
to the driver, which alone sees all workers and decides which hang (`job.hangs`); at the same time
the stacks of all threads go to this worker's stderr. Nothing here stops a thread. The first step of
a round gets more time, because state is transferred before it. In the first step of a process only
waiting in a collective counts: the process may compile for as long as it likes, and the group's own
timeout bounds the wait of the others.

Times are monotonic seconds.
"""

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Literal

from elastic_driver import contract
from elastic_driver.words.wire_events import (
    WorkerLeaving,
    WorkerResumed,
    WorkerStack,
    WorkerStalled,
    shorten,
    waits_for_peers,
)
from elastic_driver.worker.current import say
from elastic_driver.worker.heartbeat.training_progress import TrainingProgress
from rendezvous.errors import AbortedError, RendezvousError, UnreachableError

# ---- signals that announce the end -------------------------------------------------------

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


# ---- the training thread -----------------------------------------------------------------

LEAST_S = 60.0  # the adaptive limit is never shorter than this
USUAL_STEPS = 20.0  # nor than this many median steps
FIRST_STEP_S = 600.0  # the adaptive limit in the first step of a round
FIRST_STEP_FACTOR = 5.0  # a limit set by the user is multiplied by this there
WORKING_FACTOR = 10.0  # the adaptive limit is so much longer while the thread computes by itself
WORKING_SHARE = 0.1  # CPU seconds per second from which a thread counts as computing
INTERRUPTION_S = 0.01  # CPU time between two checks of a thread that still counts as asleep
QUIET_WEIGHT = 4  # of a check that finds all threads asleep
_OUR_MODULES = "/elastic_driver/worker/"
_GLOO_WAITS = "/elastic_driver/worker/world/gloo.py"
STDERR = 2
MAX_FRAMES = 60

Location = Literal["collective", "elsewhere"]


class TrainingThread:
    """The thread that creates this object, observed from others: its stack and its CPU time."""

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        self._cpu = -1.0  # CPU time at the last check for sleep
        self._asleep = 0  # checks in a row that found it asleep

    def look(self) -> tuple[Location, str]:
        """Return whether the thread waits for peers, and its stack as in a traceback."""
        frame = sys._current_frames().get(self._ident)
        if frame is None:
            return "elsewhere", "the training thread has ended"
        stack = shorten("".join(traceback.format_stack(frame, limit=MAX_FRAMES)))
        return "collective" if waits_for_peers(frame.f_code.co_filename) else "elsewhere", stack

    def cpu_seconds(self) -> float:
        """Return the CPU time of the thread; 0 where the system does not count it."""
        with contextlib.suppress(OSError, AttributeError):
            return time.clock_gettime(time.pthread_getcpuclockid(self._ident))
        return 0.0

    def count_asleep(self) -> int:
        """Check for sleep; return how many checks in a row found it asleep in a collective.

        A check counts for four if all other threads sleep as well: then none of them is about to
        wake this one, however busy the machine is.

        Gloo may have forgotten the operation that it waits for (`world.gloo`).
        """
        frame = sys._current_frames().get(self._ident)
        used = self.cpu_seconds()
        file = frame.f_code.co_filename if frame is not None else ""
        # A thread in one of our own modules may wait for a disk or for the driver.
        waits = waits_for_peers(file) and (_OUR_MODULES not in file or file.endswith(_GLOO_WAITS))
        asleep = waits and used < self._cpu + INTERRUPTION_S
        weight = QUIET_WEIGHT if asleep and others_sleep() else 1
        self._asleep = self._asleep + weight if asleep else 0
        self._cpu = used
        return self._asleep


def others_sleep() -> bool:
    """Return whether no thread of this process but the calling one runs or could run."""
    own = str(threading.get_native_id())
    try:
        others = [name for name in os.listdir("/proc/self/task") if name != own]
        stats = [Path(f"/proc/self/task/{name}/stat").read_text() for name in others]
    except OSError:  # a thread has ended meanwhile, or there is no /proc
        return False
    return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"S"}


class StallWatch:
    """Watches the thread that creates it. `limit`: seconds; None: adapts to steps, 0: no limit."""

    def __init__(self, worker: str, progress: TrainingProgress, limit: float | None) -> None:
        self._worker = worker
        self._progress = progress
        self._limit_set = limit
        self._thread = TrainingThread()
        self._stall: tuple[int, float] | None = None  # (round, active_at) of the reported stall
        self._first = 0.0  # seconds of silence at its first report
        self._repeat_at = 0.0  # seconds of silence at which it is reported again
        self._cpu_since = (0.0, 0.0, 0.0)  # (active_at, time of the check, CPU time)

    def check(self, now: float) -> WorkerStalled | WorkerResumed | None:
        """Return the event to post, if any: a stall, its repetition, or its end."""
        round_id = self._progress.round
        silence = self._silence(now)
        if self._stall is not None and self._stall != (round_id, self._progress.active_at):
            stalled_in, self._stall = self._stall[0], None
            if stalled_in == round_id:
                return WorkerResumed(self._worker, round_id)
        limit = self.limit()
        computes = self._computes(now)
        if limit is None or silence < (limit if self._stall is None else self._repeat_at):
            return None
        location, stack = self._thread.look()
        if not self._progress.step_times and (location == "elsewhere" or computes):
            return None
        patient = self._limit_set is None and silence < limit * WORKING_FACTOR
        if patient and location == "elsewhere" and computes:
            return None
        first = self._first if self._stall is not None else 0.0
        if self._stall is None:
            self._first = silence
            place = "in a collective" if location == "collective" else "outside of collectives"
            line = f"elastic: no progress for {silence:.1f} s, the training thread is {place}:\n"
            # Not through Python's buffers: the thread that hangs may hold their lock.
            with contextlib.suppress(OSError, ValueError):
                os.write(STDERR, line.encode())
                faulthandler.dump_traceback(STDERR, all_threads=True)
        self._stall, self._repeat_at = (round_id, self._progress.active_at), 2 * silence
        begun = self._progress.collectives()
        return WorkerStalled(self._worker, round_id, silence, location, stack, first, begun)

    def stack(self, number: int) -> WorkerStack:
        """Return the answer to the driver's stack request of this number."""
        return WorkerStack(self._worker, number, *self._thread.look())

    def due(self, now: float) -> float | None:
        """Return the seconds until the next useful check; None: there is no limit."""
        limit = self.limit()
        if limit is None:
            return None
        left = (limit if self._stall is None else self._repeat_at) - self._silence(now)
        return left if left > 0 else limit / 4

    def limit(self) -> float | None:
        """Return the seconds of silence that are a stall now; None: there is no limit."""
        progress = self._progress
        times = tuple(progress.step_times)
        if progress.round == 0 or self._limit_set == 0:
            return None
        if self._limit_set is not None:
            return self._limit_set * (1.0 if progress.reported_steps else FIRST_STEP_FACTOR)
        limit = max(LEAST_S, USUAL_STEPS * statistics.median(times)) if times else FIRST_STEP_S
        return limit if progress.reported_steps else max(limit, FIRST_STEP_S)

    def _silence(self, now: float) -> float:
        return now - max(self._progress.active_at, min(self._progress.busy_until, now))

    def _computes(self, now: float) -> bool:
        """Return whether the thread has computed since its last report.

        Before the first step the whole process counts: another thread may compile.
        """
        active_at, since, before = self._cpu_since
        used = self._thread.cpu_seconds() if self._progress.step_times else time.process_time()
        if active_at != self._progress.active_at:
            self._cpu_since = (self._progress.active_at, now, used)
            return False
        return used - before > WORKING_SHARE * (now - since)
