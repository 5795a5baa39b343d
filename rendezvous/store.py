"""The key-value store where processes meet: operations in, results out.

The store decides the result of every operation of `wire`, which batch waits for which key, and
which lease has expired. `service` calls it from one thread. It reads no clock, never blocks, and
does not know the meaning of keys. Times are seconds on the caller's monotonic clock.

The operations of a batch are carried out in order. Until one of them has to wait, no operation of
another batch is carried out; when the wait is over, the batch goes on.

* Every write gets the next store-wide revision; a missing key counts as revision 0.
* A lease belongs to a key: `Set` with `lease` starts or renews it, `Set` without ends it, other
  writes leave it as it is, deletion ends it without notice. Only `expire` lets a lease expire,
  so a store whose owner was held up can call `postpone_leases` first.
* Below a sealed prefix, writes and waits are refused as long as the store exists; no keys exist
  there.
"""

import heapq
import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from msgspec import Struct

from rendezvous import wire

T = TypeVar("T", bound=Hashable)

_COUNTER_LIMIT = 2**63  # counters are what torch's stores hold: signed 64-bit
_LONG_WAIT_S = 1.0
_TICK_S = 0.125  # long waits end on common ticks, because ending many at once is cheaper
_SWEEP_ABOVE = 64  # below this many stale entries a sweep costs more than it frees
_SHARED_ANSWERS = 256  # answers kept between two changes, because many clients ask the same


class Answered(Struct, frozen=True):
    """A batch is done: one result for each of its operations."""

    ticket: Hashable
    results: tuple[wire.Result, ...]


class KeyExpired(Struct, frozen=True):
    """The lease on `key` was not renewed in time; the key is deleted."""

    key: str


Outcome = Answered | KeyExpired


@dataclass(eq=False, slots=True)
class _RunningBatch:
    """A batch, the results it has so far, and the revisions it waits for.

    While it waits, `thresholds` holds the revision that each key must pass, and `unmet` how many
    more keys must do so (0 or less: the wait is over). The store's index lists this batch under
    every key in `thresholds`, and each write to one of them updates `unmet`.
    """

    ticket: Hashable
    operations: Sequence[wire.Operation]
    results: list[wire.Result] = field(default_factory=list)
    thresholds: dict[str, int] = field(default_factory=dict)
    unmet: int = 0


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

    def due(self, now: float) -> list[T]:
        """Take out and return the items with a deadline at or before `now`, earliest first."""
        ready: list[T] = []
        while (at := self.next()) is not None and at <= now:
            item = heapq.heappop(self._heap)[2]
            del self._at[item]
            ready.append(item)
        return ready


