"""The division of a fixed global batch among workers, and the order in which gradients are added.

A job is written for N *virtual workers*; each trains one micro-batch in an optimizer step. The N₀
real workers of the moment share them as contiguous ranges, so the step is the same for every N₀.
`worker.batches` calls it; nothing here uses data, tensors or processes. Counts are micro-batches
unless said otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from elastic_driver.errors import UsageError

# A node of the summation tree, (level, index): its first leaf is index·2^level.
Block = tuple[int, int]

T = TypeVar("T")


def allocate_microbatches(virtual_workers: int, workers: int) -> list[int]:
    """Return the micro-batches of each real worker, by rank: as equal as possible, larger first.

    With N `virtual_workers` and N₀ `workers`, rank i gets ⌊N/N₀⌋ + 1 if i < N mod N₀, else ⌊N/N₀⌋:
    (8, 3) → [3, 3, 2], (7, 2) → [4, 3]. The sum is N. With more workers than
    micro-batches the last ones get 0 and train nothing.

    Raises `UsageError` unless both are positive whole numbers.
    """
    for name, count in (("virtual workers", virtual_workers), ("workers", workers)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"the number of {name} is {count!r}; it must be a whole number from 1")
    share, surplus = divmod(virtual_workers, workers)
    return [share + 1] * surplus + [share] * (workers - surplus)


def virtual_ranges(shares: Sequence[int]) -> list[range]:
    """Return the contiguous virtual workers of each rank: [3, 3, 2] → 0–2, 3–5, 6–7."""
    stops = accumulate(shares)
    return [range(stop - share, stop) for stop, share in zip(stops, shares, strict=True)]


def sample_counts(samples: int, virtual_workers: int, micro_batch_size: int) -> list[int]:
    """Return the samples of each virtual worker in a step, none above `micro_batch_size`.

    In a full step each has a full micro-batch. The short last step of an epoch is spread evenly
    over the first virtual workers, and over as few as can hold it. So a micro-batch rarely has a
    single sample, which BatchNorm does not accept.

    Raises `ValueError` for more samples than one step holds.
    """
    busy = -(-samples // micro_batch_size)
    if busy > virtual_workers:
        raise ValueError(f"{samples} samples are more than one step holds")
    share, surplus = divmod(samples, max(1, busy))
    return [share + 1] * surplus + [share] * (busy - surplus) + [0] * (virtual_workers - busy)


class TreeSum(Generic[T]):
    """Adds contiguous leaves of a fixed binary tree one by one; it keeps O(log leaves) sums.

    Node (level, index) of the tree over leaves 0 … n−1 is the sum of its two children, (level − 1,
    2·index) and (level − 1, 2·index + 1). A rank that holds leaves [a, b) can finish exactly the
    nodes that lie inside. So each addition of the whole tree has the same two operands, whichever
    rank makes it, and floating-point sums have the same bits.
    """

    def __init__(self, first_leaf: int, add: Callable[[T, T], T]) -> None:
        self._next = first_leaf
        self._add = add
        self._stack: list[tuple[Block, T]] = []

    def push(self, value: T) -> None:
        """Add the next leaf; `add(left, right)` may reuse `left`'s memory for its result."""
        block: Block = (0, self._next)
        self._next += 1
        while self._stack and block[1] % 2 == 1 and self._stack[-1][0] == (block[0], block[1] - 1):
            _, left = self._stack.pop()
            value = self._add(left, value)
            block = (block[0] + 1, block[1] // 2)
        self._stack.append((block, value))

    def blocks(self) -> list[tuple[Block, T]]:
        """Return the largest finished nodes and their sums, from left to right."""
        return list(self._stack)


def tree_blocks(leaves: range) -> list[Block]:
    """Return the nodes that `TreeSum` ends with for these leaves, so that peers know them."""
    tree: TreeSum[None] = TreeSum(leaves.start, lambda _left, _right: None)
    for _ in leaves:
        tree.push(None)
    return [block for block, _ in tree.blocks()]


def finish_tree(parts: Mapping[Block, T], leaves: int, add: Callable[[T, T], T]) -> T:
    """Return the sum of the root from all ranks' blocks, over `leaves` leaves in all (at least 1).

    A node whose right half lies beyond the last leaf equals its left child. Raises `KeyError`
    with the missing leaf where the parts do not cover the tree.
    """

    def node(level: int, index: int) -> T:
        if (level, index) in parts:
            return parts[level, index]
        if level == 0:
            raise KeyError(f"leaf {index} of {leaves} is missing from the summation tree")
        left = node(level - 1, 2 * index)
        if (2 * index + 1) << (level - 1) >= leaves:
            return left
        return add(left, node(level - 1, 2 * index + 1))

    return node((leaves - 1).bit_length(), 0)
