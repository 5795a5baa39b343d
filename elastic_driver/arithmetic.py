"""Arithmetic that several parts have in common, without data, tensors or processes.

**Shares of a step.** A job is written for N *virtual workers*; each trains one micro-batch in an
optimizer step. The N₀ real workers of the moment share them as contiguous ranges, so the step, and
the order in which its gradients are added, is the same for every N₀. Counts are micro-batches
unless said otherwise.

**A seeded shuffle that takes no memory.** A data set of 10⁹ samples is shuffled without a list of
10⁹ indices: the position of each one is computed by a small cipher over 0 … n−1. Samplers and the
shard ledger use it; it is for spreading samples, never for secrets. The cipher is the alternating
Feistel network of Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002): an
index is written as (left, right) in mixed radix a × b ≥ n, and each round adds a hash of one half
to the other. Results ≥ n are enciphered again.

**The usual value** of nodes or ranks, some of which are slow. **Slots of hosts**, less what limits
them: a job limits its own, and the Brain those of each job.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import isqrt
from statistics import median
from typing import Any, Generic, TypeVar

from elastic_driver.errors import UsageError

_ROUNDS = 8
_ROUNDS_IF_SMALL = 24  # few elements have few distinct round functions, so more are needed
_SMALL = 256
_MASK = (1 << 64) - 1
_FACTOR = 0xD6E8FEB86659FD93  # the multiplier of the hash


def mix(*numbers: int) -> int:
    """Return a well-mixed 64-bit number from whole numbers, the same on every machine and version.

    It is the finaliser of SplitMix64, chained. Used to derive seeds: mix(seed, epoch, …).
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + (number & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class Permutation:
    """A shuffled order of 0 … size − 1: `order[position]` is the number at that position."""

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        a = isqrt(max(0, size - 1)) + 1
        self._sides = a, -(-size // a) if size else 1
        rounds = _ROUNDS if size > _SMALL else _ROUNDS_IF_SMALL
        self._keys = [(mix(key, turn), mix(key, turn + 1)) for turn in range(0, rounds, 2)]

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} is outside an order of {self.size}")
        found: int = self.encipher(position)
        while found >= self.size:  # a·b exceeds size by less than a: this is rare
            found = self.encipher(found)
        return found

    def position(self, number: int) -> int:
        """Return the position at which the order has this number: the inverse of `order[…]`."""
        if not 0 <= number < self.size:
            raise IndexError(f"{number} is outside an order of {self.size}")
        found = self._decipher(number)
        while found >= self.size:
            found = self._decipher(found)
        return found

    def _decipher(self, index: int) -> int:
        a, b = self._sides
        left, right = divmod(index, b)
        for first, second in reversed(self._keys):
            right = (right - _hash(left, second) % b) % b
            left = (left - _hash(right, first) % a) % a
        return left * b + right

    def encipher(self, index: Any) -> Any:
        """Apply the cipher once to a number, or to each of a NumPy array of 64-bit unsigned ones.

        A result that is not below the size has to be enciphered again.
        """
        a, b = self._sides
        left, right = divmod(index, b)
        for first, second in self._keys:
            left = (left + _hash(right, first) % a) % a
            right = (right + _hash(left, second) % b) % b
        return left * b + right


def _hash(value: Any, key: int) -> Any:
    value = ((value + key) * _FACTOR) & _MASK
    value = ((value ^ (value >> 32)) * _FACTOR) & _MASK
    return value ^ (value >> 32)


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


# ---- usual values ---------------------------------------------------------------------

_ANCHOR = 4  # the lower quartile; of up to four values it is the smallest


def usual(values: Iterable[float], factor: float) -> float:
    """Return the median of the values up to `factor` times the lower quartile.

    A plain median fails if many nodes are slow: among 1, 3 it is 2, and among 1, 3, 3 it is 3. The
    lower quartile is a good node's value as long as at most three quarters are slow. One clock that
    runs too fast spoils a minimum, but not this value, in a large cluster.
    Raises ValueError for no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("nothing to compare with")
    anchor = ordered[(len(ordered) - 1) // _ANCHOR]
    return median(value for value in ordered if value <= factor * anchor)


# ---- slots of hosts ------------------------------------------------------------------------


def lowered(slots: Mapping[str, int], *limits: Mapping[str, int]) -> dict[str, int]:
    """Return the slots of each host, or the lowest limit of that host if it is lower.

    A limit of a host that has no slots here says nothing.
    """
    found = dict(slots)
    for limit in limits:
        for host, most in limit.items():
            if most < found.get(host, 0):
                found[host] = most
    return found
