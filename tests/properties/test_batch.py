"""How a fixed global batch is shared, and the tree that adds its gradients."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.arithmetic import TreeSum, allocate_microbatches, finish_tree, tree_blocks
from tests.test_arithmetic import tree_of

counts = st.integers(1, 200)


@given(counts, counts)
def test_shares_sum_up_fall_by_rank_and_differ_by_one_at_most(n: int, workers: int) -> None:
    shares = allocate_microbatches(n, workers)
    assert sum(shares) == n
    assert len(shares) == workers
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] <= 1


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
