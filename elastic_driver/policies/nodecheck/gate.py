"""When the processes of a round begin to measure: together, once all of them are up.

Importing torch keeps a processor busy for seconds. Where hosts share a machine, whoever is up
first would measure how the others start. So everybody waits for everybody, though not for ever:
one that hangs, or has next to no processor, must not make the others run out of time.
`runtime.node_checks` owns one for each round. Pure; times are monotonic seconds.
"""

from __future__ import annotations

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
        """When it opens even though somebody is missing; None: too few are up to say."""
        return self._opens_at

    def passed(self, worker: str, now: float) -> None:
        """A process is up, or has ended; either way nobody waits for it any more."""
        self._awaited.discard(worker)
        if self._opens_at is None and len(self._awaited) < self._half:
            self._opens_at = now + PATIENCE_S

    def is_open(self, now: float) -> bool:
        """Whether those that are up may begin."""
        return not self._awaited or (self._opens_at is not None and now >= self._opens_at)
