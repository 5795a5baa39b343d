"""Which of many things is due next.

A heap for times that are moved and called off far more often than they come due (leases are
renewed, waits are answered): stale heap entries are dropped when they surface, and swept out
when they outnumber the live ones. Pure: nothing here reads a clock. Times are seconds on
whatever clock the caller uses.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_SWEEP_ABOVE = 64  # below this many stale entries a sweep costs more than it frees


class Deadlines(Generic[T]):
    """One time for each item; `due` hands out those that have come, earliest first."""

    def __init__(self) -> None:
        self._at: dict[T, float] = {}
        self._heap: list[tuple[float, int, T]] = []  # may hold times that no longer count
        self._order = count()  # equal times come out in the order they were set

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, item: object) -> bool:
        return item in self._at

    def set(self, item: T, at: float) -> None:
        """Give `item` this time, in place of any it had."""
        self._at[item] = at
        heapq.heappush(self._heap, (at, next(self._order), item))
        if len(self._heap) > 2 * len(self._at) + _SWEEP_ABOVE:
            self._heap = [(at, next(self._order), item) for item, at in self._at.items()]
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        """Forget `item`, if it was there."""
        self._at.pop(item, None)

    def postpone(self, seconds: float) -> None:
        """Move every time by this much."""
        self._at = {item: at + seconds for item, at in self._at.items()}
        self._heap = [(at, next(self._order), item) for item, at in self._at.items()]
        heapq.heapify(self._heap)

    def next(self) -> float | None:
        """The earliest time, or None where nothing is pending."""
        while self._heap:
            at, _, item = self._heap[0]
            if self._at.get(item) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def due(self, now: float) -> list[T]:
        """Take out and return every item whose time is at or before `now`."""
        ready: list[T] = []
        while (at := self.next()) is not None and at <= now:
            item = heapq.heappop(self._heap)[2]
            del self._at[item]
            ready.append(item)
        return ready
