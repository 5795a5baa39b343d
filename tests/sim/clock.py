"""Simulated time: things happen when their moment comes, never because time passes for real."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """A queue of moments; `now` is in seconds and moves from one moment to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._moments: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Do `action` in `delay` seconds; equal moments keep their order."""
        heapq.heappush(self._moments, (self.now + delay, next(self._numbers), action))

    def run(self, until: float, stop: Callable[[], bool]) -> None:
        """Move on until this moment, or until `stop()` holds after some action."""
        while self._moments and self._moments[0][0] <= until:
            if stop():
                return
            self.now, _, action = heapq.heappop(self._moments)
            action()
        if not stop():
            self.now = until
