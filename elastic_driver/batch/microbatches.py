"""Who trains which part of a fixed global batch, and in which order its gradients are added.

A job is written for N *virtual workers*, each one micro-batch an optimizer step. The N₀ real
workers of the moment share them as contiguous ranges, so the step is the same whatever N₀ is.
`worker.batches` asks; nothing here touches data, tensors or processes. Counts are micro-batches
unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Generic, TypeVar

from elastic_driver.errors import UsageError

__all__ = [
    "Block",
    "TreeSum",
    "allocate_microbatches",
    "allocate_weighted",
    "finish_tree",
    "sample_counts",
    "virtual_ranges",
]

Block = tuple[int, int]
"""A node of the summation tree, (level, index): its leaves start at index·2^level."""

T = TypeVar("T")


def allocate_microbatches(virtual_workers: int, workers: int) -> list[int]:
    """Micro-batches per real worker, by rank: as equal as whole numbers allow, larger ones first.

    mᵢ = ⌊N/N₀⌋ + 1 for i < N mod N₀, else ⌊N/N₀⌋: (8, 3) → [3, 3, 2], (7, 2) → [4, 3]. With more
    workers than micro-batches the last ones get 0: they are standbys that train nothing.

    Raises `UsageError` unless both are positive whole numbers.
    """
    _require_counts(virtual_workers, workers)
    share, surplus = divmod(virtual_workers, workers)
    return [share + 1] * surplus + [share] * (workers - surplus)


def allocate_weighted(virtual_workers: int, speeds: Sequence[float]) -> list[int]:
    """Micro-batches per real worker in proportion to measured speeds (any unit, one per rank).

    Everybody gets one as far as they go; the rest follows the speeds by the method of the
    largest remainder (Hamilton), a tie goes to the lower rank. Equal speeds give the same
    shares as `allocate_microbatches`. The sum is always `virtual_workers`.

    Raises `UsageError` for no workers, or a speed that is not a positive finite number.
    """
    workers = len(speeds)
    _require_counts(virtual_workers, workers)
    for rank, speed in enumerate(speeds):
        if not isfinite(speed) or speed <= 0:
            raise UsageError(
                f"the speed of rank {rank} is {speed!r}; "
                "give each worker a positive number, such as micro-batches a second"
            )
    if virtual_workers <= workers:
        fastest = sorted(range(workers), key=lambda rank: (-speeds[rank], rank))
        chosen = set(fastest[:virtual_workers])
        return [int(rank in chosen) for rank in range(workers)]
    return _largest_remainder(virtual_workers, speeds)


def _largest_remainder(total: int, speeds: Sequence[float]) -> list[int]:
    """Shares that sum to `total`, each at least 1; `total` is at least the number of speeds."""
    largest = max(speeds)  # scaling first: the sum of huge speeds must not overflow
    scaled = [speed / largest for speed in speeds]
    whole = sum(scaled)
    quotas = [total * speed / whole for speed in scaled]
    shares = [max(1, int(quota)) for quota in quotas]
    while sum(shares) > total:  # the guaranteed 1 of slow workers is paid by the best served
        over = max(
            (rank for rank, share in enumerate(shares) if share > 1),
            key=lambda rank: (shares[rank] - quotas[rank], rank),
        )
        shares[over] -= 1
    wanting = sorted(range(len(speeds)), key=lambda rank: (shares[rank] - quotas[rank], rank))
    for turn in range(total - sum(shares)):
        shares[wanting[turn % len(wanting)]] += 1
    return shares


def _require_counts(virtual_workers: int, workers: int) -> None:
    for name, count in (("virtual workers", virtual_workers), ("workers", workers)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"the number of {name} is {count!r}; it must be a whole number from 1")


def virtual_ranges(shares: Sequence[int]) -> list[range]:
    """The contiguous virtual workers of each rank: [3, 3, 2] → 0–2, 3–5, 6–7."""
    ranges: list[range] = []
    start = 0
    for share in shares:
        ranges.append(range(start, start + share))
        start += share
    return ranges


def sample_counts(samples: int, virtual_workers: int, micro_batch_size: int) -> list[int]:
    """How a step's samples are spread over the virtual workers, none above `micro_batch_size`.

    A full step gives each a full micro-batch. The short last step of an epoch is spread evenly
    over the first virtual workers, over no more of them than needed: micro-batches of a single
    sample, which BatchNorm refuses, come up only where they cannot be avoided.
    """
    busy = -(-samples // micro_batch_size)
    if busy > virtual_workers:
        raise ValueError(f"{samples} samples are more than one step holds")
    share, surplus = divmod(samples, max(1, busy))
    return [share + 1] * surplus + [share] * (busy - surplus) + [0] * (virtual_workers - busy)


class TreeSum(Generic[T]):
    """Adds contiguous leaves of a fixed binary tree as they come, keeping O(log leaves) sums.

    The tree over leaves 0 … n−1 is the aligned one: node (level, index) is the sum of its two
    children at level − 1. Whoever holds leaves [a, b) can finish exactly the nodes that lie
    inside, so each addition of the whole tree is made with the same two operands however the
    leaves are spread: floating-point sums come out with the same bits.
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
        """The maximal finished nodes and their sums, from left to right."""
        return list(self._stack)


def tree_blocks(leaves: range) -> list[Block]:
    """The nodes `TreeSum` ends with for these leaves, so that peers know what will arrive."""
    tree: TreeSum[None] = TreeSum(leaves.start, lambda _left, _right: None)
    for _ in leaves:
        tree.push(None)
    return [block for block, _ in tree.blocks()]


def finish_tree(parts: Mapping[Block, T], leaves: int, add: Callable[[T, T], T]) -> T:
    """The root's sum from everybody's blocks, over `leaves` leaves in all (at least 1).

    A node whose right half lies beyond the last leaf is its left child. Raises `KeyError`
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
