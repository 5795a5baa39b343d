from __future__ import annotations

from collections.abc import Hashable

import pytest

from rendezvous.store import Answered, KeyExpired, KVStore, Outcome
from rendezvous.wire import (
    MAX_VALUE_BYTES,
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


class Bench:
    """A store with a clock that moves only when told."""

    def __init__(self) -> None:
        self.store = KVStore()
        self.now = 100.0
        self.outcomes: list[Outcome] = []

    def submit(self, ticket: Hashable, *operations: Operation) -> list[Outcome]:
        outcomes = self.store.submit(ticket, operations, self.now)
        self.outcomes += outcomes
        return outcomes

    def do(self, *operations: Operation) -> tuple[Result, ...]:
        ticket = object()
        for outcome in self.submit(ticket, *operations):
            if isinstance(outcome, Answered) and outcome.ticket is ticket:
                return outcome.results
        raise AssertionError(f"{operations} had to wait")

    def advance(self, seconds: float) -> list[Outcome]:
        self.now += seconds
        outcomes = self.store.expire(self.now)
        self.outcomes += outcomes
        return outcomes


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_every_write_gets_the_next_store_wide_revision(bench: Bench) -> None:
    assert bench.do(Set("a", b"1"), Set("b", b"2"), Append("a", b"!")) == (
        Written(1),
        Written(2),
        Written(3),
    )
    assert bench.do(Get(("a", "b"))) == (Entries({"a": Entry(b"1!", 3), "b": Entry(b"2", 2)}),)


def test_revisions_go_on_from_where_the_previous_store_may_have_been() -> None:
    store = KVStore(first_revision=1000)
    assert store.submit(1, (Set("a", b""),), 0.0) == [Answered(1, (Written(1001),))]


def test_a_plain_read_of_a_missing_key_is_an_answer_not_a_timeout(bench: Bench) -> None:
    assert bench.do(Get(("a",))) == (Entries({}),)


def test_a_read_that_names_a_revision_says_whether_it_was_reached(bench: Bench) -> None:
    bench.do(Set("a", b"1"))
    assert bench.do(Get(("a",), after=1)) == (Entries({"a": Entry(b"1", 1)}, timed_out=True),)
    assert bench.do(Get(("a",), after=0)) == (Entries({"a": Entry(b"1", 1)}),)


def test_a_counter_starts_at_zero_and_is_kept_as_text(bench: Bench) -> None:
    assert bench.do(Add("n", 5), Add("n", -7)) == (Number(5), Number(-2))
    assert bench.do(Get(("n",)))[0].entries["n"].value == b"-2"


@pytest.mark.parametrize(("value", "amount"), [(b"x", 1), (b"", 1), (b"1.5", 1)])
def test_adding_to_what_is_no_number_is_refused(bench: Bench, value: bytes, amount: int) -> None:
    bench.do(Set("n", value))
    (result,) = bench.do(Add("n", amount))
    assert isinstance(result, StoreRefusal)
    assert result.code == "not_a_number"
    assert bench.do(Get(("n",)))[0].entries["n"] == Entry(value, 1)


def test_a_counter_stays_within_64_bits(bench: Bench) -> None:
    assert bench.do(Add("n", 2**63 - 1)) == (Number(2**63 - 1),)
    (result,) = bench.do(Add("n", 1))
    assert isinstance(result, StoreRefusal)
    assert result.code == "too_large"


def test_a_value_cannot_be_appended_beyond_the_limit(bench: Bench) -> None:
    bench.do(Set("a", b"x" * MAX_VALUE_BYTES))
    (result,) = bench.do(Append("a", b"y"))
    assert isinstance(result, StoreRefusal)
    assert result.code == "too_large"
    assert len(bench.do(Get(("a",)))[0].entries["a"].value) == MAX_VALUE_BYTES


def test_compare_and_set_tells_a_missing_key_from_an_empty_value(bench: Bench) -> None:
    assert bench.do(CompareSet("a", b"", b"1")) == (Compared(False, None),)
    assert bench.do(CompareSet("a", None, b"")) == (Compared(True, b""),)
    assert bench.do(CompareSet("a", None, b"1")) == (Compared(False, b""),)
    assert bench.do(CompareSet("a", b"", b"1")) == (Compared(True, b"1"),)


def test_deleting_and_counting(bench: Bench) -> None:
    bench.do(Set("p/a"), Set("p/b"), Set("q/a"))
    assert bench.do(Count("p/"), Count(), Delete("p/a"), Delete("p/a")) == (
        Number(2),
        Number(3),
        Number(1),
        Number(0),
    )
    assert bench.do(DeletePrefix("p/"), Count()) == (Number(1), Number(1))


# ---- waiting ---------------------------------------------------------------------------


def test_a_get_waits_until_every_key_is_there_and_is_answered_once(bench: Bench) -> None:
    assert bench.submit("w", Get(("a", "b"), wait=10)) == []
    bench.do(Set("a", b"1"))
    bench.do(Set("a", b"2"))
    assert len(bench.store.waiting) == 1
    assert bench.submit("s", Set("b", b"3")) == [
        Answered("s", (Written(3),)),
        Answered("w", (Entries({"a": Entry(b"2", 2), "b": Entry(b"3", 3)}),)),
    ]
    bench.do(Set("a", b"4"), Set("b", b"5"))
    bench.advance(100)
    assert [o.ticket for o in bench.outcomes if isinstance(o, Answered)].count("w") == 1
    assert bench.store.waiting == ()


def test_a_key_deleted_meanwhile_has_to_come_back(bench: Bench) -> None:
    bench.submit("w", Get(("a", "b"), wait=10))
    bench.do(Set("a", b"1"))
    bench.do(Delete("a"))
    bench.do(Set("b", b"1"))
    assert len(bench.store.waiting) == 1
    outcomes = bench.submit("s", Set("a", b"2"))
    assert [o.ticket for o in outcomes if isinstance(o, Answered)] == ["s", "w"]


def test_waiting_for_something_newer_ignores_what_was_seen(bench: Bench) -> None:
    bench.do(Set("a", b"old"))
    assert bench.submit("w", Get(("a",), wait=10, after=1)) == []
    outcomes = bench.submit("s", Set("a", b"new"))
    assert Answered("w", (Entries({"a": Entry(b"new", 2)}),)) in outcomes


def test_a_watch_is_answered_with_the_keys_that_changed(bench: Bench) -> None:
    bench.do(Set("a", b"1"), Set("b", b"1"))
    assert bench.submit("w", Watch({"a": 1, "b": 2, "c": 0}, wait=10)) == []
    outcomes = bench.submit("s", Set("c", b"x"), Set("a", b"2"))
    assert (
        Answered("w", (Entries({"a": Entry(b"2", 4), "c": Entry(b"x", 3)}),)) in outcomes
    )  # both writes of the batch, because nobody comes in between them


def test_a_watch_woken_and_undone_by_the_same_batch_keeps_waiting(bench: Bench) -> None:
    bench.submit("w", Watch({"a": 0}, wait=10))
    bench.do(Set("a", b"1"), Delete("a"))
    assert len(bench.store.waiting) == 1
    bench.do(Set("a", b"2"))
    assert bench.store.waiting == ()


def test_a_wait_ends_at_its_deadline_with_what_is_there(bench: Bench) -> None:
    bench.do(Set("a", b"1"))
    bench.submit("w", Get(("a", "b"), wait=5))
    assert bench.store.next_deadline() == bench.now + 5
    assert bench.advance(4.9) == []
    assert bench.advance(0.1) == [Answered("w", (Entries({"a": Entry(b"1", 1)}, timed_out=True),))]
    assert bench.store.next_deadline() is None


def test_a_batch_goes_on_behind_the_operation_it_waited_for(bench: Bench) -> None:
    bench.submit("w", Add("n", 1), Get(("go",), wait=10), Add("n", 10), Get(("end",), wait=10))
    assert bench.do(Get(("n",)))[0].entries["n"].value == b"1"
    bench.do(Set("go"))
    assert bench.do(Get(("n",)))[0].entries["n"].value == b"11"
    outcomes = bench.submit("s", Set("end"))
    (answer,) = [o for o in outcomes if isinstance(o, Answered) and o.ticket == "w"]
    assert [type(result) for result in answer.results] == [Number, Entries, Number, Entries]


def test_one_batch_may_release_another_which_releases_a_third(bench: Bench) -> None:
    bench.submit("third", Get(("c",), wait=10))
    bench.submit("second", Get(("b",), wait=10), Set("c"))
    outcomes = bench.submit("first", Set("b"))
    assert [o.ticket for o in outcomes if isinstance(o, Answered)] == ["first", "second", "third"]


def test_many_who_ask_the_same_get_the_same_object(bench: Bench) -> None:
    for n in range(3):
        bench.submit(n, Get(("a",), wait=10))
    outcomes = bench.submit("s", Set("a", b"1"))
    answers = [o.results[0] for o in outcomes if isinstance(o, Answered) and o.ticket != "s"]
    assert len(answers) == 3
    assert answers[0] is answers[1] is answers[2]


def test_a_cancelled_batch_is_forgotten_and_tells_how_far_it_came(bench: Bench) -> None:
    bench.submit("w", Add("n", 1), Get(("a",), wait=10), Add("n", 1))
    assert bench.store.cancel("w") == (Number(1),)
    assert bench.store.cancel("w") is None
    assert bench.store.next_deadline() is None
    outcomes = bench.submit("s", Set("a"))
    assert [o.ticket for o in outcomes if isinstance(o, Answered)] == ["s"]
    assert bench.do(Get(("n",)))[0].entries["n"].value == b"1"


def test_a_ticket_that_waits_cannot_be_used_again(bench: Bench) -> None:
    bench.submit("w", Get(("a",), wait=10))
    with pytest.raises(ValueError, match="already waiting"):
        bench.submit("w", Set("a"))


def test_a_write_costs_only_those_who_wait_for_that_key(bench: Bench) -> None:
    for n in range(200):
        bench.submit(n, Get((f"key{n}",), wait=10))
    looked_at = []
    index = bench.store._waiting._by_key

    class Counted(dict):  # type: ignore[type-arg]
        def get(self, key: str, default: object = None) -> object:
            looked_at.append(key)
            return super().get(key, default)

    bench.store._waiting._by_key = Counted(index)
    bench.do(Set("key7"))
    assert looked_at == ["key7"]


# ---- leases ----------------------------------------------------------------------------


def test_a_lease_expires_once_and_takes_the_key_with_it(bench: Bench) -> None:
    bench.do(Set("lease", b"me", lease=5))
    assert bench.advance(4.9) == []
    assert bench.advance(0.1) == [KeyExpired("lease")]
    assert bench.do(Get(("lease",))) == (Entries({}),)
    assert bench.advance(100) == []


def test_a_renewed_lease_lives_on(bench: Bench) -> None:
    bench.do(Set("lease", b"", lease=5))
    bench.advance(4)
    bench.do(Set("lease", b"", lease=5))
    assert bench.advance(4.9) == []
    assert bench.advance(0.1) == [KeyExpired("lease")]


def test_setting_a_key_without_a_lease_makes_it_a_plain_key(bench: Bench) -> None:
    bench.do(Set("lease", b"", lease=5), Set("lease", b"forever"))
    assert bench.advance(100) == []
    assert bench.do(Count()) == (Number(1),)


def test_a_deleted_lease_ends_silently(bench: Bench) -> None:
    bench.do(Set("p/lease", b"", lease=5), Set("q/lease", b"", lease=5))
    bench.do(Delete("p/lease"), DeletePrefix("q/"))
    assert bench.advance(100) == []


def test_postponed_leases_expire_later(bench: Bench) -> None:
    bench.do(Set("lease", b"", lease=5))
    bench.store.postpone_leases(10)
    assert bench.advance(14.9) == []
    assert bench.advance(0.1) == [KeyExpired("lease")]


# ---- sealing ---------------------------------------------------------------------------


def test_a_sealed_prefix_refuses_writes_and_waits(bench: Bench) -> None:
    bench.do(Set("rounds/7/a", b"1"))
    assert bench.do(DeletePrefix("rounds/7/", seal=True)) == (Number(1),)
    key = "rounds/7/a"
    for operation in (
        Set(key),
        Add(key, 1),
        Append(key, b""),
        CompareSet(key, None, b""),
        CompareSet(key, b"x", b""),
        Get((key, "elsewhere"), wait=5),
        Watch({"elsewhere": 0, key: 0}, wait=5),
    ):
        (result,) = bench.do(operation)
        assert isinstance(result, StoreRefusal), operation
        assert result.code == "sealed"
    assert bench.store.waiting == ()
    assert bench.do(Get((key,)), Delete(key), Count("rounds/7/")) == (
        Entries({}),
        Number(0),
        Number(0),
    )


def test_sealing_concerns_no_neighbour(bench: Bench) -> None:
    bench.do(DeletePrefix("rounds/7/", seal=True))
    assert bench.do(Set("rounds/70/a"), Set("rounds/8/a")) == (Written(1), Written(2))


def test_waiters_below_a_prefix_that_is_sealed_are_refused_at_once(bench: Bench) -> None:
    bench.submit("get", Get(("rounds/7/a", "rounds/7/b"), wait=60))
    bench.submit("watch", Watch({"rounds/7/a": 0, "job/world": 0}, wait=60), Add("n", 1))
    bench.submit("other", Get(("rounds/8/a",), wait=60))
    outcomes = bench.submit("s", DeletePrefix("rounds/7/", seal=True))
    codes = {
        o.ticket: [r.code for r in o.results if isinstance(r, StoreRefusal)]
        for o in outcomes
        if isinstance(o, Answered)
    }
    assert codes == {"s": [], "get": ["sealed"], "watch": ["sealed"]}
    assert bench.do(Get(("n",)))[0].entries["n"].value == b"1"  # the batch went on
    assert len(bench.store.waiting) == 1


# ---- what the next store has to have -----------------------------------------------------


def test_changes_of_keys_that_last_are_told_once() -> None:
    bench = Bench()
    bench.store = KVStore(passing=("ours/",))
    bench.do(Set("ours/a", b"1"), Set("b", b"1"), Set("c", b"1"), Set("b", b"2"), Add("d", 3))
    bench.do(Set("e", b"1", lease=5.0), Delete("c"))
    assert bench.store.take_changes() == {"b": b"2", "c": None, "d": b"3", "e": None}
    assert bench.store.take_changes() == {}
    bench.do(Set("e", b"2"), DeletePrefix("b"), Get(("d",)))
    assert bench.store.take_changes() == {"b": None, "e": b"2"}


def test_a_store_that_nobody_goes_on_with_notes_no_changes(bench: Bench) -> None:
    bench.do(Set("a", b"1"))
    assert bench.store.take_changes() == {}
