"""The bounds of a client's batches: what is over one is refused, and the batch goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rendezvous.limits import KEY_BYTES, Hits, Limits, read_limits
from rendezvous.store import Answered, KVStore
from rendezvous.wire import (
    Add,
    Append,
    Compared,
    CompareSet,
    Count,
    Delete,
    DeletePrefix,
    Entries,
    Get,
    Number,
    Operation,
    Result,
    Set,
    StoreRefusal,
    Watch,
    Written,
)

MIB = 1024 * 1024


class Client:
    """One client of a store with these bounds."""

    def __init__(self, **limits: Any) -> None:
        self.hits = Hits()
        self.store = KVStore(
            limits=Limits(**limits),
            hits=self.hits,
            system=("rounds/",),
            is_of_crowd=lambda owner: str(owner).startswith("worker"),
        )
        self.sent = 0

    def do(
        self, *operations: Operation, bounded: bool = True, now: float = 0.0, owner: str = "one"
    ) -> list[Any]:
        """Return the results of a batch; an empty list if it waits."""
        self.sent += 1
        found: list[Result] = []
        who = owner if bounded else None
        for outcome in self.store.submit(self.sent, operations, now, bounded=bounded, owner=who):
            if isinstance(outcome, Answered) and outcome.ticket == self.sent:
                found += outcome.results
        return found


def refused(result: Result, code: str) -> bool:
    return isinstance(result, StoreRefusal) and result.code == code and ";" in result.message


# ---- what users write -------------------------------------------------------------------


def test_bounds_are_set_by_the_names_of_their_fields() -> None:
    assert read_limits() == Limits()
    found = read_limits("store_bytes=8589934592", "head_s=0.5", "unproven=7", "unproven=8")
    assert found == Limits(store_bytes=8 * 1024**3, head_s=0.5, unproven=8)


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("stor_bytes=1", "knows .*store_bytes.*; got 'stor_bytes'"),
        ("store_bytes", "needs store_bytes=N with a whole number above 0, got 'store_bytes'"),
        ("store_bytes=1.5", "a whole number above 0"),
        ("store_bytes=0", "a whole number above 0"),
        ("store_bytes=-1", "a whole number above 0"),
        ("store_bytes=1_000", "a whole number above 0"),
        ("head_s=nan", "needs head_s=N with a number of seconds above 0, got 'head_s=nan'"),
    ],
)
def test_a_bound_that_is_none_is_named(word: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_limits(word)


# ---- keys and bytes --------------------------------------------------------------------


def test_a_full_store_refuses_what_makes_it_larger_and_nothing_else() -> None:
    client = Client(store_bytes=1000 + 2 * KEY_BYTES)
    assert isinstance(client.do(Set("a", b"x" * 500))[0], Written)
    assert refused(client.do(Set("b", b"x" * 600))[0], "store_full")
    assert isinstance(client.do(Set("b", b"x" * 498))[0], Written)
    growing = Append("b", b"x"), Add("n", 1), CompareSet("c", None, b""), Set("a", b"x" * 501)
    assert all(refused(result, "store_full") for result in client.do(*growing))
    assert isinstance(client.do(Set("a", b"y" * 500, lease=5.0))[0], Written)
    assert isinstance(client.do(Set("a", b"y" * 100))[0], Written)
    assert isinstance(client.do(Set("b", b"x" * 898))[0], Written)
    assert client.do(Delete("b"))[0] == Number(1)
    assert isinstance(client.do(Set("c", b"x" * 898))[0], Written)
    assert client.hits.snapshot()["store"] == 5


def test_keys_are_bounded_and_the_driver_may_write_more() -> None:
    client = Client(store_keys=3)
    results = client.do(*(Set(f"k{n}") for n in range(5)))
    assert [isinstance(result, Written) for result in results] == [True, True, True, False, False]
    assert refused(results[3], "store_full")
    assert isinstance(client.do(Set("job/world"), bounded=False)[0], Written)
    assert client.do(DeletePrefix("k"))[0] == Number(3)
    assert isinstance(client.do(Set("k9"))[0], Written)


def test_what_expires_or_is_deleted_makes_room() -> None:
    client = Client(store_keys=2, store_bytes=2 * (KEY_BYTES + 10))
    for turn in range(100):
        wrote = client.do(Set("lease", b"12345", lease=1.0), Set("k", b"1"), now=float(2 * turn))
        assert [type(result) for result in wrote] == [Written, Written]
        client.store.expire(2 * turn + 1.0)
        assert client.do(Delete("k"))[0] == Number(1)
    assert client.store._space.bytes == 0


def test_sealed_prefixes_take_room() -> None:
    client = Client(store_bytes=3 * (KEY_BYTES + 3))
    sealed = client.do(*(DeletePrefix(f"r{n}/", seal=True) for n in range(5)))
    assert [isinstance(result, Number) for result in sealed] == [True, True, True, False, False]
    assert client.do(DeletePrefix("r0/", seal=True)) == [Number(0)]
    assert client.do(DeletePrefix("r9/", seal=True), bounded=False) == [Number(0)]


# ---- shares ----------------------------------------------------------------------------


def test_users_keys_leave_room_for_all_others() -> None:
    client = Client(store_keys=5, users_keys=3, users_bytes=3 * (KEY_BYTES + 100))
    results = client.do(*(Set(f"k{n}") for n in range(4)))
    assert [isinstance(result, Written) for result in results] == [True, True, True, False]
    assert refused(results[3], "store_full")
    assert refused(client.do(Append("k0", b"x" * 300))[0], "store_full")
    assert isinstance(client.do(Set("rounds/1/a", b"x" * 300))[0], Written)
    assert client.hits.snapshot()["users"] == 2
    assert client.do(Delete("k1"))[0] == Number(1)
    assert isinstance(client.do(Set("k4"))[0], Written)


@pytest.mark.parametrize("prefix", ["k", "rounds/1/"])
def test_one_client_takes_no_more_than_its_share(prefix: str) -> None:
    client = Client(caller_keys=3, caller_bytes=3 * (KEY_BYTES + 20))
    mine = [f"{prefix}{n}" for n in range(5)]
    results = client.do(*map(Set, mine))
    assert [isinstance(result, Written) for result in results] == [True] * 3 + [False] * 2
    assert refused(results[3], "share_full")
    assert refused(client.do(Set(mine[0], b"x" * 100))[0], "share_full")
    assert isinstance(client.do(Set(mine[0], b"x", lease=1.0))[0], Written)
    for writer in ("two", "three"):
        assert isinstance(client.do(Set(f"{prefix}{writer}"), owner=writer)[0], Written)
    assert isinstance(client.do(Set(f"{prefix}four"), bounded=False)[0], Written)
    assert client.hits.snapshot()["share"] == 3
    client.store.expire(1.0)
    assert isinstance(client.do(Set(mine[3]))[0], Written)


def test_all_workers_together_leave_room_to_agents_and_people() -> None:
    client = Client(store_keys=32, users_keys=16)
    workers = [f"worker {number}" for number in range(4)]

    def fills(prefix: str, owners: Sequence[str], each: int) -> int:
        wrote = [
            client.do(Set(f"{prefix}{owner}{n}"), owner=owner)[0]
            for owner in owners
            for n in range(each)
        ]
        assert all(isinstance(one, Written) or refused(one, "store_full") for one in wrote)
        return sum(isinstance(one, Written) for one in wrote)

    assert fills("k/", workers, 8) == 14
    assert fills("k/", ["operator"], 8) == 2
    assert fills("rounds/1/", workers, 8) == 12
    assert fills("rounds/agents/", ["agent"], 8) == 4


def test_a_key_counts_for_who_has_written_it_last() -> None:
    client = Client(caller_keys=2)
    for name in ("a", "b"):
        client.do(Set(name))
    assert refused(client.do(Set("c"))[0], "share_full")
    assert client.do(Add("b", 1), owner="two")[0].code == "not_a_number"
    assert isinstance(client.do(Append("b", b"x"), owner="two")[0], Written)
    assert isinstance(client.do(Set("c"))[0], Written)
    assert refused(client.do(Set("b", b""))[0], "share_full")
    assert isinstance(client.do(Set("c"), bounded=False)[0], Written)  # now it is the driver's
    assert isinstance(client.do(Set("b"))[0], Written)
    client.do(*map(Delete, "abc"))
    space = client.store._space
    assert (space.bytes, space.keys, space._held, space._owners) == (0, 0, {}, {})


def test_sealed_prefixes_count_for_who_has_sealed_them() -> None:
    client = Client(caller_keys=2)
    sealed = client.do(*(DeletePrefix(f"r{n}/", seal=True) for n in range(3)))
    assert [type(result) for result in sealed] == [Number, Number, StoreRefusal]
    assert isinstance(client.do(DeletePrefix("r9/", seal=True), owner="two")[0], Number)


def test_one_client_waits_for_no_more_keys_than_its_share() -> None:
    client = Client(caller_waits=3)
    assert client.do(Get(("a", "b"), wait=10.0)) == []
    assert refused(client.do(Get(("a", "b"), wait=10.0))[0], "busy")
    assert client.do(Get(("a", "b"), wait=10.0), owner="two") == []
    client.store.cancel(1)
    assert client.do(Get(("a", "b", "c"), wait=10.0)) == []
    client.store.expire(20.0)
    assert not client.store._waiting._keys_of


def test_sealed_prefixes_of_many_lengths_are_refused_and_cost_others_nothing() -> None:
    client = Client(seal_lengths=3)
    sealed = client.do(*(DeletePrefix("x" * n, seal=True) for n in (9, 5, 9, 7, 6, 7)))
    assert [type(result) for result in sealed[:4]] == [Number] * 4
    assert refused(sealed[4], "too_large")
    assert sealed[5] == Number(0)
    assert client.do(DeletePrefix("y" * 8, seal=True), bounded=False) == [Number(0)]
    assert client.do(DeletePrefix("rounds/1/", seal=True), bounded=False) == [Number(0)]
    assert client.hits.snapshot()["seals"] == 1
    for key, is_sealed in (
        *(("xxxxx", True), ("xxxx", False), ("yyyyyyyyyy", True), ("rounds/1/a", True)),
        *(("rounds/2/a", False), ("xx/xxxx", False)),
    ):
        assert isinstance(client.do(Set(key))[0], StoreRefusal) == is_sealed, key
    _, own = client.store._sealed._lengths
    assert list(own) == [len("rounds/1/")], "keys of the job are compared with its own prefixes"


# ---- results -----------------------------------------------------------------------------


def test_results_that_are_too_large_together_are_refused_one_by_one() -> None:
    client = Client(reply_bytes=32 * MIB)
    for n in range(16):
        client.do(Set(f"k{n}", b"x" * 4 * MIB))
    wrong = CompareSet("k0", b"wrong", b"")
    results = client.do(*(Get((f"k{n}",)) for n in range(16)), wrong, Add("n", 1))
    assert [type(result) for result in results[:7]] == [Entries] * 7
    assert all(refused(result, "too_large") for result in results[7:-1])
    assert results[-1] == Number(1)  # the batch goes on
    assert refused(client.do(Get(tuple(f"k{n}" for n in range(16))))[0], "too_large")
    assert isinstance(client.do(wrong)[0], Compared)


def test_a_wait_that_ends_with_too_much_is_refused_too() -> None:
    client = Client(reply_bytes=1000)
    assert client.do(Set("a", b"x" * 700)) == [Written(1)]
    assert client.do(Get(("a", "b"), wait=10.0)) == []
    (answered, _) = client.store.submit("writer", (Set("b", b"x" * 700),), 0.0)[::-1]
    assert isinstance(answered, Answered)
    assert refused(answered.results[0], "too_large")


def test_shared_answers_are_bounded_by_their_bytes() -> None:
    client = Client()
    for n in range(8):
        client.do(Set(f"k{n}", b"x" * 12 * MIB))
    for n in range(7):
        client.do(Get((f"k{n}", f"k{n + 1}")))
        assert sum(entries.size for entries in client.store._shared.values()) < 90 * MIB


# ---- costs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation",
    [Count(), DeletePrefix("none"), Append("large", b"x"), Get(tuple(map(str, range(50_000))))],
    ids=lambda operation: type(operation).__name__,
)
def test_a_batch_of_expensive_operations_ends_in_refusals(operation: Operation) -> None:
    client = Client()
    client.do(Set("large", b"x" * (15 * MIB)))
    client.store.submit("fill", tuple(Set(f"k{n}") for n in range(40_000)), 0.0, bounded=False)
    results = client.do(*[operation] * 4096)
    done = [result for result in results if not isinstance(result, StoreRefusal)]
    assert 1 <= len(done) <= 8
    assert all(refused(result, "too_large") for result in results[len(done) :])
    assert client.hits.snapshot()["batch_cost"] == len(results) - len(done)
    assert not isinstance(client.do(operation)[0], StoreRefusal)  # it may go on


def test_writes_to_a_key_that_many_wait_for_cost_more() -> None:
    client = Client(batch_cost=1000)
    for _ in range(100):
        client.do(Watch({"k": 10**9}, wait=10.0))
    results = client.do(*[Set("k")] * 10)
    assert [isinstance(result, Written) for result in results] == [True] * 6 + [False] * 4
    assert all(isinstance(result, Written) for result in client.do(*[Set("other")] * 4096))


def test_a_long_text_is_no_counter() -> None:
    client = Client()
    client.do(Set("n", b"1" * MIB))
    (result,) = client.do(Add("n", 1))
    assert isinstance(result, StoreRefusal)
    assert result.code == "not_a_number"


# ---- waits -------------------------------------------------------------------------------


def test_a_batch_waits_a_few_times_only() -> None:
    client = Client(batch_waits=2)
    assert client.do(*[Get(("never",), wait=1.0)] * 4) == []
    outcomes = [each for now in (1.0, 2.0, 3.0) for each in client.store.expire(now)]
    (answered,) = outcomes
    assert isinstance(answered, Answered)
    assert [type(result) for result in answered.results] == [Entries] * 2 + [StoreRefusal] * 2


def test_one_wait_is_for_a_bounded_number_of_keys() -> None:
    client = Client(wait_keys=3)
    assert refused(client.do(Get(("a", "b", "c", "d"), wait=1.0))[0], "too_large")
    assert isinstance(client.do(Get(("a", "b", "c", "d")))[0], Entries)
    assert client.do(Get(("a", "b", "c"), wait=1.0)) == []


def test_keys_that_are_waited_for_are_bounded_over_all_batches() -> None:
    client = Client(waited_keys=5)
    assert client.do(Get(("a", "b", "c"), wait=10.0)) == []
    assert refused(client.do(Get(("a", "b", "c"), wait=10.0))[0], "busy")
    assert client.do(Get(("a", "b"), wait=10.0)) == []
    assert refused(client.do(Watch({"a": 9}, wait=10.0))[0], "busy")
    assert client.do(Watch({"a": 9}, wait=10.0), bounded=False) == []
    client.store.cancel(1)
    assert client.do(Watch({"a": 9}, wait=10.0)) == []


def test_waits_for_very_many_keys_end_in_several_calls() -> None:
    client = Client()
    for n in range(5):
        assert client.do(Get(tuple(f"{n}.{k}" for k in range(10_000)), wait=1.0)) == []
    ended = []
    while (at := client.store.next_deadline()) is not None:
        assert at <= 1.0
        ended.append(len(client.store.expire(1.0)))
    assert ended == [2, 2, 1]
