"""The few fields that the training thread and the heartbeat thread share.

The training thread writes its progress at every commit and compares one integer; the heartbeat
thread reads the progress and writes the requests to leave. Each field has one writer and is
replaced as a whole, and the interpreter makes each assignment atomic, so no lock is needed.
`version` and `leave_after` count the committed steps of the whole job. Times are monotonic seconds.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_driver.core.documents import Allocation, Division, Links
from elastic_driver.worker.timing.samples import StepSamples

NEVER = sys.maxsize  # a step that no job reaches
AT_ONCE = -1  # every step is later than this one
KEPT_TIMES = 101  # step times from which the median is taken


def _no_links() -> None:
    return None


@dataclass(slots=True, eq=False)
class TrainingProgress:
    """The progress of this process, and when it has to leave its round."""

    # Written by the training thread.
    round: int = 0  # 0: in no round
    size: int = 1  # members of the round
    steps: int = 0  # commits in this round
    version: int = -1  # committed steps of the whole job
    committed_at: float = field(init=False)
    step_time: float = 0.0  # seconds of the last step
    active_at: float = field(init=False)  # last commit, report or end of a `busy` block
    busy_until: float = 0.0  # silence until then is not a stall
    reported_steps: int = 0  # commits and reported steps in this round
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    samples: StepSamples = field(default_factory=StepSamples)
    links: Callable[[], Links | None] = _no_links  # reads the link usage of the round's group
    division: Division | None = None  # set by a FixedBatch with `balance`
    wants_allocations: bool = False  # set by the same: watch for new allocations
    # Written by the heartbeat thread.
    allocation: Allocation | None = None  # the newest one
    leave_after: int = NEVER  # leave the round at the first commit after this step
    leave_reason: str = ""  # written before `leave_after`

    def __post_init__(self) -> None:
        self.committed_at = self.active_at = time.monotonic()

    def committed(self, version: int) -> bool:
        """Record a committed step; return whether the round has to be left now."""
        now = time.monotonic()
        self.step_time, self.committed_at, self.version = now - self.committed_at, now, version
        self.steps += 1
        self.reported(now)
        return version >= self.leave_after

    def reported(self, now: float) -> None:
        """Record a step that was committed or only reported."""
        self.step_times.append(now - self.active_at)
        self.active_at = now
        self.reported_steps += 1

    def entered(self, round_id: int, version: int, size: int = 1) -> None:
        """Record a new round, without a commit and without a request to leave so far."""
        self.size = size
        self.committed_at = self.active_at = time.monotonic()
        self.version = version
        self.leave_after, self.steps, self.reported_steps = NEVER, 0, 0
        self.division, self.wants_allocations = None, False
        self.round = round_id

    def left(self) -> None:
        """Record that this process is in no round."""
        self.round = 0
        self.links = _no_links
