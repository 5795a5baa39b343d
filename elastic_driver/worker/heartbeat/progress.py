"""A few numbers that the training thread and the heartbeat thread share.

The training thread writes how far it is at every commit and compares one integer; the heartbeat
thread reads the one and writes the other. Each field has one writer and is replaced whole, so no
lock is needed: the interpreter makes each assignment atomic. Steps are committed steps in all,
times are monotonic seconds.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable

from elastic_driver.core.documents import Allocation, Division, Links
from elastic_driver.worker.timing.samples import StepSamples

NEVER = sys.maxsize  # leave after this step: not before the end of time
AT_ONCE = -1  # any commit is late enough
KEPT_TIMES = 101  # step times from which the usual one is taken


def _no_links() -> None:
    return None


class TrainingProgress:
    """How far this process is, and when it has been asked to leave its round."""

    __slots__ = (
        "alive_at",
        "allocation",
        "busy_until",
        "committed_at",
        "division",
        "leave_after",
        "leave_reason",
        "links",
        "passes_on",
        "round",
        "samples",
        "signs",
        "size",
        "step_time",
        "step_times",
        "steps",
        "version",
    )

    def __init__(self) -> None:
        self.round = 0  # written by the training thread when it has joined; 0: in no round
        self.size = 1  # members of that round; likewise
        self.steps = 0  # commits in this round; likewise
        self.version = -1  # committed steps in all; written by the training thread at each commit
        self.committed_at = time.monotonic()  # likewise
        self.step_time = 0.0  # seconds the last step took; likewise
        self.alive_at = self.committed_at  # last sign of life of the training thread; its own
        self.busy_until = 0.0  # until then it may be silent, as it said; its own
        self.signs = 0  # commits and reported steps in this round; its own
        self.step_times: deque[float] = deque(maxlen=KEPT_TIMES)  # of all rounds; its own
        self.samples = StepSamples()  # what steps cost this rank; see there who writes
        self.links: Callable[[], Links | None] = _no_links  # of the group; written with `round`
        self.division: Division | None = None  # written by a FixedBatch with `balance`
        self.passes_on = False  # the same: it wants to hear of allocations
        self.allocation: Allocation | None = None  # the newest; written by the heartbeat thread
        self.leave_after = NEVER  # likewise
        self.leave_reason = ""  # written before `leave_after`, so that it is there when needed

    def committed(self, version: int) -> bool:
        """Note a committed step; True when it is time to leave the round."""
        now = time.monotonic()
        self.step_time, self.committed_at, self.version = now - self.committed_at, now, version
        self.steps += 1
        self.reported(now)
        return version >= self.leave_after

    def reported(self, now: float) -> None:
        """Note a step, committed or only reported, at this moment."""
        self.step_times.append(now - self.alive_at)
        self.alive_at = now
        self.signs += 1

    def entered(self, round_id: int, version: int, size: int = 1) -> None:
        """Note a new round, in which no step was committed and nobody was asked to leave yet."""
        self.size = size
        self.committed_at = self.alive_at = time.monotonic()
        self.version = version
        self.leave_after, self.steps, self.signs = NEVER, 0, 0
        self.division, self.passes_on = None, False
        self.round = round_id

    def left(self) -> None:
        """Note that this process is in no round."""
        self.round = 0
        self.links = _no_links
