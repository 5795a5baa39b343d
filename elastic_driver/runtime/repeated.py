"""Which lines about a condition that comes and goes are shown: once, and then as a count. Pure.

A rank that holds the others up now and then would fill the terminal. The event log has each of
these events. Times are monotonic seconds.
"""

from dataclasses import dataclass

from elastic_driver.kernel.log import name_of
from elastic_driver.words import worker_log_events as log

ENDS = {  # what ends what, by name
    name_of(log.RankRecovered): name_of(log.RankSlow),
    name_of(log.WorkerResumed): name_of(log.WorkerStalled),
}
FIRST_S, LONGEST_S = 60.0, 3600.0  # between two lines about the same one; twice as long each time


@dataclass
class _Told:
    at: float
    pause: float = FIRST_S
    more: int = 0  # times since then, that were not shown
    ends: bool = False  # the end of what was shown has not come yet


class Repeated:
    """The conditions that were told."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, object], _Told] = {}

    def take(self, event: str, who: object, now: float) -> str | None:
        """Return what to add to the line of an event; None: leave the line out.

        `who`: the worker or rank that it is about.
        """
        if (began := ENDS.get(event)) is not None:
            told = self._told.get((began, who))
            is_shown = told is None or told.ends
            if told is not None:
                told.ends = False
            return "" if is_shown else None
        if event not in ENDS.values():
            return ""
        told = self._told.get((event, who))
        if told is None:
            self._told[event, who] = _Told(now, ends=True)
            return ""
        told.more += 1
        if now - told.at < told.pause:
            return None
        count, since = told.more, now - told.at
        pause = min(2 * told.pause, LONGEST_S)
        self._told[event, who] = _Told(now, pause)
        times = "once more" if count == 1 else f"{count} more times"
        return f", {times} in {since:.0f} s (elasticctl events has each)"
