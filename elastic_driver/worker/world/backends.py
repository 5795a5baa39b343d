"""Which backend carries which tensors, from what the script asked for and what there is.

Gloo is always there: it carries CPU tensors, the state and the agreement of every round. Beside it,
NCCL carries CUDA tensors: where the script asks for it or, asking for nothing, in rounds in which
every worker has a GPU of its own. Called by `session`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist

from elastic_driver.errors import UsageError
from elastic_driver.worker.world import nccl
from elastic_driver.worker.world.devices import Device

_GLOO_ONLY = ({"gloo"}, {"cpu:gloo"}, {"cpu:gloo", "cuda:gloo"})
_WITH_NCCL = ({"nccl"}, {"cuda:nccl"}, {"cpu:gloo", "cuda:nccl"})
KNOWN = "gloo, nccl, or cpu:gloo,cuda:nccl"


@dataclass(frozen=True)
class Choice:
    """The device half of this worker's groups, or None: gloo carries everything.

    `by_vote`: only in rounds in which all workers have one, for the script has not asked for it.
    """

    device: Device | None = None
    by_vote: bool = False


def choose(backend: str | None, slot: int) -> Choice:
    """The choice of the worker in this slot, from a name as torch's `init_process_group` takes it.

    Raises `UsageError` for a name that is not known, and where NCCL is asked for without a GPU.
    """
    asked = set((backend or "nccl").lower().replace(" ", "").split(","))
    if asked in _GLOO_ONLY:
        return Choice()
    if asked not in _WITH_NCCL:
        raise UsageError(f"backend {backend!r} is not supported; use one of {KNOWN}")
    index = nccl.device_of(slot)
    if index is not None:
        return Choice(nccl.Nccl(index), by_vote=backend is None)
    if backend is None:
        # Where torch has no NCCL at all, no worker of the job has it, and nobody need vote.
        return Choice(by_vote=dist.is_nccl_available())
    if not dist.is_nccl_available():
        raise UsageError(f"backend {backend!r} needs a torch that is built with NCCL; use gloo")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    raise UsageError(
        f"backend {backend!r} needs a GPU for each worker, and slot {slot} has none{seen}; "
        "start no more workers on a host than it has GPUs, or use gloo"
    )
