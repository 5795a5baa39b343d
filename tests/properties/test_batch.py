"""How a fixed global batch is shared, and the tree that adds its gradients."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.policies.microbatches import (
    TreeSum,
    allocate_microbatches,
    allocate_weighted,
    finish_tree,
    tree_blocks,
)
from tests.policies.test_microbatches import tree_of

counts = st.integers(1, 200)


speeds = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40)


@given(counts, counts)
def test_shares_sum_up_fall_by_rank_and_differ_by_one_at_most(n: int, workers: int) -> None:
    shares = allocate_microbatches(n, workers)
    assert sum(shares) == n
    assert len(shares) == workers
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] <= 1


@given(counts, speeds)
def test_weighted_shares_sum_up_and_leave_nobody_out(n: int, measured: list[float]) -> None:
    shares = allocate_weighted(n, measured)
    assert sum(shares) == n
    assert min(shares) >= (1 if n >= len(measured) else 0)
    assert shares == allocate_weighted(n, measured)


@given(counts, counts)
def test_equal_speeds_give_the_unweighted_shares(n: int, workers: int) -> None:
    assert allocate_weighted(n, [3.5] * workers) == allocate_microbatches(n, workers)


@given(counts, st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_a_faster_worker_never_gets_less_than_a_slower_one(n: int, measured: list[int]) -> None:
    shares = allocate_weighted(n, measured)
    ranks = range(len(shares))
    assert all(shares[a] >= shares[b] for a in ranks for b in ranks if measured[a] > measured[b])


@given(st.integers(1, 64), st.data())
def test_every_split_of_the_leaves_makes_the_same_additions(leaves: int, data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, leaves), max_size=8)))
    parts = {}
    for start, stop in zip([0, *cuts], [*cuts, leaves], strict=True):
        tree: TreeSum[Any] = TreeSum(start, lambda a, b: (a, b))
        for leaf in range(start, stop):
            tree.push(leaf)
        assert [block for block, _ in tree.blocks()] == tree_blocks(range(start, stop))
        parts.update(tree.blocks())
    assert finish_tree(parts, leaves, lambda a, b: (a, b)) == tree_of(leaves)


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_partial_sums_stay_logarithmic(start: int, length: int) -> None:
    assert len(tree_blocks(range(start, start + length))) <= 2 * max(1, length.bit_length())
