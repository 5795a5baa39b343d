"""After which step a planned change may happen: one every rank still has before it.

Workers leave together without a collective because the driver names the step. That step has to
lie far enough ahead that each worker's heartbeat thread knows of it before `commit()` gets
there, and no further, because whoever waits to be let in waits for it. A rank that hears of it
too late breaks the group for the others and loses nothing, only the elegance.

Pure: the driver collects the readings and tells how old they are. Times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct

BASE_MARGIN = 0.1  # store → long-poll → heartbeat thread, on a busy machine
MARGIN_PER_WORKER = 0.0005  # the server answers its long-polls one after the other
LEAST_MARGIN = 0.03  # a heartbeat thread may have to wait for the interpreter, or for a core
MARGIN_PER_ANSWER = 5  # times what question and answer just took; the notice goes half that way
LONGEST_AHEAD = 10_000  # steps; a nonsensical step time must not name a step nobody reaches

UNREACHABLE_STEP = 2**53
"""A notice that names this step asks for nothing yet; it only makes every heartbeat report."""


class Reading(Struct, frozen=True):
    """What one worker said: `step` committed steps in all, `step_time` seconds for one (0: not
    known yet), `age` seconds ago."""

    step: int
    step_time: float
    age: float


def margin_for(members: int, answered: float | None) -> float:
    """Seconds to allow for a notice to reach `members` workers.

    `answered`: how long a question to all of them took just now, with the last one's answer; None
    where one of them did not answer in time.
    """
    longest = BASE_MARGIN + MARGIN_PER_WORKER * members
    if answered is None:
        return longest
    return min(longest, max(LEAST_MARGIN, MARGIN_PER_ANSWER * answered))


def leave_after(readings: Iterable[Reading], *, base: int, margin: float) -> int:
    """The step S after which the members of a round leave: floor(furthest + margin/step) + 1.

    The furthest is the worker with the most steps *now*: its last word, extrapolated by its age.
    Ranks in step with each other differ by at most one, so the others are not far behind.

    Args:
        readings: what is known of the round's workers; may be empty.
        base: the committed steps the round began with; nobody can be behind it.
        margin: seconds in which every worker will have heard of it.
    """
    furthest, fastest = float(base), math.inf
    for reading in readings:
        step_time = reading.step_time
        known = math.isfinite(step_time) and step_time > 0.0
        ahead = min(max(reading.age, 0.0) / step_time, LONGEST_AHEAD) if known else 0.0
        furthest = max(furthest, reading.step + ahead)
        if known:
            fastest = min(fastest, step_time)
    # No step time yet: the first step is still under way, so it is either slow (and one step of
    # margin is plenty) or has only just begun.
    margin_steps = 1.0 if math.isinf(fastest) else min(margin / fastest, LONGEST_AHEAD)
    return math.floor(furthest + margin_steps) + 1
