"""`elastic.wrap`: DistributedDataParallel for the world of the moment, taken down with it.

A DDP object hooks itself onto the parameters it wraps, and its hooks stay until its reducer is
gone. The model outlives many worlds, so `membership` takes every wrapper down when a world is left:
explicitly, for a reference kept in some traceback would otherwise leave hooks of a dead
group on live parameters.
"""

from __future__ import annotations

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
    """`model` under DistributedDataParallel in the current world; call it after each rejoin.

    Call it inside the function under `@elastic.run`, as its first step. The model stays on
    the device it is on. A model that the state has just synchronised is not broadcast again.

    Args:
        model: the module to train; its parameters stay the same objects.
        ddp_kwargs: passed on to DistributedDataParallel.

    Raises `UsageError` before this process is in a world.
    """
    current.place()
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device.type == "cuda":
        ddp_kwargs.setdefault("device_ids", [parameter.device.index])
    if model in _in_sync:
        ddp_kwargs.setdefault("init_sync", False)
    ddp = DistributedDataParallel(model, **ddp_kwargs)
    _wrapped.add(ddp)
    return ddp


@contextlib.contextmanager
def without_ddp_sync(model: Module) -> Iterator[None]:
    """While this lasts, wrappers of `model` communicate nothing: `FixedBatch` does it for them.

    Their own mean over ranks would be wrong where ranks have different shares, and hang where one
    has none.
    """
    before = [
        (ddp, ddp.require_backward_grad_sync, ddp.require_forward_param_sync)
        for ddp in _wrapped
        if ddp.module is model
    ]
    for ddp, _, _ in before:
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
    try:
        yield
    finally:
        for ddp, gradients, parameters in before:
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = gradients, parameters


def mark_in_sync(model: Module) -> None:
    """All ranks hold this model with the same values now."""
    _in_sync.add(model)


def tear_down_wrappers() -> None:
    """Take the hooks of every wrapper off the parameters and let go of the process group."""
    for ddp in list(_wrapped):
        ddp.reducer = ddp.logger = None  # the last references: the destructor removes the hooks
        ddp.process_group = None
    _wrapped.clear()
    _in_sync.clear()
