"""Which samples make up each micro-batch of an epoch, and the loader that fetches them.

`worker.batches` asks. The answer depends on (seed, epoch, step, virtual worker) alone; which
worker fetches a micro-batch, and how far ahead, makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from msgspec import Struct
from torch.utils.data import DataLoader

from elastic_driver.batch.microbatches import sample_counts
from elastic_driver.batch.permutation import Permutation, mix
from elastic_driver.worker.batching.exact import SeededData, SeededIndices
from elastic_driver.worker.batching.order import shuffled

__all__ = ["Schedule", "load"]

_AHEAD = 4096  # samples whose places are computed together, which costs a tenth


class Schedule(Struct, frozen=True):
    """An epoch cut into steps, and steps into micro-batches. Counts are samples."""

    samples: int
    virtual_workers: int
    micro_batch_size: int
    shuffle: bool
    seed: int
    epoch: int

    @property
    def batch(self) -> int:
        """Samples of a full step."""
        return self.virtual_workers * self.micro_batch_size

    def counts(self, step: int) -> list[int]:
        """Samples of each virtual worker in this step."""
        left = self.samples - step * self.batch
        return sample_counts(min(self.batch, left), self.virtual_workers, self.micro_batch_size)

    def micro_batches(self, steps: range, mine: range) -> Iterator[SeededIndices]:
        """The indices of every non-empty micro-batch of the virtual workers `mine`, in order."""
        order = Permutation(self.samples, mix(self.seed, self.epoch)) if self.shuffle else None
        places = self._places(steps, mine)
        while ahead := list(islice(places, max(1, _AHEAD // self.micro_batch_size))):
            positions = [position for _, span in ahead for position in span]
            indices = iter(positions if order is None else shuffled(order, positions))
            for identity, span in ahead:
                yield SeededIndices(list(islice(indices, len(span))), identity)

    def _places(self, steps: range, mine: range) -> Iterator[tuple[tuple[int, ...], range]]:
        """Identity and positions in the epoch's order of each of these micro-batches."""
        for step in steps:
            counts = self.counts(step)
            start = step * self.batch + sum(counts[: mine.start])
            for virtual_worker in mine:
                positions = range(start, start + counts[virtual_worker])
                start = positions.stop
                if positions:
                    yield (self.seed, self.epoch, step, virtual_worker), positions


class _MicroBatches:
    """The same as a `DataLoader`'s batch sampler."""

    def __init__(self, schedule: Schedule, steps: range, mine: range) -> None:
        self._schedule, self._steps, self._mine = schedule, steps, mine

    def __iter__(self) -> Iterator[SeededIndices]:
        return self._schedule.micro_batches(self._steps, self._mine)


def load(
    dataset: Any,
    schedule: Schedule,
    steps: range,
    mine: range,
    *,
    seeded: bool,
    options: Mapping[str, Any],
) -> Iterator[Any]:
    """The collated micro-batches of virtual workers `mine` in these steps, one after the other.

    `seeded`: augmentations depend on the micro-batch alone. `options` go to `DataLoader`. The
    process's global generators are not drawn from.
    """
    generator = torch.Generator()
    generator.manual_seed(mix(schedule.seed, schedule.epoch, steps.start, mine.start) >> 1)
    loader = DataLoader(
        SeededData(dataset) if seeded else dataset,
        batch_sampler=_MicroBatches(schedule, steps, mine),
        generator=generator,
        **options,
    )
    return iter(loader)
