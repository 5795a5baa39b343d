"""The batches of the store that wait, and the deadlines of waits and leases. Pure.

`WaitingBatches` knows which batch waits for which keys, and until when. A write wakes the batches
that it lets go on; the store then takes them out one after the other. `Deadlines` is a heap that
forgets stale times. Times are seconds.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from rendezvous import wire
from rendezvous.limits import Budget, Owner

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


@dataclass(eq=False, slots=True)
class RunningBatch:
    """A batch, the results it has so far, and the revisions it waits for.

    While it waits, `thresholds` holds the revision that each key must pass, and `unmet` how many
    more keys must do so (0 or less: the wait is over). Each write to one of these keys updates
    `unmet`.
    """

    ticket: Hashable
    operations: Sequence[wire.Operation]
    budget: Budget
    results: list[wire.Result] = field(default_factory=list)
    thresholds: Mapping[str, int] = field(default_factory=dict)
    unmet: int = 0


class WaitingBatches:
    """The batches that wait, by ticket and by key."""

    def __init__(self) -> None:
        self._by_ticket: dict[Hashable, RunningBatch] = {}
        self._by_key: dict[str, dict[RunningBatch, None]] = {}  # oldest first
        self._ends: Deadlines[Hashable] = Deadlines()  # of the waits, by ticket
        self._woken: dict[RunningBatch, None] = {}  # whose condition came true
        self._keys = 0  # that are waited for, once for each batch
        self._keys_of: Counter[Owner] = Counter()

    @property
    def tickets(self) -> tuple[Hashable, ...]:
        """The tickets of all batches."""
        return tuple(self._by_ticket)

    def find(self, ticket: Hashable) -> RunningBatch | None:
        """Return the batch with this ticket, if it waits."""
        return self._by_ticket.get(ticket)

    def refuse(self, batch: RunningBatch, keys: int) -> wire.StoreRefusal | None:
        """Charge a batch for a wait for so many keys; return a refusal if it may not wait."""
        return batch.budget.wait(self._keys, self._keys_of[batch.budget.owner], keys)

    def add(
        self, batch: RunningBatch, thresholds: Mapping[str, int], unmet: int, until: float
    ) -> None:
        """Let a batch wait; see `RunningBatch`."""
        batch.thresholds, batch.unmet = thresholds, unmet
        self._count(batch.budget.owner, len(thresholds))
        for key in thresholds:
            self._by_key.setdefault(key, {})[batch] = None
        self._by_ticket[batch.ticket] = batch
        self._ends.set(batch.ticket, until)

    def remove(self, batch: RunningBatch) -> None:
        """End the wait of a batch."""
        self._count(batch.budget.owner, -len(batch.thresholds))
        for key in batch.thresholds:
            others = self._by_key[key]
            del others[batch]
            if not others:
                del self._by_key[key]
        batch.thresholds = {}
        self._woken.pop(batch, None)
        del self._by_ticket[batch.ticket]
        self._ends.discard(batch.ticket)

    def tell(self, key: str, before: int, after: int) -> int:
        """Wake batches because a key has a new revision (0: missing); count those that wait."""
        waiting = self._by_key.get(key, ())
        for batch in waiting:
            threshold = batch.thresholds[key]
            batch.unmet += (before > threshold) - (after > threshold)
            if batch.unmet <= 0:
                self._woken[batch] = None
        return len(waiting)

    def take_woken(self) -> RunningBatch | None:
        """Take out and return the batch that was woken first and can go on; None if none can."""
        while self._woken:
            batch = next(iter(self._woken))
            del self._woken[batch]
            if batch.unmet <= 0:  # otherwise a later write has undone its condition
                self.remove(batch)
                return batch
        return None

    def due(self, now: float) -> RunningBatch | None:
        """Return the batch whose wait ended first; the caller has to remove it. None: none has."""
        tickets = self._ends.due(now, most=1)
        return self._by_ticket[tickets[0]] if tickets else None

    def below(self, prefix: str) -> Iterator[tuple[str, RunningBatch]]:
        """Yield the batches that wait for keys below a prefix; they may be removed meanwhile."""
        for key in [key for key in self._by_key if key.startswith(prefix)]:
            for batch in list(self._by_key.get(key, ())):
                yield key, batch

    def next_deadline(self) -> float | None:
        """Return the time at which the next wait ends, or None."""
        return self._ends.next()

    def _count(self, owner: Owner, more: int) -> None:
        self._keys += more
        self._keys_of[owner] += more
        if not self._keys_of[owner]:
            del self._keys_of[owner]
