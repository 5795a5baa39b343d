"""Loads the state of an optimizer exactly as it was, into the objects that scripts hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def same_objects(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let what happens inside change the contents of groups and state, not the objects.

    torch makes new ones when it loads a state. A scheduler of the optimizer that was given to
    `DistributedOptimizer` would go on with the old ones, and change no rate any more.
    """
    groups, state = optimizer.param_groups, optimizer.state
    yield
    loaded, optimizer.param_groups = optimizer.param_groups, groups
    for group, new in zip(groups, loaded, strict=True):
        if group is not new:
            group.clear()
            group.update(new)
    if optimizer.state is not state:
        content, optimizer.state = optimizer.state, state
        state.clear()
        state.update(content)


def load_exactly(optimizer: torch.optim.Optimizer, received: dict[str, Any]) -> None:
    """Load a state dict; tensors of groups, such as rates, are filled in place.

    `load_state_dict` casts floating state to the dtype of its parameter, and makes other values
    anew from what they iterate over, which breaks strings. Both are put right.
    """
    before = [dict(group) for group in optimizer.param_groups]
    with same_objects(optimizer):
        optimizer.load_state_dict(received)
    for group, old in zip(optimizer.param_groups, before, strict=True):
        for key, value in group.items():
            group[key] = _filled(old.get(key), value)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in received["state"].items():
        if isinstance(index, int) and isinstance(values, dict):
            loaded = optimizer.state[parameters[index]]
            loaded.update({key: _exact(loaded.get(key), value) for key, value in values.items()})


def _filled(old: Any, new: Any) -> Any:
    """Return `old` with the content of `new` where both are tensors of one kind; else `new`."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor) or old is new:
        return new
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return new
    with torch.no_grad():
        return old.copy_(new)


def _exact(loaded: Any, sent: Any) -> Any:
    """Return the value that was sent, on the device to which torch has loaded it."""
    if isinstance(sent, Tensor):
        if not isinstance(loaded, Tensor) or loaded.dtype == sent.dtype:
            return loaded if isinstance(loaded, Tensor) else sent
        return sent.to(loaded.device)
    if type(sent) is dict and isinstance(loaded, dict):
        return {key: _exact(loaded.get(key), value) for key, value in sent.items()}
    if type(sent) in (list, tuple) and isinstance(loaded, list | tuple):
        pairs = zip(loaded, sent, strict=True)
        return type(sent)([_exact(mine, value) for mine, value in pairs])
    return sent
