"""How much of a pass over the data a `DataLoader` has handed to the training loop.

A loader draws indices ahead of the loop (`num_workers`, `prefetch_factor`), so what a sampler
yielded says nothing about what was trained. What the loop has *received* by the time the
optimizer steps does: this module finds the loader that iterates a sampler and reads its count
of delivered batches. `worker.sampler` asks. torch has no public hook for either, so the finding
is kept here, in one place, and whoever is not recognised is reported as such instead of guessed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

__all__ = ["Delivery", "find_delivery"]

_FRAMES = 6  # sampler ← batch sampler ← _next_index ← _next_data ← __next__; more is not a loader


class Delivery:
    """One pass of one loader: its batch size and how many samples it has delivered.

    Only a weak reference is kept: the end of the user's loop still ends the loader's workers.
    """

    def __init__(self, iterator: Any, batches: BatchSampler) -> None:
        self.batch_size: int = batches.batch_size
        self.drop_last: bool = batches.drop_last
        self._iterator = weakref.ref(iterator)

    def samples(self) -> int | None:
        """Samples handed to the loop (a short last batch counts full); None after its end."""
        iterator = self._iterator()
        if iterator is None:
            return None
        delivered: int = iterator._num_yielded
        return delivered * self.batch_size


def find_delivery(frame: FrameType | None, sampler: Sampler[int]) -> Delivery | None:
    """The loader in whose behalf `frame` called `iter(sampler)`, or None where there is none.

    `frame` is the caller of `Sampler.__iter__`: torch's `BatchSampler`, called by the
    iterator of a `DataLoader`.
    """
    owners = _selves(frame)
    batches = next(owners, None)
    if not isinstance(batches, BatchSampler) or batches.sampler is not sampler:
        return None
    for owner in owners:
        if isinstance(owner, _BaseDataLoaderIter) and hasattr(owner, "_num_yielded"):
            return Delivery(owner, batches)
    return None


def _selves(frame: FrameType | None) -> Iterator[object]:
    """The `self` of each frame on the way up."""
    for _ in range(_FRAMES):
        if frame is None:
            return
        yield frame.f_locals.get("self")
        frame = frame.f_back