class KVStore:
    """Keys, values, revisions, leases, and batches that wait.

    Revisions start at `first_revision`. If a store replaces another one, this number is larger than
    any revision of the old store: clients wait for a revision above the last one they saw.
    `passing`: keys that begin like this are not kept for the next store; None: no key is.
    """

    def __init__(self, first_revision: int = 0, passing: tuple[str, ...] | None = None) -> None:
        self._revision = first_revision
        self._passing = passing
        self._changed: dict[str, None] = {}  # keys to be kept, since `take_changes`
        self._data: dict[str, wire.Entry] = {}
        self._leases: Deadlines[str] = Deadlines()
        self._parked: dict[Hashable, _RunningBatch] = {}
        self._waits: Deadlines[Hashable] = Deadlines()  # tickets of parked batches
        self._index: dict[str, dict[_RunningBatch, None]] = {}  # waiting on a key, oldest first
        self._runnable: deque[_RunningBatch] = deque()  # new batches, and those resumed
        self._woken: dict[_RunningBatch, None] = {}  # parked batches whose condition came true
        self._sealed: set[str] = set()
        self._sealed_lengths: dict[int, None] = {}  # a check costs one lookup per length
        self._shared: dict[tuple[tuple[str, ...], bool], wire.Entries] = {}  # since the last change
        self._outcomes: list[Outcome] = []

    @property
    def waiting(self) -> tuple[Hashable, ...]:
        """The tickets of the batches that wait."""
        return tuple(self._parked)

    def take_changes(self) -> dict[str, bytes | None]:
        """Return the keys for the next store that have changed since the last call.

        None stands for a key that is gone, or has a lease: it ends with its holder.
        """
        changed, self._changed = self._changed, {}
        kept = {key: self._data[key].value for key in changed if key in self._data}
        return {key: None if key in self._leases else kept.get(key) for key in changed}

    # ---- commands ------------------------------------------------------------------------

    def submit(
        self, ticket: Hashable, operations: Sequence[wire.Operation], now: float
    ) -> list[Outcome]:
        """Carry out a batch; return all outcomes, those of other batches included.

        `ticket` names the batch until it is answered, exactly once, by this call or a later one.
        Raises ValueError if a waiting batch already has this ticket.
        """
        if ticket in self._parked:
            raise ValueError(f"ticket {ticket!r} is already waiting")
        self._runnable.append(_RunningBatch(ticket, operations))
        return self._run(now)

    def cancel(self, ticket: Hashable) -> tuple[wire.Result, ...] | None:
        """Forget a waiting batch; return the results it had so far.

        Returns None if no such batch waits. The rest of its operations are not carried out,
        unless they are submitted again under another ticket.
        """
        batch = self._parked.get(ticket)
        if batch is None:
            return None
        self._unpark(batch)
        return tuple(batch.results)

    def expire(self, now: float) -> list[Outcome]:
        """End the leases and waits that are due; return all outcomes."""
        for key in self._leases.due(now):
            self._delete(key)
            self._outcomes.append(KeyExpired(key))
        for ticket in self._waits.due(now):
            batch = self._parked[ticket]
            self._resume(batch, self._found(tuple(batch.thresholds), timed_out=True))
        return self._run(now)

    def postpone_leases(self, seconds: float) -> None:
        """Extend every lease: the store's owner was held up, not the holders."""
        self._leases.postpone(seconds)

    def next_deadline(self) -> float | None:
        """Return the time at which `expire` is due next, or None."""
        lease, wait = self._leases.next(), self._waits.next()
        return min((at for at in (lease, wait) if at is not None), default=None)

    # ---- running batches -----------------------------------------------------------------

    def _run(self, now: float) -> list[Outcome]:
        """Continue batches until all are done or wait; return the outcomes."""
        while self._runnable or self._woken:
            if self._runnable:
                batch = self._runnable.popleft()
            else:
                batch = next(iter(self._woken))
                del self._woken[batch]
                if batch.unmet > 0:
                    continue  # the batch that woke it has since undone the condition
                self._unpark(batch)
            self._carry_on(batch, now)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _carry_on(self, batch: _RunningBatch, now: float) -> None:
        while len(batch.results) < len(batch.operations):
            result = self._carry_out(batch.operations[len(batch.results)], batch, now)
            if result is None:
                return
            batch.results.append(result)
        self._outcomes.append(Answered(batch.ticket, tuple(batch.results)))

    def _carry_out(
        self, operation: wire.Operation, batch: _RunningBatch, now: float
    ) -> wire.Result | None:
        """Return the operation's result, or None if the batch now waits for it."""
        match operation:
            case wire.Get() | wire.Watch():
                return self._read(operation, batch, now)
            case wire.Set(key=key, value=value, lease=lease):
                return self._set(key, value, None if lease is None else now + lease)
            case wire.Add(key=key, amount=amount):
                return self._add(key, amount)
            case wire.Append(key=key, value=value):
                entry = self._data.get(key)
                return self._write(key, (entry.value if entry else b"") + value)
            case wire.CompareSet(key=key, expected=expected, desired=desired):
                return self._compare_set(key, expected, desired)
            case wire.Delete(key=key):
                return wire.Number(int(self._delete(key)))
            case wire.DeletePrefix(prefix=prefix, seal=seal):
                return self._delete_prefix(prefix, seal)
            case wire.Count(prefix=prefix):
                return wire.Number(sum(key.startswith(prefix) for key in self._data))

    # ---- waiting -------------------------------------------------------------------------

    def _read(
        self, operation: wire.Get | wire.Watch, batch: _RunningBatch, now: float
    ) -> wire.Result | None:
        """Return the entries, or None if the batch now waits: Get for all keys, Watch for one."""
        if isinstance(operation, wire.Get):
            thresholds = dict.fromkeys(operation.keys, operation.after)
            unmet = sum(self.revision_of(key) <= operation.after for key in thresholds)
            shown, conditional = tuple(thresholds), operation.after > 0
        else:
            thresholds = operation.keys
            newer = tuple(k for k, after in thresholds.items() if self.revision_of(k) > after)
            unmet, shown, conditional = int(not newer), newer or tuple(thresholds), True
        if unmet == 0 or operation.wait <= 0:
            return self._found(shown, timed_out=unmet > 0 and conditional)
        for key in thresholds:
            if refused := self._refuse_sealed(key):
                return refused
        batch.thresholds, batch.unmet = thresholds, unmet
        for key in thresholds:
            self._index.setdefault(key, {})[batch] = None
        self._parked[batch.ticket] = batch
        until = now + operation.wait
        if operation.wait >= _LONG_WAIT_S:
            until = math.ceil(until / _TICK_S) * _TICK_S
        self._waits.set(batch.ticket, until)
        return None

    def _unpark(self, batch: _RunningBatch) -> None:
        for key in batch.thresholds:
            waiters = self._index[key]
            del waiters[batch]
            if not waiters:
                del self._index[key]
        batch.thresholds = {}
        self._woken.pop(batch, None)
        del self._parked[batch.ticket]
        self._waits.discard(batch.ticket)

    def _resume(self, batch: _RunningBatch, result: wire.Result) -> None:
        """End the operation that a parked batch waits for with this result."""
        self._unpark(batch)
        batch.results.append(result)
        self._runnable.append(batch)

    def _found(self, keys: tuple[str, ...], timed_out: bool = False) -> wire.Entries:
        """Return the keys' entries; the same object for all who ask until something changes."""
        entries = self._shared.get((keys, timed_out))
        if entries is None:
            if len(self._shared) >= _SHARED_ANSWERS:
                self._shared.clear()
            held = {key: self._data[key] for key in keys if key in self._data}
            entries = self._shared[keys, timed_out] = wire.Entries(held, timed_out)
        return entries

    # ---- writing -------------------------------------------------------------------------

    def revision_of(self, key: str) -> int:
        """Return the revision of a key's last write; 0 if the key is missing."""
        entry = self._data.get(key)
        return entry.revision if entry else 0

    def _set(self, key: str, value: bytes, lease_ends: float | None) -> wire.Result:
        result = self._write(key, value)
        if isinstance(result, wire.Written):
            if lease_ends is None:
                self._leases.discard(key)
            else:
                self._leases.set(key, lease_ends)
        return result

    def _add(self, key: str, amount: int) -> wire.Result:
        entry = self._data.get(key)
        text = entry.value if entry else b"0"
        try:
            number = int(text) + amount
        except ValueError:
            problem = f"key {key!r} holds {text[:40]!r}, which is no number"
            return wire.StoreRefusal("not_a_number", problem)
        if not -_COUNTER_LIMIT <= number < _COUNTER_LIMIT:
            return wire.StoreRefusal("too_large", f"key {key!r}: the sum does not fit into 64 bits")
        refused = self._write(key, str(number).encode())
        return refused if isinstance(refused, wire.StoreRefusal) else wire.Number(number)

    def _compare_set(self, key: str, expected: bytes | None, desired: bytes) -> wire.Result:
        entry = self._data.get(key)
        held = entry.value if entry else None
        if held != expected:
            return self._refuse_sealed(key) or wire.Compared(False, held)
        refused = self._write(key, desired)
        return refused if isinstance(refused, wire.StoreRefusal) else wire.Compared(True, desired)

    def _write(self, key: str, value: bytes) -> wire.Written | wire.StoreRefusal:
        if refused := self._refuse_sealed(key):
            return refused
        if len(value) > wire.MAX_VALUE_BYTES:
            limit = wire.MAX_VALUE_BYTES
            problem = f"key {key!r}: {len(value)} bytes are over the limit of {limit}"
            return wire.StoreRefusal("too_large", problem)
        self._revision += 1
        before = self.revision_of(key)
        self._data[key] = wire.Entry(value, self._revision)
        self._tell_waiters(key, before, self._revision)
        return wire.Written(self._revision)

    def _delete(self, key: str) -> bool:
        entry = self._data.pop(key, None)
        self._leases.discard(key)
        if entry is not None:
            self._tell_waiters(key, entry.revision, 0)
        return entry is not None

    def _delete_prefix(self, prefix: str, seal: bool) -> wire.Result:
        keys = [key for key in self._data if key.startswith(prefix)]
        for key in keys:
            self._delete(key)
        if seal:
            self._sealed.add(prefix)
            self._sealed_lengths[len(prefix)] = None
            for key in [key for key in self._index if key.startswith(prefix)]:
                for batch in list(self._index.get(key, ())):
                    self._resume(batch, _sealed(key, prefix))
        return wire.Number(len(keys))

    def _tell_waiters(self, key: str, before: int, after: int) -> None:
        """Update `unmet` of the batches that wait for a key (revision 0: missing)."""
        if self._passing is not None and not key.startswith(self._passing):
            self._changed[key] = None
        self._shared.clear()
        for batch in self._index.get(key, ()):
            threshold = batch.thresholds[key]
            batch.unmet += (before > threshold) - (after > threshold)
            if batch.unmet <= 0:
                self._woken[batch] = None

    def _refuse_sealed(self, key: str) -> wire.StoreRefusal | None:
        for length in self._sealed_lengths:
            if key[:length] in self._sealed:
                return _sealed(key, key[:length])
        return None


def _sealed(key: str, prefix: str) -> wire.StoreRefusal:
    problem = f"key {key!r}: everything below {prefix!r} is over and sealed"
    return wire.StoreRefusal("sealed", problem)
