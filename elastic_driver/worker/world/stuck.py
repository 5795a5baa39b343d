"""Whether the training thread sits in a collective that nothing can end any more.

Gloo has a rare fault: a send that is reset in the very moment in which the peer asks for it is
forgotten, and the thread that waits for it sleeps until the group's timeout, half an hour (seen
in 2 of 100 kills of a peer under a loop of nothing but small broadcasts). No call wakes it. Such a
worker cannot be saved; ended, it is replaced within a second or two. `membership` looks here,
on the heartbeat thread, at a training thread that does not leave a broken round.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

# Where Python stands while torch waits for a collective: in a call, in DDP, in backward(), or
# for the device that carries it out.
_WAITING_IN = (
    "torch/distributed/",
    "torch/nn/parallel/distributed.py",
    "torch/autograd/graph.py",
    "torch/cuda/",
)


class TrainingThread:
    """The thread that makes this object, watched from another one."""

    def __init__(self) -> None:
        self._ident, self._native_id = threading.get_ident(), threading.get_native_id()
        self._ticks = -1  # processor time it had used at the last look
        self._looks = 0

    def forget(self) -> None:
        """Start counting anew."""
        self._ticks, self._looks = -1, 0

    def asleep_in_a_collective(self) -> int:
        """At how many looks in a row it stood in a collective and had not run since the last."""
        ticks = self._processor_time()
        if ticks != self._ticks or not self._stands_in_a_collective():
            self._looks = 0
        else:
            self._looks += 1
        self._ticks = ticks
        return self._looks

    def _processor_time(self) -> int:
        try:
            stat = Path(f"/proc/self/task/{self._native_id}/stat").read_text("utf-8", "replace")
        except OSError:
            return -1
        fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
        return int(fields[11]) + int(fields[12])  # utime, stime

    def _stands_in_a_collective(self) -> bool:
        frame: FrameType | None = sys._current_frames().get(self._ident)
        return frame is not None and any(at in frame.f_code.co_filename for at in _WAITING_IN)
