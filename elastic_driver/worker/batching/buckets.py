"""Gradients and changes of buffers as a few flat tensors, in which they travel.

`batching.gradients` fills buckets, adds them over the workers and empties them again. Nothing here
communicates or chooses weights. Sizes are elements unless a name says bytes.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from elastic_driver.worker.torch_seams.tensors import buckets

BUCKET_BYTES = 25 * 1024 * 1024  # DistributedDataParallel's default


class Bucket:
    """Tensors of one dtype and device that travel as one flat tensor.

    The values are followed by one flag for each entry: whether it has a value at all. A parameter
    that no micro-batch used keeps `grad=None`, as in plain torch: optimizers skip it. One flag more
    tells all ranks that one of them has something to say.
    """

    def __init__(self, entries: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self._entries = list(entries)
        self._shapes = [tensors[entry].shape for entry in entries]
        self._sizes = [*(shape.numel() for shape in self._shapes), len(entries) + 1]
        self._like = tensors[entries[0]].new_empty(0)
        # The flags are nearly always the same as in the last step.
        self._flags = lru_cache(maxsize=1)(self._like.new_tensor)
        self.length = sum(self._sizes)

    def empty(self, length: int) -> Tensor:
        """Return a new flat tensor of the bucket's dtype and device."""
        return self._like.new_empty(length)

    def flatten(
        self,
        tensors: Sequence[Tensor | None],
        weight: float = 1,
        room: int | None = None,
        *,
        call: bool = False,
    ) -> Tensor:
        """Return weight · (this bucket's tensors, one behind the other), then the flags: (length,).

        `call` is the last flag. With `room` for more elements the rest is 0.
        """
        flat = self.empty(room or self.length)
        flat[self.length :].zero_()
        present = (*(tensors[entry] is not None for entry in self._entries), call)
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

    def unflatten(self, flat: Tensor, found: list[Tensor | None]) -> bool:
        """Put into `found`, by entry, the view of each tensor that any worker had.

        Returns whether any worker called.
        """
        *views, flags = flat[: self.length].split_with_sizes(self._sizes)
        *flagged, call = flags.tolist()
        for entry, view, shape, present in zip(
            self._entries, views, self._shapes, flagged, strict=True
        ):
            found[entry] = view.view(shape) if present else None
        return bool(call)


def make_buckets(tensors: list[Tensor]) -> list[Bucket]:
    """Return buckets that are full at `BUCKET_BYTES`, as `DistributedDataParallel` makes them."""
    if not tensors:
        return []
    return [Bucket(entries, tensors) for entries in buckets(tensors, BUCKET_BYTES)]
