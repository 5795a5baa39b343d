"""How a model's gradients and buffers travel: many tensors as few flat ones.

`worker.gradients` fills buckets, adds them over the workers and empties them again. Nothing
here communicates or decides weights. Sizes are elements unless a name says bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from elastic_driver.errors import UsageError

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
        self._parts = [sum(self._sizes), len(self._entries)]
        self._spare: list[Tensor] = []
        self._known: tuple[tuple[bool, ...], Tensor] | None = None
        self.length = sum(self._parts)

    def empty(self, length: int) -> Tensor:
        """A new flat tensor of the bucket's dtype and device."""
        return self._like.new_empty(length)

    def recycle(self, flat: Tensor) -> None:
        """Take back a tensor that `flatten` made: fresh memory costs more than the copying."""
        self._spare.append(flat)

    def flatten(self, tensors: Sequence[Tensor | None], weight: float = 1) -> Tensor:
        """weight · (this bucket's tensors, one behind the other), then the flags: (length,)."""
        flat = self._spare.pop() if self._spare else self.empty(self.length)
        values, flags = flat.split(self._parts)
        places = values.split(self._sizes)
        for place, entry, size in zip(places, self._entries, self._sizes, strict=True):
            tensor = tensors[entry]
            if tensor is None:
                place.zero_()
            elif tensor.layout == torch.strided and tensor.numel() == size:
                torch.mul(tensor.reshape(-1), weight, out=place)
            else:
                raise UsageError(
                    "FixedBatch cannot add sparse gradients; use Embedding(sparse=False)"
                )
        flags.copy_(self._flags(tuple(tensors[entry] is not None for entry in self._entries)))
        return flat

    def _flags(self, present: tuple[bool, ...]) -> Tensor:
        """These flags as a tensor; nearly always those of the last time."""
        if self._known is None or self._known[0] != present:
            self._known = present, self._like.new_tensor(present)
        return self._known[1]

    def unflatten(self, flat: Tensor) -> list[tuple[int, Tensor | None]]:
        """(entry, its view into `flat`, or None where nobody had it) of each tensor."""
        values, flags = flat[: self.length].split(self._parts)
        present = (flags != 0).tolist()
        views = values.split(self._sizes)
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

    Counters and flags (BatchNorm's `num_batches_tracked`) are added as 64-bit integers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers: list[Tensor] = list(model.buffers())
        self._start: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._buffers)

    def as_numbers(self) -> list[Tensor]:
        """The buffers in the dtype in which their changes are added."""
        return [_as_number(buffer) for buffer in self._buffers]

    def begin(self) -> None:
        """Note the values at the start of the step."""
        self._start = [buffer.detach().clone() for buffer in self._buffers]

    def rewind(self) -> None:
        """Put the noted values back."""
        for buffer, start in zip(self._buffers, self._start, strict=True):
            buffer.copy_(start)

    def measure(self, virtual_worker: int, weight: float) -> list[Tensor | None]:
        """weight · change of each buffer since the start of the step; None where there is none.

        Counters count virtual worker 0 only: one step adds what one micro-batch adds.
        """
        changes: list[Tensor | None] = []
        for buffer, start in zip(self._buffers, self._start, strict=True):
            if torch.equal(buffer, start) or (virtual_worker != 0 and not _floats(buffer)):
                changes.append(None)
                continue
            # Where nothing changed the difference is 0, also between two infinities (masks).
            change = torch.where(buffer == start, 0, _as_number(buffer) - _as_number(start))
            changes.append(change.mul_(weight) if _floats(buffer) else change)
        return changes

    def apply(self, entry: int, change: Tensor | None) -> None:
        """Set a buffer to its value at the start plus the summed change."""
        start = self._start[entry]
        self._buffers[entry].copy_(start if change is None else _as_number(start) + change)


def _as_number(buffer: Tensor) -> Tensor:
    """The buffer itself if it holds floating-point numbers, else as 64-bit integers."""
    return buffer if _floats(buffer) else buffer.to(torch.int64)


def _floats(buffer: Tensor) -> bool:
    return bool(buffer.is_floating_point() or buffer.is_complex())
