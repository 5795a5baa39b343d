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
* `limits` bound what a client's batch may cost and leave behind. An operation over a bound is
  refused, and the batch goes on. The driver's own batches have no bounds. `StoreSpace` knows the
  room that each client's keys take.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from msgspec import Struct

from rendezvous import wire
from rendezvous.limits import (
    BYTES_PER_LOOK,
    DELETE_COST,
    READ_COST,
    TOLD_COST,
    UNLIMITED,
    Budget,
    Hits,
    Limits,
    Owner,
    StoreSpace,
)
from rendezvous.waiting import Deadlines, RunningBatch, WaitingBatches

_COUNTER_LIMIT = 2**63  # counters are what torch's stores hold: signed 64-bit
_LONG_WAIT_S = 1.0
_TICK_S = 0.125  # long waits end on common ticks, because ending many at once is cheaper
_SHARED_ANSWERS = 256  # answers kept between two changes, because many clients ask the same
_SHARED_BYTES = 64 * 1024 * 1024  # of values in them
_ENDED_KEYS = 16384  # that are waited for no longer after one call of `expire`, or a few more
_COUNTER_DIGITS = 20  # a longer text is no counter
_USERS, _SYSTEM = 0, 1  # kinds of sealed prefixes


class Answered(Struct, frozen=True):
    """A batch is done: one result for each of its operations."""

    ticket: Hashable
    results: tuple[wire.Result, ...]


class KeyExpired(Struct, frozen=True):
    """The lease on `key` was not renewed in time; the key is deleted."""

    key: str


Outcome = Answered | KeyExpired


