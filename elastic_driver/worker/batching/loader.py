"""The samples of each micro-batch of an epoch, and the seeds of their random numbers.

A micro-batch follows from (seed, epoch, step, virtual worker) alone; it makes no difference which
worker fetches it, and how far ahead. `worker.batches` uses it.

In deterministic mode random numbers follow from the same: the model's (dropout) and the data
set's (augmentation, collating), in any loader process. Python's, NumPy's and
torch's global generators are seeded; NumPy's only where the script has loaded it. The same bits
further need the same kernels: the same build of torch, kind of device, and number of intra-op
threads. `fix_kernels` sets all that can be set from here.
"""

import os
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from msgspec import Struct
from torch.utils.data import Dataset

from elastic_driver.arithmetic import Permutation, mix, sample_counts
from elastic_driver.worker import accelerator

_AHEAD = 4096  # samples whose positions are shuffled together
_DATA = 1  # makes the data set's randomness differ from the model's

# (seed, epoch, step, virtual worker) of a micro-batch.
Identity = tuple[int, int, int, int]


class EpochPlan(Struct, frozen=True):
    """An epoch cut into steps, and steps into micro-batches. Counts are samples."""

    samples: int
    virtual_workers: int
    micro_batch_size: int
    shuffle: bool
    seed: int
    epoch: int

    def counts(self, step: int) -> list[int]:
        """Return the samples of each virtual worker in this step."""
        batch = self.virtual_workers * self.micro_batch_size
        left = self.samples - step * batch
        return sample_counts(min(batch, left), self.virtual_workers, self.micro_batch_size)

    def micro_batches(self, steps: range, mine: range) -> Iterator[tuple[Identity, list[int]]]:
        """Yield identity and indices of every non-empty micro-batch of virtual workers `mine`."""
        order = Permutation(self.samples, mix(self.seed, self.epoch)) if self.shuffle else None
        spans = self._spans(steps, mine)
        while ahead := list(islice(spans, max(1, _AHEAD // self.micro_batch_size))):
            positions = [position for _, span in ahead for position in span]
            indices = iter(positions if order is None else shuffled(order, positions))
            for identity, span in ahead:
                yield identity, list(islice(indices, len(span)))

    def _spans(self, steps: range, mine: range) -> Iterator[tuple[Identity, range]]:
        """Yield identity and positions in the epoch's order of each of these micro-batches."""
        for step in steps:
            counts = self.counts(step)
            start = step * self.virtual_workers * self.micro_batch_size + sum(counts[: mine.start])
            for virtual_worker in mine:
                positions = range(start, start + counts[virtual_worker])
                start = positions.stop
                if positions:
                    yield (self.seed, self.epoch, step, virtual_worker), positions


def shuffled(order: Permutation, positions: Sequence[int]) -> list[int]:
    """Return `[order[p] for p in positions]`, with NumPy at a tenth of the cost."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return [order[position] for position in positions]
    found = order.encipher(numpy.array(positions, dtype=numpy.uint64))
    while (outside := found >= order.size).any():
        found[outside] = order.encipher(found[outside])
    values: list[int] = found.tolist()
    return values


class SeededData(Dataset[Any]):  # type: ignore[misc]  # mypy does not follow torch
    """A data set whose random augmentations depend on the micro-batch alone."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, micro_batch: tuple[Identity, list[int]]) -> Any:
        """Fetch the samples of one micro-batch, which then is collated under its seed too."""
        identity, indices = micro_batch
        seed_everything(_DATA, *identity)
        fetch = getattr(self._dataset, "__getitems__", None)
        if fetch is not None:
            return fetch(indices)
        return [self._dataset[index] for index in indices]


# ---- deterministic mode ------------------------------------------------------------------


def fix_kernels(threads: int) -> None:
    """Let torch use deterministic kernels only, on this many intra-op threads.

    An operation without a deterministic kernel then raises torch's own error, which names it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    # Would fill every new tensor before it is written to, and matters only to scripts that read
    # memory they never wrote: https://docs.pytorch.org/docs/stable/deterministic.html
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(threads)


def seed_everything(*identity: int) -> None:
    """Seed all global generators of this process from whole numbers."""
    seed = mix(*identity)
    random.seed(seed)
    # Not torch.manual_seed: for each kind of device that was not used yet it formats a traceback,
    # to seed it later, which costs more than a small micro-batch.
    torch.default_generator.manual_seed(seed)
    if (device := accelerator.in_use()) is not None:
        getattr(device, "manual_seed_all", device.manual_seed)(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed & 0xFFFFFFFF)
