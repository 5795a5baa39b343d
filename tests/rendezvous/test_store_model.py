"""The store against a naive model that rescans everything after every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rendezvous.store import Answered, KeyExpired, KVStore, Outcome
from rendezvous.wire import (
    Add,
    Append,
    Compared,
    CompareSet,
    Count,
    Delete,
    DeletePrefix,
    Entries,
    Entry,
    Get,
    Number,
    Operation,
    Result,
    Set,
    StoreRefusal,
    Watch,
    Written,
)

keys = st.sampled_from(["p/a", "p/b", "p/c/d", "q/a", "q/b", "r"])
prefixes = st.sampled_from(["p/", "p/c/", "q/", "q", "r", "s/"])
values = st.sampled_from([b"", b"0", b"7", b"x"])
waits = st.sampled_from([0.0, 1.0, 5.0, 20.0])
afters = st.sampled_from([0, 0, 1, 3, 8])
operations = st.one_of(
    st.builds(Set, keys, values, st.sampled_from([None, None, 2.0, 10.0])),
    st.builds(Get, st.lists(keys, min_size=1, max_size=4).map(tuple), waits, afters),
    st.builds(Watch, st.dictionaries(keys, afters, min_size=1), waits),
    st.builds(Add, keys, st.integers(-3, 3)),
    st.builds(Append, keys, values),
    st.builds(CompareSet, keys, st.none() | values, values),
    st.builds(Delete, keys),
    st.builds(DeletePrefix, prefixes),
    st.builds(Count, prefixes),
)


@dataclass
class Waiting:
    ticket: int
    todo: list[Operation]
    results: list[Result] = field(default_factory=list)
    until: float | None = None


class Model:
    """What the store should do, written for the eye and not for speed."""

    def __init__(self) -> None:
        self.revision = 0
        self.data: dict[str, Entry] = {}
        self.leases: dict[str, float] = {}
        self.sealed: list[str] = []
        self.waiting: list[Waiting] = []
        self.answers: dict[int, tuple[Result, ...]] = {}

    def is_sealed(self, key: str) -> bool:
        return any(key.startswith(prefix) for prefix in self.sealed)

    def write(self, key: str, value: bytes) -> Result:
        if self.is_sealed(key):
            return StoreRefusal("sealed", "")
        self.revision += 1
        self.data[key] = Entry(value, self.revision)
        return Written(self.revision)

    def delete(self, key: str) -> int:
        self.leases.pop(key, None)
        return int(self.data.pop(key, None) is not None)

    def newer(self, key: str, after: int) -> bool:
        return key in self.data and self.data[key].revision > after

    def read(self, operation: Operation) -> tuple[bool, list[str]]:
        """Whether a Get or Watch is satisfied, and the keys it answers with."""
        if isinstance(operation, Get):
            asked = list(operation.keys)
            return all(self.newer(key, operation.after) for key in asked), asked
        assert isinstance(operation, Watch)
        changed = [key for key, after in operation.keys.items() if self.newer(key, after)]
        return bool(changed), changed or list(operation.keys)

    def found(self, asked: list[str], timed_out: bool) -> Entries:
        return Entries({k: self.data[k] for k in asked if k in self.data}, timed_out)

    def step(self, one: Waiting, now: float) -> Result | None:
        match operation := one.todo[0]:
            case Get() | Watch():
                satisfied, asked = self.read(operation)
                if satisfied:
                    return self.found(asked, False)
                if one.until is None and operation.wait > 0:
                    one.until = now + operation.wait
                if one.until is None or now >= one.until:
                    plain = isinstance(operation, Get) and operation.after == 0
                    return self.found(asked, one.until is not None or not plain)
                if any(self.is_sealed(key) for key in operation.keys):
                    return StoreRefusal("sealed", "")
                return None
            case Set(key=key, value=value, lease=lease):
                result = self.write(key, value)
                if isinstance(result, Written):
                    self.leases.pop(key, None)
                    if lease is not None:
                        self.leases[key] = now + lease
                return result
            case Add(key=key, amount=amount):
                old = self.data[key].value if key in self.data else b"0"
                if not old.lstrip(b"-").isdigit():
                    return StoreRefusal("not_a_number", "")
                result = self.write(key, str(int(old) + amount).encode())
                return result if isinstance(result, StoreRefusal) else Number(int(old) + amount)
            case Append(key=key, value=value):
                return self.write(key, (self.data[key].value if key in self.data else b"") + value)
            case CompareSet(key=key, expected=expected, desired=desired):
                held = self.data[key].value if key in self.data else None
                if self.is_sealed(key):
                    return StoreRefusal("sealed", "")
                if held == expected:
                    self.write(key, desired)
                    return Compared(True, desired)
                return Compared(False, held)
            case Delete(key=key):
                return Number(self.delete(key))
            case DeletePrefix(prefix=prefix, seal=seal):
                hit = [key for key in self.data if key.startswith(prefix)]
                for key in hit:
                    self.delete(key)
                if seal:
                    self.sealed.append(prefix)
                return Number(len(hit))
            case Count(prefix=prefix):
                return Number(sum(key.startswith(prefix) for key in self.data))

    def run(self, one: Waiting, now: float) -> None:
        while one.todo:
            result = self.step(one, now)
            if result is None:
                return
            one.results.append(result)
            one.todo.pop(0)
            one.until = None
        self.waiting.remove(one)
        self.answers[one.ticket] = tuple(one.results)


def plain(results: tuple[Result, ...]) -> tuple[Result, ...]:
    """Results without the words of refusals."""
    return tuple(StoreRefusal(r.code, "") if isinstance(r, StoreRefusal) else r for r in results)


class StoreMachine(RuleBasedStateMachine):
    """Batches with at most one wait, at their end, so that the order of waking cannot matter."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.model = KVStore(), Model()
        self.now, self.tickets = 0.0, 0
        self.answered: dict[int, tuple[Result, ...]] = {}

    def take(self, outcomes: list[Outcome]) -> list[str]:
        for outcome in outcomes:
            if isinstance(outcome, Answered):
                ticket = int(str(outcome.ticket))
                assert ticket not in self.answered, "answered twice"
                self.answered[ticket] = plain(outcome.results)
        return [outcome.key for outcome in outcomes if isinstance(outcome, KeyExpired)]

    def settle(self) -> None:
        for one in list(self.model.waiting):
            self.model.run(one, self.now)

    @rule(batch=st.lists(operations, min_size=1, max_size=4))
    def submit(self, batch: list[Operation]) -> None:
        batch = [o for o in batch[:-1] if not getattr(o, "wait", 0)] + batch[-1:]
        self.tickets += 1
        one = Waiting(self.tickets, list(batch))
        self.model.waiting.append(one)
        self.model.run(one, self.now)
        self.settle()
        assert self.take(self.store.submit(self.tickets, tuple(batch), self.now)) == []

    @rule(prefix=prefixes)
    def seal(self, prefix: str) -> None:
        self.submit([DeletePrefix(prefix, seal=True)])

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 10.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        over = sorted(key for key, at in self.model.leases.items() if at <= self.now)
        for key in over:
            self.model.delete(key)
        self.settle()
        assert sorted(self.take(self.store.expire(self.now))) == over

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if not self.model.waiting:
            assert self.store.cancel(self.tickets) is None
            return
        one = data.draw(st.sampled_from(self.model.waiting))
        self.model.waiting.remove(one)
        assert plain(self.store.cancel(one.ticket) or ()) == plain(tuple(one.results))

    @invariant()
    def both_answered_the_same(self) -> None:
        assert self.answered == {t: plain(r) for t, r in self.model.answers.items()}

    @invariant()
    def the_index_holds_exactly_those_who_wait(self) -> None:
        store = self.store
        assert sorted(store._waiting._by_ticket) == sorted(one.ticket for one in self.model.waiting)
        pairs = {
            (key, batch.ticket) for key, who in store._waiting._by_key.items() for batch in who
        }
        assert pairs == {
            (key, ticket)
            for ticket, batch in store._waiting._by_ticket.items()
            for key in batch.thresholds
        }
        assert all(store._waiting._by_key.values()), "an empty set of waiters was left behind"
        assert not store._runnable
        assert not store._waiting._woken

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        for batch in self.store._waiting._by_ticket.values():
            current = batch.operations[len(batch.results)]
            assert isinstance(current, Get | Watch)
            met = sum(
                self.store.revision_of(key) > after for key, after in batch.thresholds.items()
            )
            needed = len(batch.thresholds) if isinstance(current, Get) else 1
            assert batch.unmet == needed - met
            assert batch.unmet > 0

    @invariant()
    def the_next_deadline_is_the_earliest_one(self) -> None:
        ends = [*self.model.leases.values()]
        ends += [one.until for one in self.model.waiting if one.until is not None]
        assert self.store.next_deadline() == min(ends, default=None)


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStoreAgainstModel = StoreMachine.TestCase
