"""The first difference of several states, in words."""

from __future__ import annotations

import pytest

from elastic_driver.features.stragglers.states import Described, first_difference, name_ranks
from elastic_driver.words.findings import StateValue
from elastic_driver.words.wire_events import MAX_LEAVES, LeafMark

LR = "learning rate of group 0 of 'optimizer'"


def state(*leaves: tuple[str, str]) -> list[LeafMark]:
    """A state of these leaves, each with its name and value."""
    return [LeafMark(name, f"digest of {value}", value) for name, value in leaves]


def test_the_first_leaf_that_differs_is_named_with_the_values_of_all_ranks() -> None:
    first = state(("weight", "7"), (LR, "0.02"), ("epoch", "1"))
    second = state(("weight", "7"), (LR, "0.01"), ("epoch", "2"))
    found = first_difference([Described((0, 1), first), Described((2,), second)])
    assert found.reason == f"{LR} is 0.02 on ranks 0, 1 and 0.01 on rank 2"
    assert found.leaf == LR
    assert found.values == (StateValue((0, 1), "0.02"), StateValue((2,), "0.01"))


def test_ranks_that_agree_in_this_leaf_are_named_together_though_their_states_differ() -> None:
    states = [
        Described((0,), state((LR, "1"), ("epoch", "1"))),
        Described((1, 3), state((LR, "2"), ("epoch", "1"))),
        Described((2,), state((LR, "1"), ("epoch", "5"))),
    ]
    assert first_difference(states).reason == f"{LR} is 1 on ranks 0, 2 and 2 on ranks 1, 3"


def test_a_leaf_that_some_ranks_lack_is_named_with_these_ranks() -> None:
    more = state(("weight", "7"), ("bias", "1"), ("epoch", "1"))
    fewer = state(("weight", "7"), ("epoch", "1"))
    found = first_difference([Described((0, 2), more), Described((1,), fewer)])
    assert found.reason == "bias is missing on rank 1"
    assert found.values == (StateValue((0, 2), "1"), StateValue((1,), "missing"))
    found = first_difference([Described((0, 2), fewer), Described((1,), more)])
    assert found.reason == "bias is missing on ranks 0, 2"
    found = first_difference([Described((0,), fewer[:1]), Described((1,), fewer)])
    assert found.reason == "epoch is missing on rank 0", "at the end"


def test_a_value_that_differs_earlier_counts_before_a_leaf_that_is_missing_later() -> None:
    more = state(("weight", "7"), ("bias", "1"))
    found = first_difference([Described((0,), more), Described((1,), state(("weight", "8")))])
    assert found.reason == "weight is 7 on rank 0 and 8 on rank 1"


def test_the_same_leaves_in_another_order_are_said_to_be_that() -> None:
    one, other = state(("a", "1"), ("b", "1")), state(("b", "1"), ("a", "1"))
    found = first_difference([Described((0,), one), Described((1,), other)])
    assert found.reason == "from a on, the parts are in another order on rank 0 and rank 1"


def test_values_that_look_alike_are_not_shown_as_a_difference() -> None:
    states = [
        Described((0,), [LeafMark("weight", "d1", "mean 0.1")]),
        Described((1,), [LeafMark("weight", "d2", "mean 0.1")]),
    ]
    found = first_difference(states)
    assert found.reason == "weight is not the same on rank 0 and rank 1"
    assert found.values == (StateValue((0,), "mean 0.1"), StateValue((1,), "mean 0.1"))


def test_ranks_that_did_not_describe_their_state_are_named_as_unknown() -> None:
    known = [Described((0,), state((LR, "1"))), Described((1,), state((LR, "2")))]
    found = first_difference([*known, Described((2,), None)])
    assert found.reason == f"{LR} is 1 on rank 0 and 2 on rank 1; what rank 2 holds is not known"
    found = first_difference([known[0], Described((1, 2), None)])
    assert found.reason == "rank 0 and ranks 1, 2 differ; where could not be read"
    assert (found.leaf, found.values) == ("", ())


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        (1, "rank 0 and rank 1 differ, but all their parts are alike"),
        (MAX_LEAVES, f"rank 0 and rank 1 differ, but their first {MAX_LEAVES} parts are alike"),
    ],
)
def test_digests_that_differ_in_no_leaf_that_is_known_are_said_to_do_so(
    leaves: int, said: str
) -> None:
    alike = state(*((str(n), "1") for n in range(leaves)))
    assert first_difference([Described((0,), alike), Described((1,), alike)]).reason == said


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ((2,), "rank 2"),
        ((0, 1), "ranks 0, 1"),
        ((0, 1, 2, 5), "ranks 0 to 2, 5"),
        (tuple(range(10_000)), "ranks 0 to 9999"),
        (tuple(range(0, 100, 2)), "ranks 0, 2, 4, 6, 8, 10 and 44 more"),
    ],
)
def test_many_ranks_are_named_in_few_words(ranks: tuple[int, ...], named: str) -> None:
    assert name_ranks(ranks) == named
