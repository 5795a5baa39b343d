"""How a model's gradients and buffers travel: many tensors as few flat ones.

`batching.gradients` fills buckets, adds them over the workers and empties them again. Nothing here
communicates or decides weights. Sizes are elements unless a name says bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BUCKET_BYTES", "Bucket", "BufferChanges", "make_buckets"]

BUCKET_BYTES = 25 * 1024 * 1024  # DistributedDataParallel's default


class Bucket:
    """Tensors of one dtype and device that travel as one flat tensor.

    Behind the values stands one flag each: whether the entry was there at all. A parameter
    that no micro-batch used keeps `grad=None`, as without us: optimizers skip it.
    """

    def __init__(self, entries: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self._entries = list(entries)
        self._shapes = [tensors[entry].shape for entry in entries]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._like = tensors[entries[0]].new_empty(0)
        self._known: tuple[tuple[bool, ...], Tensor] | None = None
        self.length = sum(self._sizes) + len(self._entries)

    def empty(self, length: int) -> Tensor:
        """A new flat tensor of the bucket's dtype and device."""
        return self._like.new_empty(length)

    def flatten(
        self, tensors: Sequence[Tensor | None], weight: float = 1, room: int | None = None
    ) -> Tensor:
        """weight · (this bucket's tensors, one behind the other), then the flags: (length,).

        With `room` for more elements the rest is 0.
        """
        flat = self.empty(room or self.length)
        flat[self.length :].zero_()
        present = tuple(tensors[entry] is not None for entry in self._entries)
        values = [
            self._like.new_zeros(size) if (tensor := tensors[entry]) is None else tensor.reshape(-1)
            for entry, size in zip(self._entries, self._sizes, strict=True)
        ]
        *places, flags = flat[: self.length].split_with_sizes([*self._sizes, len(present)])
        if weight == 1:
            torch.cat([*values, self._flags(present)], out=flat[: self.length])
            return flat
        for place, value in zip(places, values, strict=True):
            torch.mul(value, weight, out=place)  # copies and weighs in one pass over memory
        flags.copy_(self._flags(present))
        return flat

    def _flags(self, present: tuple[bool, ...]) -> Tensor:
        """These flags as a tensor; nearly always those of the last time."""
        if self._known is None or self._known[0] != present:
            self._known = present, self._like.new_tensor(present)
        return self._known[1]

    def unflatten(self, flat: Tensor) -> list[tuple[int, Tensor | None]]:
        """(entry, its view into `flat`, or None where nobody had it) of each tensor."""
        *views, flags = flat[: self.length].split_with_sizes([*self._sizes, len(self._entries)])
        present = [flag != 0 for flag in flags.tolist()]
        return [
            (entry, view.view(shape) if there else None)
            for entry, view, shape, there in zip(
                self._entries, views, self._shapes, present, strict=True
            )
        ]


def make_buckets(tensors: Sequence[Tensor], limit: int) -> list[Bucket]:
    """Buckets of at most `limit` bytes (a larger tensor alone), in the tensors' order."""
    groups: dict[tuple[torch.dtype, torch.device], list[list[int]]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for entry, tensor in enumerate(tensors):
        key = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        if key not in groups or filled[key] + size > limit:
            groups.setdefault(key, []).append([])
            filled[key] = 0
        groups[key][-1].append(entry)
        filled[key] += size
    return [Bucket(entries, tensors) for lists in groups.values() for entries in lists]


class BufferChanges:
    """A model's buffers: their values at the start of a step, and what micro-batches change.

    All of one kind travel as one flat tensor. Counters and flags (BatchNorm's
    `num_batches_tracked`) are counted as 64-bit integers, apart from those that move by a mean.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds: dict[tuple[Any, torch.device], list[Tensor]] = {}
        for buffer in model.buffers():
            kind = buffer.dtype if _floats(buffer) else torch.int64
            kinds.setdefault((kind, buffer.device), []).append(buffer)
        groups = [_BufferGroup(dtype, buffers) for (dtype, _), buffers in kinds.items()]
        self._moving = [group for group in groups if _floats(group.start)]
        self._counting = [group for group in groups if not _floats(group.start)]
        self._counts: list[Tensor] = []
        self._touched = False

    def values(self) -> list[Tensor]:
        """Per kind of floating-point buffer, all values in one flat tensor: (elements,)."""
        return [group.start for group in self._moving]

    def begin(self) -> None:
        """Note the values at the start of the step."""
        for group in self._moving + self._counting:
            group.begin()
        self._counts = []
        self._touched = False

    def rewind(self) -> None:
        """Put the noted values back, if a micro-batch may have changed them."""
        if self._touched:
            for group in self._moving + self._counting:
                group.rewind()
        self._touched = True

    def changes(self, virtual_worker: int) -> list[Tensor]:
        """What this micro-batch has changed, in new tensors of the layout of `values`.

        Counters count virtual worker 0 only: one step adds what one micro-batch adds.
        """
        if virtual_worker == 0:
            self._counts = [group.change() for group in self._counting]
        return [group.change() for group in self._moving]

    def counts(self) -> list[Tensor]:
        """This worker's part of what the step adds to the counters: integers, to be summed."""
        return self._counts or [torch.zeros_like(group.start) for group in self._counting]

    def apply(self, changes: Sequence[Tensor], counts: Sequence[Tensor]) -> None:
        """Set the buffers to their values at the start plus these sums over all workers."""
        self._touched = True
        for group, change in zip(self._moving, changes, strict=True):
            group.move(change)
        for group, count in zip(self._counting, counts, strict=True):
            group.move(count)


class _BufferGroup:
    """The buffers of one kind on one device: `start` has their values when the step began."""

    def __init__(self, dtype: torch.dtype, buffers: Sequence[Tensor]) -> None:
        self._dtype, self._buffers = dtype, list(buffers)
        self._sizes = [buffer.numel() for buffer in buffers]
        self.start = self._flat()
        self._places = self._shaped(self.start)
        self._finite = False

    def begin(self) -> None:
        torch._foreach_copy_(self._places, self._buffers)
        # A difference of two infinities (masks) is no number: look out for them once a step.
        self._finite = not _floats(self.start) or bool(torch.isfinite(self.start).all())

    def rewind(self) -> None:
        torch._foreach_copy_(self._buffers, self._places)

    def change(self) -> Tensor:
        flat = self._flat()
        if self._finite:
            return flat.sub_(self.start)
        return torch.where(flat == self.start, 0, flat - self.start)

    def move(self, change: Tensor) -> None:
        torch._foreach_copy_(self._buffers, self._shaped(self.start + change))

    def _flat(self) -> Tensor:
        return torch.cat([buffer.reshape(-1) for buffer in self._buffers]).to(self._dtype)

    def _shaped(self, flat: Tensor) -> list[Tensor]:
        values = flat.split_with_sizes(self._sizes)
        return [value.view(b.shape) for value, b in zip(values, self._buffers, strict=True)]


def _floats(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())
