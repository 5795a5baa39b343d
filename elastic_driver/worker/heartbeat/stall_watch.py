"""Whether the training thread has stood still for too long, and where it stands.

The heartbeat thread asks before each beat. Progress is a commit, a reported step or any other sign
of life (`signs`); what is too long follows from the steps seen so far, unless the user has set a
limit. A stall is told to the driver, which alone sees all workers and decides who hangs
(`core.rules.hangs`); the stacks of all threads go to this worker's stderr at the same time.
Nothing here stops anything.

The first step of a round gets more time, as state is transferred before it. In the first one of a
process's life only waiting in a collective is told: it may compile for as long as it likes, and
the group's own timeout ends what others wait for in vain. Times are monotonic seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import statistics
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Literal

from elastic_driver.core.events import WorkerResumed, WorkerStack, WorkerStalled
from elastic_driver.core.stack_location import waits_for_peers
from elastic_driver.worker.heartbeat.progress import TrainingProgress

LEAST_S = 60.0  # no silence shorter than this is a stall, unless the user says so
USUAL_STEPS = 20.0  # nor one shorter than so many usual steps
FIRST_STEP_S = 600.0  # the same for the first step of a round
FIRST_STEP_FACTOR = 5.0  # a limit set by the user is that much longer there
WORKING_FACTOR = 10.0  # a thread that computes, in no collective, is more likely to evaluate
WORKING_SHARE = 0.1  # of a processor: such a thread
MAX_FRAMES = 60
STDERR = 2

Where = Literal["collective", "elsewhere"]


class StallWatch:
    """Watches the thread that makes it. `limit`: as `--hang-timeout`, None adapts, 0 is off."""

    def __init__(self, worker: str, progress: TrainingProgress, limit: float | None) -> None:
        self._worker, self._progress, self._set = worker, progress, limit
        self._ident = threading.get_ident()
        self._told: tuple[int, float] | None = None  # (round, last sign of life) of a stall
        self._again_at = 0.0  # seconds of silence at which to tell it again
        self._worked = (0.0, 0.0, 0.0)  # (sign of life, when looked, its processor time)

    def look(self, now: float) -> WorkerStalled | WorkerResumed | None:
        """What the driver has to hear, if anything."""
        round_id, quiet = self._progress.round, self._quiet(now)
        if self._told is not None and self._told != (round_id, self._progress.alive_at):
            told, self._told = self._told, None
            if told[0] == round_id:
                return WorkerResumed(self._worker, round_id)
        limit = self.limit()
        works = self._works(now)
        if limit is None or quiet < (limit if self._told is None else self._again_at):
            return None
        frame = sys._current_frames().get(self._ident)
        where = stands_in(frame)
        if not self._progress.step_times and (where == "elsewhere" or works):
            return None
        if self._set is None and where == "elsewhere" and works and quiet < limit * WORKING_FACTOR:
            return None
        stack = describe(frame)
        if self._told is None:
            self._dump(quiet, where)
        self._told, self._again_at = (round_id, self._progress.alive_at), 2 * quiet
        return WorkerStalled(self._worker, round_id, quiet, where, stack)

    def answer(self, number: int) -> WorkerStack:
        """Where the thread stands now, to the driver's question of this number."""
        frame = sys._current_frames().get(self._ident)
        return WorkerStack(self._worker, number, stands_in(frame), describe(frame))

    def due(self, now: float) -> float | None:
        """Seconds until the next look is worth while; None: no limit holds."""
        limit = self.limit()
        if limit is None:
            return None
        left = (limit if self._told is None else self._again_at) - self._quiet(now)
        return max(left, 0.0) if left > 0 else limit / 4

    def limit(self) -> float | None:
        """Seconds of silence that are a stall now; None: no silence is."""
        progress = self._progress
        times = tuple(progress.step_times)
        if progress.round == 0 or self._set == 0:
            return None
        if self._set is not None:
            return self._set if progress.signs else self._set * FIRST_STEP_FACTOR
        limit = max(LEAST_S, USUAL_STEPS * statistics.median(times)) if times else FIRST_STEP_S
        return limit if progress.signs else max(limit, FIRST_STEP_S)

    def _quiet(self, now: float) -> float:
        return now - max(self._progress.alive_at, min(self._progress.busy_until, now))

    def _works(self, now: float) -> bool:
        """Whether the thread has been computing since its last sign of life.

        Before its first step the whole process counts: what compiles may be another thread.
        """
        sign, since, before = self._worked
        used = _processor_time(self._ident) if self._progress.step_times else time.process_time()
        if sign != self._progress.alive_at:
            self._worked = (self._progress.alive_at, now, used)
            return False
        return used - before > WORKING_SHARE * (now - since)

    def _dump(self, quiet: float, where: Where) -> None:
        """The stacks of all threads, past Python's own buffers: their lock may be what hangs."""
        heading = f"elastic: no progress for {quiet:.1f} s, the training thread stands "
        place = "in a collective" if where == "collective" else "outside of collectives"
        with contextlib.suppress(OSError, ValueError):
            os.write(STDERR, f"{heading}{place}:\n".encode())
            faulthandler.dump_traceback(STDERR, all_threads=True)


def stands_in(frame: FrameType | None) -> Where:
    """Whether a thread whose innermost frame this is waits for peers."""
    waits = frame is not None and waits_for_peers(frame.f_code.co_filename)
    return "collective" if waits else "elsewhere"


def describe(frame: FrameType | None) -> str:
    """The stack, innermost last, as in a traceback."""
    if frame is None:
        return "the training thread has ended"
    return "".join(traceback.format_stack(frame, limit=MAX_FRAMES))[-60_000:]


def _processor_time(ident: int) -> float:
    """Seconds a thread has used a processor; 0 where the system does not tell."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except (OSError, AttributeError):
        return 0.0
