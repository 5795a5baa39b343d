"""How much longer things take than the processor works on them: other programs, or a quota.

The kernel counts for each thread how long it ran, and how long it was ready and did not run; that
it is held to a part of a processor shows there too. Time in which a thread waits for data or for
peers is in neither. Read by the heartbeat thread, so that it costs training nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

LEAST_RUN_S = 0.02  # less than that tells nothing


class Stretch:
    """Of this process's main thread, which trains; the newest stretch of time counts."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None
        self._factor = 1.0

    def factor(self) -> float:
        """Seconds it takes to run for one second; 1.0 where nobody is in the way or knows."""
        now = _account()
        if now is None:
            return 1.0
        if self._before is None:
            self._before = now
        ran, ready = (after - before for after, before in zip(now, self._before, strict=True))
        if ran >= LEAST_RUN_S:
            self._before, self._factor = now, 1.0 + max(ready, 0.0) / ran
        return self._factor


def _account() -> tuple[float, float] | None:
    """Seconds run, and seconds ready but not running, as `proc(5)` has them for a thread."""
    pid = os.getpid()  # also the main thread's number; after a fork it is another
    try:
        ran, ready, _times = Path(f"/proc/self/task/{pid}/schedstat").read_text("ascii").split()
        return int(ran) / 1e9, int(ready) / 1e9
    except (OSError, ValueError):
        return None
