"""The training thread, observed from the heartbeat thread: its stack and its CPU time."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import FrameType
from typing import Literal

from elastic_driver.core.stack_location import waits_for_peers

MAX_FRAMES = 60
MAX_STACK_CHARS = 60_000
CPU_TICKS_PER_S = 100
# Files whose functions wait for a collective or for the device that carries it out. Our own
# modules are not here: they may wait for a disk or for the driver.
_COLLECTIVES = (
    "torch/distributed/",
    "torch/nn/parallel/distributed.py",
    "torch/autograd/graph.py",
    "torch/cuda/",
)

Location = Literal["collective", "elsewhere"]


class TrainingThread:
    """The thread that creates this object; any thread may call the methods."""

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        self._ticks = -1  # CPU time at the last check for sleep
        self._asleep = 0  # checks in a row that found it asleep

    def frame(self) -> FrameType | None:
        """Return the innermost Python frame; None once the thread has ended."""
        return sys._current_frames().get(self._ident)

    def cpu_seconds(self) -> float:
        """Return the CPU time of the thread; 0 where the system does not tell."""
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(self._ident))
        except (OSError, AttributeError):
            return 0.0

    def cpu_ticks(self) -> int:
        """Return the CPU time in ticks, so that a short interruption does not count as running."""
        return int(self.cpu_seconds() * CPU_TICKS_PER_S)

    def count_asleep(self) -> int:
        """Check for sleep; return how many checks in a row found it asleep in a collective.

        Gloo has a rare fault: a send that is reset in the moment in which the peer asks for it is
        forgotten, and the thread that waits for it sleeps until the group's timeout, half an hour
        (2 of 100 kills of a peer under a loop of small broadcasts). No call wakes it.
        """
        ticks, frame = self.cpu_ticks(), self.frame()
        waits = frame is not None and any(f in frame.f_code.co_filename for f in _COLLECTIVES)
        self._asleep = self._asleep + 1 if waits and ticks == self._ticks else 0
        self._ticks = ticks
        return self._asleep

    def reset_asleep(self) -> None:
        """Forget the checks made so far."""
        self._ticks, self._asleep = -1, 0


def location_of(frame: FrameType | None) -> Location:
    """Return whether a thread with this innermost frame waits for peers."""
    waits = frame is not None and waits_for_peers(frame.f_code.co_filename)
    return "collective" if waits else "elsewhere"


def stack_of(frame: FrameType | None) -> str:
    """Return the stack as in a traceback, innermost frame last."""
    if frame is None:
        return "the training thread has ended"
    return "".join(traceback.format_stack(frame, limit=MAX_FRAMES))[-MAX_STACK_CHARS:]
