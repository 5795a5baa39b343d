"""The time of a run's machines: monotonic seconds that stand still while no driver lives.

A driver that goes on with a run counts from the time of the last event in the journal. So no
deadline passes between two drivers, whatever has happened to the clock of the host: a reboot, or
another host.
"""

import time


class RunClock:
    """The clock of one driver; calling it returns the machines' time in seconds."""

    def __init__(self, resumed_at: float | None = None) -> None:
        """Begin at the host's monotonic time, or go on at the time of an earlier driver's end."""
        self._base = 0.0 if resumed_at is None else time.monotonic() - resumed_at

    def __call__(self) -> float:
        """Return the time of the machines."""
        return time.monotonic() - self._base

    @property
    def unix_offset(self) -> float:
        """Return unix seconds minus the time of the machines, at this moment."""
        return time.time() - self()
