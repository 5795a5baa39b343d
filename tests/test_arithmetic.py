"""The shares of a fixed global batch, and the tree that adds its gradients.

A shuffle without memory is still a shuffle.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from elastic_driver.arithmetic import (
    Permutation,
    allocate_microbatches,
    finish_tree,
    lowered,
    mix,
    sample_counts,
    virtual_ranges,
)
from elastic_driver.errors import UsageError

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


@pytest.mark.parametrize(
    ("virtual_workers", "workers", "expected"),
    [
        (8, 3, [3, 3, 2]),
        (8, 5, [2, 2, 2, 1, 1]),
        (7, 2, [4, 3]),
        (8, 8, [1] * 8),
        (8, 1, [8]),
        (3, 5, [1, 1, 1, 0, 0]),
    ],
)
def test_micro_batches_are_shared_as_equally_as_possible(
    virtual_workers: int, workers: int, expected: list[int]
) -> None:
    assert allocate_microbatches(virtual_workers, workers) == expected


@pytest.mark.parametrize("nonsense", [0, -1, 2.0, True, "8", None])
def test_a_number_that_is_no_count_is_refused_by_name(nonsense: Any) -> None:
    with pytest.raises(UsageError, match="number of virtual workers is"):
        allocate_microbatches(nonsense, 2)
    with pytest.raises(UsageError, match="number of workers is"):
        allocate_microbatches(2, nonsense)


def test_virtual_workers_are_contiguous_by_rank_and_standbys_have_none() -> None:
    assert virtual_ranges([3, 3, 2]) == [range(3), range(3, 6), range(6, 8)]
    assert [list(r) for r in virtual_ranges([1, 1, 0])] == [[0], [1], []]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (16, [4, 4, 4, 4]),  # a full step
        (15, [4, 4, 4, 3]),
        (9, [3, 3, 3, 0]),  # not 4, 4, 1: a single sample is no batch for BatchNorm
        (5, [3, 2, 0, 0]),
        (1, [1, 0, 0, 0]),
        (0, [0, 0, 0, 0]),
    ],
)
def test_a_short_step_is_spread_evenly_over_as_few_as_needed(
    samples: int, expected: list[int]
) -> None:
    assert sample_counts(samples, 4, 4) == expected


def test_more_samples_than_a_step_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="17 samples"):
        sample_counts(17, 4, 4)


def tree_of(leaves: int) -> Any:
    """The whole tree as nested pairs: it names every addition and its operands."""
    return finish_tree({(0, leaf): leaf for leaf in range(leaves)}, leaves, lambda a, b: (a, b))


def test_a_tree_of_five_leaves_is_the_aligned_one() -> None:
    assert tree_of(5) == (((0, 1), (2, 3)), 4)


def test_a_missing_leaf_is_named() -> None:
    with pytest.raises(KeyError, match="leaf 1 of 2 is missing"):
        finish_tree({(0, 0): 1.0}, 2, lambda a, b: a + b)


def test_slots_are_lowered_to_the_lowest_limit_that_names_a_host_and_never_raised() -> None:
    slots = {"a": 4, "b": 2, "c": 1}
    assert lowered(slots, {"a": 3, "b": 9}, {"a": 1, "lost": 0}) == {"a": 1, "b": 2, "c": 1}
    assert lowered(slots, {"c": 0}) == {"a": 4, "b": 2, "c": 0}
    assert slots == {"a": 4, "b": 2, "c": 1}
