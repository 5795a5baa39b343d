"""Sums the gradients of micro-batches to the gradient of the step, the same on every rank.

`worker.batches` calls `before()` and `after()` around each micro-batch, and `finish()` at the end
of the step. Then every `parameter.grad` is the weighted sum Σ wᵥ·gᵥ over all virtual workers v of
the job. Nothing is communicated before `finish()`. Ranks may have different shares; a rank without
micro-batches takes part and adds nothing.

Buffers (BatchNorm's running statistics) follow the same rule: each micro-batch starts from the
buffer's value when the step began. A floating-point buffer then moves by the weighted sum of the
changes, a counter by virtual worker 0's change. So buffers, too, depend on the step alone.

There are two ways to add: `PlainSum` (all-reduce; the last bits depend on the number of workers)
and `ExactSum` (a fixed tree; they do not). Both use torch's default process group.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_driver.errors import UsageError
from elastic_driver.policies.microbatches import Block, TreeSum, finish_tree, tree_blocks
from elastic_driver.worker.batching.buckets import BufferChanges, make_buckets

# Gradients, None where there is none, then the changes of floating-point buffers.
Entries = list[Tensor | None]


class StepSum(ABC):
    """The base of both ways to add: the layout, and putting the result in place."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
        if not self._parameters:
            raise UsageError("FixedBatch was given a model without trainable parameters")
        self.device: torch.device = self._parameters[0].device  # also of buffers
        self._buffers = BufferChanges(model)
        self._places: list[Tensor] = [*self._parameters, *self._buffers.values()]  # of the entries
        self._buckets = make_buckets(self._places)

    def begin(self, ranges: Sequence[range], weights: Sequence[float], rank: int) -> None:
        """Start a step without gradients.

        `weights` has the weight of each micro-batch; `ranges[r]` are the micro-batches of rank r.
        """
        leaves = len(weights)
        self._ranges = [range(min(r.start, leaves), min(r.stop, leaves)) for r in ranges]
        self._mine, self._weights = self._ranges[rank], weights
        self._drop_gradients()
        self._buffers.begin()

    def abandon(self) -> None:
        """Put the buffers back to where the step started: it was left half done."""
        self._buffers.rewind()
        self._drop_gradients()

    def before(self, virtual_worker: int) -> None:  # noqa: ARG002 - PlainSum needs it
        """Prepare for the micro-batch of this virtual worker."""
        self._buffers.rewind()

    @abstractmethod
    def after(self, virtual_worker: int) -> None:
        """Take over the gradients of this virtual worker's micro-batch, after its backward pass."""

    def finish(self) -> None:
        """Collective: leave the sums in `parameter.grad` and in the buffers."""
        counts, works = self._buffers.counts(), []
        if len(self._ranges) > 1:  # sums of whole numbers are exact in any order
            works = [dist.all_reduce(count, async_op=True) for count in counts]
        entries = self._sum()
        for work in works:
            work.wait()
        for parameter, gradient in zip(self._parameters, entries, strict=False):
            parameter.grad = gradient
        changes = [change for change in entries[len(self._parameters) :] if change is not None]
        self._buffers.apply(changes, counts)

    def _sum(self) -> Entries:
        """Collective: return the entries of the whole step."""
        if len(self._ranges) == 1:
            return self._sum_alone()
        entries: Entries = [None] * len(self._places)
        for bucket, flat in zip(self._buckets, self._exchange(), strict=True):
            bucket.unflatten(flat, entries)
        return entries

    @abstractmethod
    def _sum_alone(self) -> Entries:
        """Return the entries of the whole step, which this worker has trained alone."""

    @abstractmethod
    def _exchange(self) -> list[Tensor]:
        """Collective: return the summed buckets."""

    def _gradients(self) -> Entries:
        return [parameter.grad for parameter in self._parameters]

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class PlainSum(StepSum):
    """Sums by all-reduce; the gradients need no more memory than the buckets.

    autograd adds this rank's micro-batches into `parameter.grad`, as in any accumulation. If the
    next weight differs, the sum so far is rescaled; one multiplication at the end applies the
    last weight.
    """

    def begin(self, ranges: Sequence[range], weights: Sequence[float], rank: int) -> None:
        """Start a step without gradients."""
        super().begin(ranges, weights, rank)
        self._weight = 0.0
        self._changes: list[Tensor] = []

    def before(self, virtual_worker: int) -> None:
        """Rescale the sum so far to the weight of the next micro-batch."""
        super().before(virtual_worker)
        weight = self._weights[virtual_worker]
        if weight != self._weight:
            _scale(self._entries(), self._weight / weight)
            self._weight = weight

    def after(self, virtual_worker: int) -> None:
        """Add the changes of buffers; autograd has added the gradients itself."""
        changes = self._buffers.changes(virtual_worker)
        if self._changes:
            torch._foreach_add_(self._changes, changes)
        else:
            self._changes = changes

    def _entries(self) -> Entries:
        return [*self._gradients(), *(self._changes or [None] * len(self._buffers.values()))]

    def _sum_alone(self) -> Entries:
        return _scale(_dense(self._entries()), self._weight)

    def _exchange(self) -> list[Tensor]:
        entries = _dense(self._entries())
        flats = [bucket.flatten(entries, self._weight) for bucket in self._buckets]
        for work in [dist.all_reduce(flat, async_op=True) for flat in flats]:
            work.wait()
        return flats


