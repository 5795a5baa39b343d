"""Time as a value: what a rule waits for, and until when.

A rule returns its waits; it sets no alarm. The machine wakes at the earliest of them, and tells
people what the last one of them is for.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple


class Wait(NamedTuple):
    """A wait until a moment, in monotonic seconds; math.inf: until an event ends it.

    `why`: a clause for people, as in "waits: 2 workers are booting"; empty: they need not know.
    """

    until: float
    why: str = ""

    def is_over(self, now: float) -> bool:
        """Return whether the moment has come."""
        return now >= self.until


def earliest(waits: Iterable[Wait]) -> float | None:
    """Return the moment at which the first of these waits ends; None if only an event ends them."""
    until = min((wait.until for wait in waits), default=math.inf)
    return None if math.isinf(until) else until


def reason(waits: Iterable[Wait]) -> str:
    """Return the last clause for people; empty if there is none."""
    found = ""
    for wait in waits:
        found = wait.why or found
    return found
