"""Runnable time over CPU time of the training thread: the share of other programs, or of a quota.

The kernel counts for each thread how long it ran, and how long it was ready to run and did not; a
quota shows there too. Time in which a thread waits for data or for peers is in neither. The
heartbeat thread reads it, so it costs training nothing. Times are seconds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

LEAST_RUN_S = 0.02  # a shorter CPU time says nothing


class CpuTime(NamedTuple):
    """The kernel's account of a thread, or of several."""

    ran: float
    waited: float  # ready to run, while something else ran


def read_cpu_time(schedstat: Path) -> CpuTime | None:
    """Return a thread's account from its `schedstat` file; None where the kernel keeps none.

    The file holds nanoseconds run, nanoseconds ready, and a number of time slices (`proc(5)`).
    """
    try:
        ran, waited, _slices = schedstat.read_text("ascii").split()
        return CpuTime(int(ran) / 1e9, int(waited) / 1e9)
    except (OSError, ValueError):
        return None


class CpuSlowdown:
    """The slowdown of this process's main thread, which trains, over the newest interval."""

    def __init__(self) -> None:
        self._before: CpuTime | None = None
        self._factor = 1.0

    def factor(self) -> float:
        """Return the seconds it takes to run for one second; 1.0 where the kernel keeps none."""
        now = _read_main_thread()
        if now is None:
            return 1.0
        if self._before is None:
            self._before = now
        ran, waited = now.ran - self._before.ran, now.waited - self._before.waited
        if ran >= LEAST_RUN_S:
            self._before, self._factor = now, 1.0 + max(waited, 0.0) / ran
        return self._factor


def _read_main_thread() -> CpuTime | None:
    pid = os.getpid()  # also the main thread's id; a fork changes it
    return read_cpu_time(Path(f"/proc/self/task/{pid}/schedstat"))
