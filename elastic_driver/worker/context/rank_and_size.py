"""Rank and size of this process, also where no elastic world was joined.

Samplers and `FixedBatch` ask, so that the same script runs under `elasticrun`, under another
launcher, and alone.
"""

from __future__ import annotations

import torch.distributed as dist

from elastic_driver.worker.context import current

__all__ = ["whereabouts"]


def whereabouts() -> tuple[int, int]:
    """(rank, size) of this process: the elastic world, else torch's default group, else alone."""
    if current.is_initialized():
        return current.rank(), current.size()
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
