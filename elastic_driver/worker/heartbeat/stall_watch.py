"""Observes the training thread, and detects that it has made no progress for too long.

The heartbeat thread checks before each heartbeat. Progress is a commit, a reported step or any
other report of the script. The limit follows from the step times seen so far, unless the user has
set one. A stall is reported to the driver, which alone sees all workers and decides which hang
(`job.hangs`); at the same time the stacks of all threads go to this worker's stderr.
Nothing here stops anything.

The first step of a round gets more time, because state is transferred before it. In the first step
of a process only waiting in a collective counts: the process may compile for as long as it likes,
and the group's own timeout bounds the wait of the others. Times are monotonic seconds.
"""

import contextlib
import faulthandler
import os
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Literal

from elastic_driver.words.wire_events import (
    WorkerResumed,
    WorkerStack,
    WorkerStalled,
    shorten,
    waits_for_peers,
)
from elastic_driver.worker.heartbeat.progress import TrainingProgress

LEAST_S = 60.0  # the adaptive limit is never shorter than this
USUAL_STEPS = 20.0  # nor than this many median steps
FIRST_STEP_S = 600.0  # the adaptive limit in the first step of a round
FIRST_STEP_FACTOR = 5.0  # a limit set by the user is multiplied by this there
WORKING_FACTOR = 10.0  # the adaptive limit is so much longer while the thread computes by itself
WORKING_SHARE = 0.1  # CPU seconds per second from which a thread counts as computing
INTERRUPTION_S = 0.01  # CPU time between two checks of a thread that still counts as asleep
QUIET_WEIGHT = 4  # of a check that finds all threads asleep
_OURS = "/elastic_driver/worker/"
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
        waits = waits_for_peers(file) and (_OURS not in file or file.endswith(_GLOO_WAITS))
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
