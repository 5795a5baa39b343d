"""Deadlines of leases and waits: a heap that forgets stale times. Pure; times are seconds."""

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_SWEEP_ABOVE = 64  # below this many stale entries a sweep costs more than it frees


class Deadlines(Generic[T]):
    """Items with one deadline each; `due` takes out those whose time has come.

    A heap for times that change far more often than they come due: leases are renewed, waits are
    answered. Stale heap entries are dropped when they reach the top, and all at once when they
    outnumber the valid ones.
    """

    def __init__(self) -> None:
        self._at: dict[T, float] = {}
        self._heap: list[tuple[float, int, T]] = []  # stale times included
        self._order = count()  # ties: first set, first out

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, item: T) -> bool:
        return item in self._at

    def set(self, item: T, at: float) -> None:
        """Set the deadline of `item`, in place of any it had."""
        self._at[item] = at
        heapq.heappush(self._heap, (at, next(self._order), item))
        if len(self._heap) > 2 * len(self._at) + _SWEEP_ABOVE:
            self.postpone(0.0)

    def discard(self, item: T) -> None:
        """Remove `item` if it is there."""
        self._at.pop(item, None)

    def postpone(self, seconds: float) -> None:
        """Move every deadline, and drop stale entries."""
        self._at = {item: at + seconds for item, at in self._at.items()}
        self._heap = [(at, next(self._order), item) for item, at in self._at.items()]
        heapq.heapify(self._heap)

    def next(self) -> float | None:
        """Return the earliest deadline, or None if there is none."""
        while self._heap:
            at, _, item = self._heap[0]
            if self._at.get(item) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def due(self, now: float, most: int | None = None) -> list[T]:
        """Take out and return the items with a deadline at or before `now`, earliest first.

        `most`: how many of them; None: all.
        """
        ready: list[T] = []
        while len(ready) != most and (at := self.next()) is not None and at <= now:
            item = heapq.heappop(self._heap)[2]
            del self._at[item]
            ready.append(item)
        return ready
