"""Gradients and buffers of a model as a few flat tensors, in which they travel.

`batching.gradients` fills buckets, adds them over the workers and empties them again. Nothing here
communicates or chooses weights. Sizes are elements unless a name says bytes.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 * 1024 * 1024  # DistributedDataParallel's default


class Bucket:
    """Tensors of one dtype and device that travel as one flat tensor.

    The values are followed by one flag for each entry: whether it has a value at all. A parameter
    that no micro-batch used keeps `grad=None`, as in plain torch: optimizers skip it.
    """

    def __init__(self, entries: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self._entries = list(entries)
        self._shapes = [tensors[entry].shape for entry in entries]
        self._sizes = [*(shape.numel() for shape in self._shapes), len(self._entries)]
        self._like = tensors[entries[0]].new_empty(0)
        # The flags are nearly always the same as in the last step.
        self._flags = lru_cache(maxsize=1)(self._like.new_tensor)
        self.length = sum(self._sizes)

    def empty(self, length: int) -> Tensor:
        """Return a new flat tensor of the bucket's dtype and device."""
        return self._like.new_empty(length)

    def flatten(
        self, tensors: Sequence[Tensor | None], weight: float = 1, room: int | None = None
    ) -> Tensor:
        """Return weight · (this bucket's tensors, one behind the other), then the flags: (length,).

        With `room` for more elements the rest is 0.
        """
        flat = self.empty(room or self.length)
        flat[self.length :].zero_()
        present = tuple(tensors[entry] is not None for entry in self._entries)
        values = [
            self._like.new_zeros(size) if (tensor := tensors[entry]) is None else tensor.reshape(-1)
            for entry, size in zip(self._entries, self._sizes, strict=False)
        ]
        if weight == 1:
            torch.cat([*values, self._flags(present)], out=flat[: self.length])
            return flat
        *places, flags = flat[: self.length].split_with_sizes(self._sizes)
        for place, value in zip(places, values, strict=True):
            torch.mul(value, weight, out=place)  # copies and weighs in one pass over memory
        flags.copy_(self._flags(present))
        return flat

    def unflatten(self, flat: Tensor, found: list[Tensor | None]) -> None:
        """Put into `found`, by entry, the view of each tensor that any worker had."""
        *views, flags = flat[: self.length].split_with_sizes(self._sizes)
        places = zip(self._entries, views, self._shapes, flags.tolist(), strict=True)
        for entry, view, shape, present in places:
            found[entry] = view.view(shape) if present else None


def make_buckets(tensors: list[Tensor]) -> list[Bucket]:
    """Return buckets that are full at `BUCKET_BYTES`, as `DistributedDataParallel` makes them."""
    groups, _ = dist._compute_bucket_assignment_by_size(tensors, [BUCKET_BYTES])
    return [Bucket(entries, tensors) for entries in groups]


class BufferChanges:
    """The buffers of a model: their values when a step starts, and how micro-batches change them.

    All of one kind travel as one flat tensor. Counters and flags (BatchNorm's
    `num_batches_tracked`) are counted as 64-bit integers, apart from buffers that move by a mean.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for buffer in model.buffers():
            floats = buffer.is_floating_point() or buffer.is_complex()
            kind = buffer.dtype if floats else torch.int64, buffer.device
            kinds.setdefault(kind, []).append(buffer)
        groups = {kind: _BufferGroup(kind[0], buffers) for kind, buffers in kinds.items()}
        self._moving = [group for (dtype, _), group in groups.items() if dtype != torch.int64]
        self._counting = [group for (dtype, _), group in groups.items() if dtype == torch.int64]
        self._groups = self._moving + self._counting
        self._counts: list[Tensor] = []

    def values(self) -> list[Tensor]:
        """Return, per kind of floating-point buffer, all values in one flat tensor: (elements,)."""
        return [group.start for group in self._moving]

    def begin(self) -> None:
        """Record the values at the start of the step."""
        self._counts = []
        for group in self._groups:
            torch._foreach_copy_(group.places, group.buffers)

    def rewind(self) -> None:
        """Put the recorded values back."""
        for group in self._groups:
            torch._foreach_copy_(group.buffers, group.places)

    def changes(self, virtual_worker: int) -> list[Tensor]:
        """Return the changes by this micro-batch, in new tensors of the layout of `values`.

        Counters count virtual worker 0 only: one step adds what one micro-batch adds.
        """
        if virtual_worker == 0:
            self._counts = [group.change() for group in self._counting]
        return [group.change() for group in self._moving]

    def counts(self) -> list[Tensor]:
        """Return this worker's part of the step's increments of counters: integers, to be summed.

        They are zeros on all workers except the worker of virtual worker 0.
        """
        return self._counts or [torch.zeros_like(group.start) for group in self._counting]

    def apply(self, changes: Sequence[Tensor], counts: Sequence[Tensor]) -> None:
        """Set the buffers to their values at the start plus these sums over all workers."""
        for group, change in zip(self._groups, [*changes, *counts], strict=True):
            torch._foreach_copy_(group.buffers, group.shaped(group.start + change))


class _BufferGroup:
    """The buffers of one kind on one device; `start` has their values when the step began."""

    def __init__(self, dtype: torch.dtype, buffers: list[Tensor]) -> None:
        self._dtype, self.buffers = dtype, buffers
        self.start = self._flat()
        self.places = self.shaped(self.start)

    def change(self) -> Tensor:
        flat = self._flat()
        # The difference of two infinities (in masks) is no number.
        return torch.where(flat == self.start, 0, flat - self.start)

    def _flat(self) -> Tensor:
        return torch.cat([buffer.reshape(-1) for buffer in self.buffers]).to(self._dtype)

    def shaped(self, flat: Tensor) -> list[Tensor]:
        values = flat.split_with_sizes([buffer.numel() for buffer in self.buffers])
        return [value.view(b.shape) for value, b in zip(values, self.buffers, strict=True)]
