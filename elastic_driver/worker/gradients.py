"""Turns the micro-batches' gradients into the gradient of the step, the same on every rank.

`worker.batches` brackets each micro-batch with `before()` and `after()` and ends the step with
`finish()`; then every `parameter.grad` is the weighted sum Σ wᵥ·gᵥ over all virtual workers v of
the job. Nothing is communicated before `finish()`. A rank without micro-batches takes part with
nothing to add, so ranks may have different shares, none included.

Buffers (BatchNorm's running statistics) follow the same rule: each micro-batch starts from the
step's first value; a floating-point buffer then moves by the weighted sum of the changes, a
counter by virtual worker 0's change. So buffers, too, depend on the step alone.

Two ways to add: `PlainSum` (all-reduce; the last bits depend on the number of workers) and
`ExactSum` (a fixed tree; they do not). Both use torch's default process group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_driver.core.batch import Block, TreeSum, finish_tree, tree_blocks
from elastic_driver.errors import UsageError
from elastic_driver.worker.buckets import BUCKET_BYTES, Bucket, BufferChanges, make_buckets

__all__ = ["ExactSum", "PlainSum", "StepSum"]


class StepSum(ABC):
    """What both ways of adding share: the layout, and putting the result in place."""

    def __init__(self, model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
        if not self._parameters:
            raise UsageError("FixedBatch was given a model without trainable parameters")
        self._buffers = BufferChanges(model)
        gradients = make_buckets(self._parameters, bucket_bytes)
        buffers = make_buckets(self._buffers.as_numbers(), bucket_bytes)
        self._gradient_buckets, self._buffer_buckets = gradients, buffers
        self._targets: list[tuple[Bucket, Callable[[int, Tensor | None], None]]] = [
            *((bucket, self._put_gradient) for bucket in gradients),
            *((bucket, self._buffers.apply) for bucket in buffers),
        ]

    def begin(self, ranges: Sequence[range], leaves: int, rank: int) -> None:
        """Start a step of `leaves` micro-batches; `ranges[r]` are rank r's virtual workers."""
        self._ranges = [range(min(r.start, leaves), min(r.stop, leaves)) for r in ranges]
        self._leaves, self._rank = leaves, rank
        self._drop_gradients()
        self._buffers.begin()

    def abandon(self) -> None:
        """The step was left half done: put the buffers back to where it started."""
        self._buffers.rewind()
        self._drop_gradients()

    def before(self, weight: float) -> None:  # noqa: ARG002 - PlainSum needs it
        """The next micro-batch, of this weight, is about to be run."""
        self._buffers.rewind()

    @abstractmethod
    def after(self, virtual_worker: int, weight: float) -> None:
        """The backward pass of this virtual worker's micro-batch is done."""

    @abstractmethod
    def finish(self) -> None:
        """Collective: leave the sums in `parameter.grad` and in the buffers."""

    def _gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def _put_gradient(self, entry: int, gradient: Tensor | None) -> None:
        self._parameters[entry].grad = gradient

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _put(self, flats: Sequence[Tensor]) -> None:
        """Empty the summed buckets into gradients and buffers."""
        for (bucket, put), flat in zip(self._targets, flats, strict=True):
            for entry, tensor in bucket.unflatten(flat):
                put(entry, tensor)


class PlainSum(StepSum):
    """Sums by all-reduce; the gradients need no more memory than the buckets.

    autograd adds this rank's micro-batches into `parameter.grad`, as in any accumulation. Where
    the next weight differs, the sum so far is rescaled, and one multiplication at the end
    applies the last weight.
    """

    def begin(self, ranges: Sequence[range], leaves: int, rank: int) -> None:
        """Start a step without gradients."""
        super().begin(ranges, leaves, rank)
        self._weight = 0.0
        self._changes: list[Tensor | None] = [None] * len(self._buffers)

    def before(self, weight: float) -> None:
        """Bring the sum so far to the scale of the next micro-batch."""
        super().before(weight)
        if weight != self._weight:
            for gradient in self._gradients():
                if gradient is not None:
                    gradient.mul_(self._weight / weight)
            self._weight = weight

    def after(self, virtual_worker: int, weight: float) -> None:
        """Note the buffers' changes; autograd has added the gradients itself."""
        for entry, change in enumerate(self._buffers.measure(virtual_worker, weight)):
            before = self._changes[entry]
            if change is not None:
                self._changes[entry] = change if before is None else before.add_(change)

    def finish(self) -> None:
        """Collective: leave the sums in `parameter.grad` and in the buffers."""
        gradients = self._gradients()
        flats = [bucket.flatten(gradients, self._weight) for bucket in self._gradient_buckets]
        flats += [bucket.flatten(self._changes) for bucket in self._buffer_buckets]
        if len(self._ranges) > 1:
            works = [dist.all_reduce(flat, async_op=True) for flat in flats]
            for work in works:
                work.wait()
        self._put(flats)


