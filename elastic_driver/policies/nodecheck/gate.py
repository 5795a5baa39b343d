"""The common start of a round's measurements, once all processes are up.

Importing torch keeps a processor busy for seconds. If hosts share a machine, the first process
would measure how the others start. So all wait for all, but not for ever: a process that hangs or
is very slow must not make the others run out of time. Pure; times are monotonic seconds.
"""

from collections.abc import Iterable

PATIENCE_S = 10.0  # for the rest, once more than half are up


class StartingGate:
    """Opens when every process of the round has arrived or ended, or patience is over."""

    def __init__(self, workers: Iterable[str]) -> None:
        self._awaited = set(workers)
        self._half = len(self._awaited) / 2
        self._opens_at: float | None = None

    @property
    def opens_at(self) -> float | None:
        """The time when it opens even if processes are missing; None while too few are up."""
        return self._opens_at

    def passed(self, worker: str, now: float) -> None:
        """Note that a process is up or has ended: the others wait for it no longer."""
        self._awaited.discard(worker)
        if self._opens_at is None and len(self._awaited) < self._half:
            self._opens_at = now + PATIENCE_S

    def is_open(self, now: float) -> bool:
        """Return True if the processes that are up may begin."""
        return not self._awaited or (self._opens_at is not None and now >= self._opens_at)