class ExactSum(StepSum):
    """Sums in the fixed tree of `policies.microbatches`, with the same bits on any world size.

    Each rank keeps O(log N) partial sums of its own leaves. At the end each rank is given one part
    of a bucket's elements: it receives that part of all ranks' partial sums (one all-to-all),
    finishes the tree, and an all-gather gives the result to all. So every element is added by one
    rank only, in an order that does not depend on the ranks.

    Leaves are weighed relative to the step's first one, and the root is multiplied with the weight
    of that: in a full step no leaf has to be scaled. The tree adds the tensors that autograd made;
    nothing is copied before it is sent.
    """

    def begin(self, ranges: Sequence[range], weights: Sequence[float], rank: int) -> None:
        """Start a step without gradients."""
        super().begin(ranges, weights, rank)
        self._tree: TreeSum[Entries] = TreeSum(self._mine.start, _add_entries)

    def after(self, virtual_worker: int) -> None:
        """Take the gradients and changes as the next leaf."""
        leaf = [*self._gradients(), *self._buffers.changes(virtual_worker)]
        self._drop_gradients()
        self._tree.push(_scale(leaf, self._weights[virtual_worker] / self._weights[0]))

    def _take_partial_sums(self) -> dict[Block, Entries]:
        sums = {block: _dense(entries) for block, entries in self._tree.blocks()}
        del self._tree
        return sums

    def _sum_alone(self) -> Entries:
        root = finish_tree(self._take_partial_sums(), len(self._weights), _add_entries)
        return _scale(root, self._weights[0])

    def _exchange(self) -> list[Tensor]:
        """Return each bucket's root of the tree, from this rank's partial sums and the others'.

        All buckets travel at the same time, so that a small one costs hardly any waiting.
        """
        own = list(self._take_partial_sums().values())
        blocks = [tree_blocks(leaves) for leaves in self._ranges]  # of each rank
        names, size = [block for theirs in blocks for block in theirs], len(blocks)
        arriving, gathered = [], []  # with the sent tensors, which are kept until they have arrived
        for bucket in self._buckets:
            chunk = -(-bucket.length // size)  # elements of each rank's part, the last one padded
            flats = [bucket.flatten(entries, room=size * chunk) for entries in own]
            sent = _by_receiver(flats, size) if flats else bucket.empty(0)
            received = bucket.empty(len(names) * chunk)
            counts = [len(theirs) * chunk for theirs in blocks]
            work = _all_to_all(received, counts, sent, [len(own) * chunk] * size)
            arriving.append((work, received, sent))
        for bucket, (arrival, received, _) in zip(self._buckets, arriving, strict=True):
            arrival.wait()
            parts = dict(zip(names, received.view(len(names), -1).unbind(), strict=True))
            part = finish_tree(parts, len(self._weights), Tensor.add_).mul_(self._weights[0])
            whole = bucket.empty(size * len(part))
            work = _all_gather(_as_bytes(whole), _as_bytes(part), async_op=True)
            gathered.append((work, whole[: bucket.length], part))
        for work, _, _ in gathered:
            work.wait()
        return [whole for _, whole, _ in gathered]


def _by_receiver(flats: Sequence[Tensor], size: int) -> Tensor:
    """Return the first of `size` parts of each of these, then the second of each, and so on."""
    if len(flats) == 1:
        return flats[0]
    return torch.stack([flat.view(size, -1) for flat in flats], dim=1).view(-1)


def _scale(entries: Entries, factor: float) -> Entries:
    """Multiply in place."""
    if factor != 1 and (present := [entry for entry in entries if entry is not None]):
        torch._foreach_mul_(present, factor)
    return entries


def _dense(entries: Entries) -> Entries:
    """Return the same entries; raises `UsageError` where one is sparse."""
    if any(entry is not None and entry.layout != torch.strided for entry in entries):
        raise UsageError("FixedBatch cannot add sparse gradients; use Embedding(sparse=False)")
    return entries


def _add_entries(left: Entries, right: Entries) -> Entries:
    """Return the sum, in the memory of either."""
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    if len(pairs) == len(left):
        return left
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        # None counts as zeros, as it travels: adding 0 makes a negative zero positive.
        if a is None and b is not None:
            left[place] = b.add_(0)
        elif b is None and a is not None:
            a.add_(0)
    return left


# torch 2.13 renamed it; the older name warns there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _all_to_all(received: Tensor, receive: Sequence[int], sent: Tensor, send: Sequence[int]) -> Any:
    """Begin an uneven all-to-all of elements, moved as bytes so that every dtype is supported."""
    width = sent.element_size()
    counts = [[count * width for count in side] for side in (receive, send)]
    return dist.all_to_all_single(_as_bytes(received), _as_bytes(sent), *counts, async_op=True)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