class KVStore:
    """Keys, values, revisions, leases, and batches that wait.

    Revisions start at `first_revision`. If a store replaces another one, this number is larger than
    any revision of the old store: clients wait for a revision above the last one they saw.
    `passing`: keys that begin like this are not kept for the next store; None: no key is.
    `system`: keys that begin like this are the job's own; `is_of_crowd`: see `StoreSpace`.
    """

    def __init__(
        self,
        first_revision: int = 0,
        passing: tuple[str, ...] | None = None,
        limits: Limits | None = None,
        hits: Hits | None = None,
        system: tuple[str, ...] = (),
        *,
        is_of_crowd: Callable[[Owner], bool] = lambda _owner: False,
    ) -> None:
        self._revision = first_revision
        self._passing = passing
        self._limits = Limits() if limits is None else limits
        self._hits = Hits() if hits is None else hits
        self._space = StoreSpace(system, is_of_crowd)
        self._shared_bytes = 0
        self._changed: dict[str, None] = {}  # keys to be kept, since `take_changes`
        self._data: dict[str, wire.Entry] = {}
        self._leases: Deadlines[str] = Deadlines()
        self._waiting = WaitingBatches()
        self._runnable: deque[RunningBatch] = deque()  # new batches, and those resumed
        self._sealed = _SealedPrefixes(system)
        self._shared: dict[tuple[tuple[str, ...], bool], wire.Entries] = {}  # since the last change
        self._outcomes: list[Outcome] = []

    @property
    def waiting(self) -> tuple[Hashable, ...]:
        """The tickets of the batches that wait."""
        return self._waiting.tickets

    def take_changes(self) -> dict[str, bytes | None]:
        """Return the keys for the next store that have changed since the last call.

        None stands for a key that is gone, or has a lease: it ends with its holder.
        """
        changed, self._changed = self._changed, {}
        kept = {key: self._data[key].value for key in changed if key in self._data}
        return {key: None if key in self._leases else kept.get(key) for key in changed}

    # ---- commands ------------------------------------------------------------------------

    def submit(
        self,
        ticket: Hashable,
        operations: Sequence[wire.Operation],
        now: float,
        *,
        bounded: bool = True,
        owner: Owner = None,
    ) -> list[Outcome]:
        """Carry out a batch; return all outcomes, those of other batches included.

        `ticket` names the batch until it is answered, exactly once, by this call or a later one.
        `bounded`: it is a client's, and the limits hold for it. `owner`: of what it writes.
        Raises ValueError if a waiting batch already has this ticket.
        """
        if self._waiting.find(ticket) is not None:
            raise ValueError(f"ticket {ticket!r} is already waiting")
        budget = Budget(self._limits if bounded else UNLIMITED, self._hits, owner)
        self._runnable.append(RunningBatch(ticket, operations, budget))
        return self._run(now)

    def cancel(self, ticket: Hashable) -> tuple[wire.Result, ...] | None:
        """Forget a waiting batch; return the results it had so far.

        Returns None if no such batch waits. The rest of its operations are not carried out,
        unless they are submitted again under another ticket.
        """
        batch = self._waiting.find(ticket)
        if batch is None:
            return None
        self._waiting.remove(batch)
        return tuple(batch.results)

    def expire(self, now: float) -> list[Outcome]:
        """End the leases and waits that are due; return all outcomes.

        Waits for very many keys are ended in several calls: call again if `next_deadline` is due.
        """
        for key in self._leases.due(now):
            self._delete(key)
            self._outcomes.append(KeyExpired(key))
        ended = 0
        while ended < _ENDED_KEYS and (batch := self._waiting.due(now)):
            keys = tuple(batch.thresholds)
            ended += len(keys)
            self._resume(batch, self._found(keys, timed_out=True))
        return self._run(now)

    def postpone_leases(self, seconds: float) -> None:
        """Extend every lease: the store's owner was held up, not the holders."""
        self._leases.postpone(seconds)

    def next_deadline(self) -> float | None:
        """Return the time at which `expire` is due next, or None."""
        lease, wait = self._leases.next(), self._waiting.next_deadline()
        return min((at for at in (lease, wait) if at is not None), default=None)

    # ---- running batches -----------------------------------------------------------------

    def _run(self, now: float) -> list[Outcome]:
        """Continue batches until all are done or wait; return the outcomes."""
        while batch := self._runnable.popleft() if self._runnable else self._waiting.take_woken():
            self._carry_on(batch, now)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _carry_on(self, batch: RunningBatch, now: float) -> None:
        while len(batch.results) < len(batch.operations):
            result = self._carry_out(batch.operations[len(batch.results)], batch, now)
            if result is None:
                return
            batch.results.append(batch.budget.fit(result))
        self._outcomes.append(Answered(batch.ticket, tuple(batch.results)))

    def _carry_out(
        self, operation: wire.Operation, batch: RunningBatch, now: float
    ) -> wire.Result | None:
        """Return the operation's result, or None if the batch now waits for it."""
        budget = batch.budget
        if refused := budget.over():
            return refused
        match operation:
            case wire.Get(keys=keys) | wire.Watch(keys=keys):
                budget.spend(READ_COST * len(keys))
                return self._read(operation, batch, now)
            case wire.Set(key=key, value=value, lease=lease):
                return self._set(key, value, None if lease is None else now + lease, budget)
            case wire.Add(key=key, amount=amount):
                return self._add(key, amount, budget)
            case wire.Append(key=key, value=value):
                return self._append(key, value, budget)
            case wire.CompareSet(key=key, expected=expected, desired=desired):
                return self._compare_set(key, expected, desired, budget)
            case wire.Delete(key=key):
                return wire.Number(int(self._delete(key)))
            case wire.DeletePrefix(prefix=prefix, seal=seal):
                return self._delete_prefix(prefix, seal, budget)
            case wire.Count(prefix=prefix):
                budget.spend(len(self._data))
                return wire.Number(len([0 for key in self._data if key.startswith(prefix)]))

    # ---- waiting -------------------------------------------------------------------------

    def _read(
        self, operation: wire.Get | wire.Watch, batch: RunningBatch, now: float
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
        if refused := self._waiting.refuse(batch, len(thresholds)):
            return refused
        until = now + operation.wait
        if operation.wait >= _LONG_WAIT_S:
            until = math.ceil(until / _TICK_S) * _TICK_S
        self._waiting.add(batch, thresholds, unmet, until)
        return None

    def _resume(self, batch: RunningBatch, result: wire.Result) -> None:
        """End the operation that a parked batch waits for with this result."""
        self._waiting.remove(batch)
        batch.results.append(batch.budget.fit(result))
        self._runnable.append(batch)

    def _found(self, keys: tuple[str, ...], timed_out: bool = False) -> wire.Entries:
        """Return the keys' entries; the same object for all who ask until something changes."""
        entries = self._shared.get((keys, timed_out))
        if entries is None:
            held = {key: self._data[key] for key in keys if key in self._data}
            entries = wire.Entries(held, timed_out)
            if len(self._shared) >= _SHARED_ANSWERS or self._shared_bytes > _SHARED_BYTES:
                self._forget_shared()
            self._shared[keys, timed_out] = entries
            self._shared_bytes += entries.size
        return entries

    def _forget_shared(self) -> None:
        if self._shared:
            self._shared.clear()
            self._shared_bytes = 0

    # ---- writing -------------------------------------------------------------------------

    def revision_of(self, key: str) -> int:
        """Return the revision of a key's last write; 0 if the key is missing."""
        entry = self._data.get(key)
        return entry.revision if entry else 0

    def _set(self, key: str, value: bytes, lease_ends: float | None, budget: Budget) -> wire.Result:
        result = self._write(key, value, budget)
        if isinstance(result, wire.Written):
            if lease_ends is None:
                self._leases.discard(key)
            else:
                self._leases.set(key, lease_ends)
        return result

    def _add(self, key: str, amount: int, budget: Budget) -> wire.Result:
        entry = self._data.get(key)
        text = entry.value if entry else b"0"
        try:
            number = int(text[: _COUNTER_DIGITS + 1]) + amount
            if len(text) > _COUNTER_DIGITS:
                raise ValueError
        except ValueError:
            problem = f"key {key!r} holds {text[:40]!r}, which is no number"
            return wire.StoreRefusal("not_a_number", problem)
        if not -_COUNTER_LIMIT <= number < _COUNTER_LIMIT:
            return wire.StoreRefusal("too_large", f"key {key!r}: the sum does not fit into 64 bits")
        refused = self._write(key, str(number).encode(), budget)
        return refused if isinstance(refused, wire.StoreRefusal) else wire.Number(number)

    def _append(self, key: str, value: bytes, budget: Budget) -> wire.Result:
        entry = self._data.get(key)
        held = entry.value if entry else b""
        budget.spend((len(held) + len(value)) // BYTES_PER_LOOK)
        return self._write(key, held + value, budget)

    def _compare_set(
        self, key: str, expected: bytes | None, desired: bytes, budget: Budget
    ) -> wire.Result:
        entry = self._data.get(key)
        held = entry.value if entry else None
        if held != expected:
            return self._refuse_sealed(key) or wire.Compared(False, held)
        refused = self._write(key, desired, budget)
        return refused if isinstance(refused, wire.StoreRefusal) else wire.Compared(True, desired)

    def _write(self, key: str, value: bytes, budget: Budget) -> wire.Written | wire.StoreRefusal:
        if refused := self._refuse_sealed(key):
            return refused
        if len(value) > wire.MAX_VALUE_BYTES:
            limit = wire.MAX_VALUE_BYTES
            problem = f"key {key!r}: {len(value)} bytes are over the limit of {limit}"
            return wire.StoreRefusal("too_large", problem)
        held = self._data.get(key)
        before = None if held is None else len(held.value)
        full = self._space.refuse(key, before, len(value), budget.owner, budget.limits)
        if full is not None:
            bound, code, problem = full
            return budget.refuse(bound, code, f"key {key!r}: {problem}")
        self._space.put(key, before, len(value), budget.owner)
        self._revision += 1
        self._data[key] = wire.Entry(value, self._revision)
        since = 0 if held is None else held.revision
        if told := self._changed_to(key, since, self._revision):
            budget.spend(TOLD_COST * told)
        return wire.Written(self._revision)

    def _delete(self, key: str) -> bool:
        entry = self._data.pop(key, None)
        self._leases.discard(key)
        if entry is not None:
            self._space.drop(key, len(entry.value))
            self._changed_to(key, entry.revision, 0)
        return entry is not None

    def _delete_prefix(self, prefix: str, seal: bool, budget: Budget) -> wire.Result:
        keys = [key for key in self._data if key.startswith(prefix)]
        if seal and (refused := self._seal(prefix, budget)):
            return refused
        for key in keys:
            self._delete(key)
        budget.spend(len(self._data) + DELETE_COST * len(keys))
        if seal:
            for key, batch in self._waiting.below(prefix):
                self._resume(batch, _sealed(key, prefix))
        return wire.Number(len(keys))

    def _seal(self, prefix: str, budget: Budget) -> wire.StoreRefusal | None:
        if prefix not in self._sealed:
            most = budget.limits.seal_lengths
            if self._sealed.lengths_with(prefix) > most:
                problem = (
                    f"{prefix!r} cannot be sealed; take one as long as one of the {most} before"
                )
                return budget.refuse("seals", "too_large", problem)
            if full := self._space.refuse(prefix, None, 0, budget.owner, budget.limits):
                bound, code, problem = full
                return budget.refuse(bound, code, f"{prefix!r} cannot be sealed: {problem}")
            self._space.seal(prefix, budget.owner)
            self._sealed.add(prefix)
        return None

    def _changed_to(self, key: str, before: int, after: int) -> int:
        """Record a key's new revision (0: missing); return how many batches wait for the key."""
        if self._passing is not None and not key.startswith(self._passing):
            self._changed[key] = None
        self._forget_shared()
        return self._waiting.tell(key, before, after)

    def _refuse_sealed(self, key: str) -> wire.StoreRefusal | None:
        prefix = self._sealed.above(key)
        return None if prefix is None else _sealed(key, prefix)


class _SealedPrefixes:
    """The prefixes below which nothing may be written or waited for any more.

    A look at a key costs one lookup for each length that they have. Keys that begin with one of
    `system` are the job's own; prefixes of users cost them nothing. A prefix is either longer than
    one of `system`, or no beginning of any.
    """

    def __init__(self, system: tuple[str, ...] = ()) -> None:
        self._system = system
        self._prefixes: set[str] = set()
        self._lengths: tuple[dict[int, None], dict[int, None]] = ({}, {})

    def __contains__(self, prefix: str) -> bool:
        """Return whether exactly this prefix is sealed."""
        return prefix in self._prefixes

    def add(self, prefix: str) -> None:
        """Seal a prefix."""
        self._prefixes.add(prefix)
        self._lengths[self._kind(prefix)][len(prefix)] = None

    def lengths_with(self, prefix: str) -> int:
        """Return how many lengths there would be to look up with this prefix."""
        lengths = self._lengths[self._kind(prefix)]
        return len(lengths) + (len(prefix) not in lengths)

    def above(self, key: str) -> str | None:
        """Return a sealed prefix that a key begins with, or None."""
        for length in self._lengths[self._kind(key)]:
            if key[:length] in self._prefixes:
                return key[:length]
        return None

    def _kind(self, key: str) -> int:
        return _SYSTEM if key.startswith(self._system) else _USERS


def _sealed(key: str, prefix: str) -> wire.StoreRefusal:
    problem = f"key {key!r}: everything below {prefix!r} is over and sealed"
    return wire.StoreRefusal("sealed", problem)
