"""Sends parameters, the state of optimizers, and Python objects between the ranks."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastic_driver.horovod.common.exceptions import HorovodUsageError
from elastic_driver.horovod.common.process_sets import ProcessSet, global_process_set
from elastic_driver.horovod.torch.mpi_ops import broadcast_async_, rank, synchronize
from elastic_driver.horovod.torch.objects import gather_objects, require_equal, send_object
from elastic_driver.horovod.torch.optimizer_state import load_exactly
from elastic_driver.horovod.torch.packing import apart, join
from elastic_driver.worker.state_sync.contents import TensorSpec

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any] | torch.Tensor], root_rank: int
) -> None:
    """Set tensors to those of the root rank, on all ranks.

    Args:
        params: `model.state_dict()`, or pairs such as `model.named_parameters()` gives, or a list
            of tensors. What is no tensor is left alone.
        root_rank: the rank that all others follow.

    Raises `HorovodUsageError`, on all ranks, where one has other parameters than the others.
    """
    named: dict[str, torch.Tensor] = {}

    def facts() -> dict[str, str]:
        named.update(_tensors_of(params))
        return {name: _kind(tensor) for name, tensor in named.items()}

    require_equal("broadcast_parameters", facts)
    _broadcast_all(named, root_rank, "broadcast_parameters")


def _tensors_of(params: Any) -> dict[str, torch.Tensor]:
    """Return the tensors among the parameters by name, in an order that is the same on all ranks.

    Raises `HorovodUsageError` for what is neither a dict nor a list of pairs or tensors.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | torch.nn.Module):
        listed = list(params)
        pairs = [
            each if isinstance(each, tuple) else (str(n), each) for n, each in enumerate(listed)
        ]
        if any(len(pair) != 2 for pair in pairs):
            raise HorovodUsageError("parameters are pairs of a name and a tensor, or tensors")
    else:
        raise HorovodUsageError(f"parameters of type {type(params).__name__}: give a state_dict()")
    tensors = [(name, value) for name, value in pairs if isinstance(value, torch.Tensor)]
    found = dict(tensors)
    if len(found) != len(tensors):
        raise HorovodUsageError("two parameters have the same name")
    return found


def _broadcast_all(tensors: Mapping[str, torch.Tensor], root_rank: int, name: str) -> None:
    """Set tensors, which have equal names and kinds on all ranks, to those of the root rank."""
    handles = [
        broadcast_async_(tensor.detach(), root_rank, f"{name}.{key}")
        for key, tensor in tensors.items()
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give the optimizer of all ranks exactly the state and the options of the root rank.

    Args:
        optimizer: of the same class and parameter groups on all ranks.
        root_rank: the rank that all others follow.
        model: not needed.

    Raises ValueError, on all ranks, for L-BFGS, and where one has another optimizer.
    """
    name, here = "broadcast_optimizer_state", rank() == root_rank
    require_equal(name, lambda: _facts_of(optimizer))
    named: list[tuple[str, torch.Tensor]] = []

    def document() -> Any:
        tree, tensors = apart(optimizer.state_dict())
        named.extend(tensors)
        return tree, [tuple(TensorSpec.of(tensor)) for _, tensor in tensors]

    tree, specs = send_object(document, root_rank, name, global_process_set)
    tensors = [tensor for _, tensor in named] or [TensorSpec(*spec).allocate() for spec in specs]
    _broadcast_all({str(n): each for n, each in enumerate(tensors)}, root_rank, name)
    if not here:
        load_exactly(optimizer, join(tree, tensors))


def _facts_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return what the optimizers of all ranks have to have in common."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise HorovodUsageError("the state of L-BFGS cannot be broadcast")
    facts = {"the optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            facts[f"parameter {index} of group {number}"] = _kind(parameter)
    return facts


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root rank's object on all ranks.

    Plain values, containers and tensors can be sent, and classes that all ranks allow with
    `torch.serialization.add_safe_globals`. Nothing that comes is executed.

    Args:
        obj: counts on the root rank only.
        root_rank: a rank of the world.
        name: makes the calls of the ranks one operation.
        process_set: the ranks that take part.

    Raises an error for another object, on all ranks: on the root rank its own, on the others
    `HorovodUsageError` with the root rank and the reason.
    """
    return send_object(lambda: obj, root_rank, name or "broadcast_object", process_set)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks. See `broadcast_object`.

    An object that one rank cannot send is an error on all ranks.
    """
    return gather_objects(lambda: obj, name or "allgather_object")
