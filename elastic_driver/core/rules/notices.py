"""The time of a notice: one part is for leaving, the last for ending processes.

Batch systems and clouds announce that a host, or all of them, go away in so many seconds. The
agents and the core reckon alike, so that nobody is stopped while others still count on it.
Pure. Times are seconds.
"""

from __future__ import annotations

STOPPING_S = 5.0  # the last part of the time, for ending processes that are still there


def time_to_leave(deadline: float) -> float:
    """Return the part of a deadline in which workers leave by themselves; then they are ended."""
    return deadline - min(STOPPING_S, deadline / 2)
