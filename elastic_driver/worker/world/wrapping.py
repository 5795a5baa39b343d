"""`elastic.wrap`: DistributedDataParallel for the current world, taken down with it.

A DDP object hooks itself onto the parameters it wraps, and its hooks stay until its reducer is
gone. The model outlives many worlds, so `membership` takes every wrapper down when it leaves a
world. It does so explicitly: a reference kept in a traceback would otherwise leave the hooks of a
dead group on live parameters.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from elastic_driver.worker import current

_wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_in_sync: weakref.WeakSet[Module] = weakref.WeakSet()


def wrap(model: Module, **ddp_kwargs: Any) -> DistributedDataParallel:
    """Return `model` under DistributedDataParallel in the current world.

    Call it as the first step of the function under `@elastic.run`, which runs again after each
    change of the world. The model stays on its device. A model that the state has just
    synchronised is not broadcast again.

    Args:
        model: the module to train; its parameters stay the same objects.
        ddp_kwargs: passed on to DistributedDataParallel.

    Raises `UsageError` before this process is in a world.
    """
    current.place()
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device.type != "cpu":
        ddp_kwargs.setdefault("device_ids", [parameter.device.index])
    if model in _in_sync:
        ddp_kwargs.setdefault("init_sync", False)
    ddp = DistributedDataParallel(model, **ddp_kwargs)
    _wrapped.add(ddp)
    return ddp


@contextlib.contextmanager
def without_ddp_sync(model: Module) -> Iterator[None]:
    """Disable the communication of all wrappers of `model` inside; `FixedBatch` does it for them.

    Their own mean over ranks would be wrong where ranks have different numbers of micro-batches,
    and would hang where one has none. Unlike `no_sync`, buffers are not broadcast either.
    """
    wrappers = [ddp for ddp in _wrapped if ddp.module is model]
    before = [(d.require_backward_grad_sync, d.require_forward_param_sync) for d in wrappers]
    for ddp in wrappers:
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
    try:
        yield
    finally:
        for ddp, (gradients, parameters) in zip(wrappers, before, strict=True):
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = gradients, parameters


def mark_in_sync(model: Module) -> None:
    """Record that all ranks hold this model with the same values."""
    _in_sync.add(model)


def tear_down_wrappers() -> None:
    """Remove the hooks of every wrapper from the parameters and drop its process group."""
    for ddp in list(_wrapped):
        ddp.reducer = ddp.logger = None  # the last references: the destructor removes the hooks
        ddp.process_group = None
    _wrapped.clear()
    _in_sync.clear()
