"""What deterministic mode fixes besides the order of additions: randomness and kernels.

Every source of chance is seeded from what is being computed, never from who computes it:
the model's (dropout) from (seed, epoch, step, virtual worker), the data set's (augmentation,
collating) from the same four, whichever loader process does the work. Python's, NumPy's and
torch's global generators are meant; NumPy only where the script has loaded it.

The same bits further need the same kernels: same torch build, same kind of device, same number
of intra-op threads. `fix_kernels` sets what can be set.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from elastic_driver.batch.permutation import mix

__all__ = ["SeededData", "SeededIndices", "fix_kernels", "seed_everything"]

_DATA = 1  # keeps the data set's randomness apart from the model's


def fix_kernels(threads: int) -> None:
    """Let torch use deterministic kernels only, on this many intra-op threads.

    An operation without one then raises torch's own error, which names it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
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
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized():
            device.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed & 0xFFFFFFFF)


class SeededIndices(list[int]):
    """A micro-batch's indices, and the identity its randomness is seeded from."""

    def __init__(self, indices: Sequence[int], identity: tuple[int, ...]) -> None:
        super().__init__(indices)
        self.identity = identity

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededIndices, (list(self), self.identity)


class SeededData(Dataset[Any]):  # type: ignore[misc]  # mypy does not follow torch
    """A data set whose random augmentations depend on the micro-batch alone."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: SeededIndices) -> Any:
        """The samples of one micro-batch, fetched and collated under its seed."""
        seed_everything(_DATA, *indices.identity)
        fetch = getattr(self._dataset, "__getitems__", None)
        if fetch is not None:
            return fetch(list(indices))
        return [self._dataset[index] for index in indices]
