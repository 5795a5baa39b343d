"""Sends parameters, the state of optimizers, and Python objects between the ranks."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastic_driver.horovod.common.exceptions import HorovodUsageError
from elastic_driver.horovod.common.process_sets import ProcessSet, global_process_set
from elastic_driver.horovod.torch.mpi_ops import (
    allgather,
    broadcast_,
    broadcast_async_,
    rank,
    synchronize,
)
from elastic_driver.worker.state_sync.values import (
    TensorSpec,
    apart,
    join,
    packed,
    unpacked,
)

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int
) -> None:
    """Set tensors to those of the root rank, on all ranks.

    Args:
        params: `model.state_dict()`, or pairs such as `model.named_parameters()` gives. What is
            no tensor is left alone.
        root_rank: the rank that all others follow.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        pairs = list(params)
    else:
        raise HorovodUsageError(f"parameters of type {type(params).__name__}: give a state_dict()")
    handles = [
        broadcast_async_(value.data, root_rank, f"broadcast_parameters.{name}")
        for name, value in pairs
        if isinstance(value, torch.Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give the optimizer of all ranks the state and the options of the root rank.

    Args:
        optimizer: of the same class and parameter groups on all ranks.
        root_rank: the rank that all others follow.
        model: not needed.

    Raises ValueError for L-BFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise HorovodUsageError("the state of L-BFGS cannot be broadcast")
    here = rank() == root_rank
    tree, named = apart(optimizer.state_dict()) if here else (None, [])
    specs = [TensorSpec.of(tensor) for _, tensor in named]
    name = "broadcast_optimizer_state"
    tree, specs = broadcast_object((tree, [tuple(spec) for spec in specs]), root_rank, name)
    tensors = [tensor for _, tensor in named] or [TensorSpec(*spec).allocate() for spec in specs]
    for number, tensor in enumerate(tensors):
        broadcast_(tensor, root_rank, f"{name}.{number}")
    if not here:
        optimizer.load_state_dict(join(tree, tensors))


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

    Raises `UsageError` for another object.
    """
    name = name or "broadcast_object"
    mine = rank() == root_rank
    data = _bytes(packed(obj, "the object")) if mine else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)])
    broadcast_(length, root_rank, f"{name}.length", process_set)
    if not mine:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.data", process_set)
    return obj if mine else unpacked(_content(data))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks. See `broadcast_object`."""
    name = name or "allgather_object"
    data = _bytes(packed(obj, "the object"))
    lengths = allgather(torch.tensor([len(data)]), f"{name}.lengths")
    whole = allgather(data, f"{name}.data")
    return [unpacked(_content(part)) for part in whole.split(lengths.tolist())]


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _content(tensor: torch.Tensor) -> bytes:
    data = bytearray(len(tensor))
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return bytes(data)
