"""Tells of torch's `DistributedSampler` that was made for a world that is no more.

It keeps the size of the world and the rank that it was made with. A worker that stays in the job
keeps its process, and so the sampler: after a change of the workers its loop goes over the share of
another world, which leaves samples out, or has another length than on the other ranks.
"""

import functools
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler

from elastic_driver.worker import current
from elastic_driver.worker.mistakes.told import tell

_right_once: "weakref.WeakSet[DistributedSampler[Any]]" = weakref.WeakSet()


def watch() -> None:
    """Look at each `DistributedSampler` of this process when it is iterated.

    One whose numbers are not those of its first world, such as that of a group of ranks, is left
    alone.
    """
    iterate = DistributedSampler.__iter__
    if hasattr(iterate, "__wrapped__"):
        return

    @functools.wraps(iterate)
    def iterated(sampler: "DistributedSampler[Any]") -> Iterator[Any]:
        if current.is_initialized():
            _compare(sampler, current.size(), current.rank())
        samples: Iterator[Any] = iterate(sampler)
        return samples

    DistributedSampler.__iter__ = iterated


def _compare(sampler: "DistributedSampler[Any]", size: int, rank: int) -> None:
    shares, share = sampler.num_replicas, sampler.rank
    same_size = shares == size
    if same_size and share == rank:
        _right_once.add(sampler)
    if sampler not in _right_once or (share == rank if same_size else rank):
        return  # it is right; or rank 0 says it
    tell(
        "old-shares",
        f"a DistributedSampler that was made for rank {share} of {shares} is iterated by rank "
        f"{rank} of {size}: ranks train other shares of the data than they should; use "
        "elastic.ElasticSampler (hvd.elastic.ElasticSampler), or make sampler and loader inside "
        "the training function",
    )