class ExactSum(StepSum):
    """Sums in the fixed binary tree of `core.batch`: the same bits for every number of workers.

    Each rank keeps O(log N) partial sums of its own leaves. At the end the ranks share a
    bucket's elements among them: each receives its part of everybody's partial sums (one
    all-to-all), finishes the tree there, and an all-gather gives the result to all. Every
    element is thus added by one rank only, in an order that names no rank.
    """

    def begin(self, ranges: Sequence[range], leaves: int, rank: int) -> None:
        """Start a step without gradients."""
        super().begin(ranges, leaves, rank)
        first = self._ranges[rank].start
        self._trees: list[TreeSum[Tensor]] = [
            TreeSum(first, partial(_add_and_recycle, bucket)) for bucket, _ in self._targets
        ]

    def after(self, virtual_worker: int, weight: float) -> None:
        """Take the gradients and changes as the next leaf."""
        gradients = self._gradients()
        leaves = [bucket.flatten(gradients, weight) for bucket in self._gradient_buckets]
        self._drop_gradients()
        changes = self._buffers.measure(virtual_worker, weight)
        leaves += [bucket.flatten(changes) for bucket in self._buffer_buckets]
        for tree, leaf in zip(self._trees, leaves, strict=True):
            tree.push(leaf)

    def finish(self) -> None:
        """Collective: leave the sums in `parameter.grad` and in the buffers."""
        buckets = [bucket for bucket, _ in self._targets]
        owns = [tree.blocks() for tree in self._trees]
        if len(self._ranges) == 1:
            flats = [
                finish_tree(dict(own), self._leaves, partial(_add_and_recycle, bucket))
                for bucket, own in zip(buckets, owns, strict=True)
            ]
        else:
            flats = self._exchange(buckets, [[part for _, part in own] for own in owns])
        self._trees = []
        self._put(flats)

    def _exchange(
        self, buckets: Sequence[Bucket], owns: Sequence[Sequence[Tensor]]
    ) -> list[Tensor]:
        """Each bucket's root of the tree, from this rank's partial sums and the others'.

        All buckets travel at the same time: a small one costs no more than its waiting.
        """
        blocks = [tree_blocks(leaves) for leaves in self._ranges]
        exchanges = [
            _Exchange(bucket, own, blocks) for bucket, own in zip(buckets, owns, strict=True)
        ]
        for exchange in exchanges:
            exchange.finish_part(self._leaves)
        for bucket, own in zip(buckets, owns, strict=True):
            for part in own:
                bucket.recycle(part)
        return [exchange.whole() for exchange in exchanges]


class _Exchange:
    """One bucket on its way; the constructor sends this rank's partial sums out."""

    def __init__(
        self, bucket: Bucket, own: Sequence[Tensor], blocks: Sequence[Sequence[Block]]
    ) -> None:
        size = len(blocks)
        chunk = -(-bucket.length // size)  # elements of each rank's part, the last one padded
        sent = bucket.empty(size * len(own) * chunk).zero_().view(size, len(own), chunk)
        for place, part in enumerate(own):
            padded = torch.nn.functional.pad(part, (0, size * chunk - bucket.length))
            sent[:, place] = padded.view(size, chunk)
        counts = [len(theirs) * chunk for theirs in blocks]
        self._blocks, self._bucket, self._chunk = blocks, bucket, chunk
        self._sent = sent.reshape(-1)  # kept until it has arrived
        self._received = bucket.empty(sum(counts))
        self._whole = bucket.empty(size * chunk)
        self._work = _all_to_all(self._received, counts, self._sent, [len(own) * chunk] * size)

    def finish_part(self, leaves: int) -> None:
        """Add up this rank's part of the elements, and send the result to all."""
        self._work.wait()
        names = [block for theirs in self._blocks for block in theirs]
        parts = dict(zip(names, self._received.view(-1, self._chunk).unbind(), strict=True))
        self._root = finish_tree(parts, leaves, _add)
        self._work = _all_gather(_as_bytes(self._whole), _as_bytes(self._root), async_op=True)

    def whole(self) -> Tensor:
        """The summed bucket."""
        self._work.wait()
        return self._whole[: self._bucket.length]


# torch 2.13 renamed it; the older name warns there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _add(left: Tensor, right: Tensor) -> Tensor:
    return left.add_(right)


def _add_and_recycle(bucket: Bucket, left: Tensor, right: Tensor) -> Tensor:
    left.add_(right)
    bucket.recycle(right)
    return left


def _all_to_all(received: Tensor, receive: Sequence[int], sent: Tensor, send: Sequence[int]) -> Any:
    """Begin an uneven all-to-all of elements, moved as bytes so that every dtype is supported."""
    width = sent.element_size()
    return dist.all_to_all_single(
        _as_bytes(received),
        _as_bytes(sent),
        [count * width for count in receive],
        [count * width for count in send],
        async_op=True,
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
