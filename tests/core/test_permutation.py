"""A shuffle without memory is still a shuffle."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.core.permutation import Permutation, mix

ORDER_OF_TEN = [3, 4, 7, 6, 5, 8, 1, 9, 2, 0]
MIXED = 15205877802699428709


@given(st.integers(0, 600), st.integers(0, 2**64 - 1))
def test_every_index_comes_exactly_once(size: int, key: int) -> None:
    order = Permutation(size, key)
    assert sorted(order[position] for position in range(size)) == list(range(size))


@given(st.integers(1, 10**18), st.integers(0, 2**64 - 1), st.data())
def test_huge_orders_stay_in_range_and_do_not_repeat(
    size: int, key: int, data: st.DataObject
) -> None:
    positions = data.draw(st.sets(st.integers(0, size - 1), max_size=20))
    order = Permutation(size, key)
    found = {order[position] for position in positions}
    assert len(found) == len(positions)
    assert all(0 <= index < size for index in found)


def test_seeds_give_all_orders_equally_often() -> None:
    rounds = 6000
    seen = Counter(tuple(Permutation(4, mix(seed))) for seed in range(rounds))
    expected = rounds / 24
    assert len(seen) == 24
    chi_squared = sum((count - expected) ** 2 / expected for count in seen.values())
    assert chi_squared < 49.7  # 23 degrees of freedom, p = 0.001


def test_neighbours_are_torn_apart() -> None:
    size = 100_000
    order = Permutation(size, 1)
    found = [order[position] for position in range(2000)]
    distance = sum(abs(a - b) for a, b in itertools.pairwise(found)) / (len(found) - 1)
    assert distance == pytest.approx(size / 3, rel=0.05)  # two random points of a line


def test_a_position_outside_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="position 5"):
        Permutation(5, 0)[5]
    with pytest.raises(IndexError):
        Permutation(0, 0)[0]


def test_orders_and_seeds_never_change_between_releases() -> None:
    """A job resumed by a newer release must see the same epoch."""
    assert [Permutation(10, 42)[position] for position in range(10)] == ORDER_OF_TEN
    assert mix(1, 2, 3) == MIXED
    assert mix(1, 2) != mix(2, 1) != mix(1, 2, 0)
