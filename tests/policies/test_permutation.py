"""A shuffle without memory is still a shuffle."""

from __future__ import annotations

import itertools

import pytest

from elastic_driver.policies.permutation import Permutation, mix

ORDER_OF_TEN = [3, 4, 7, 6, 5, 8, 1, 9, 2, 0]
MIXED = 15205877802699428709


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
