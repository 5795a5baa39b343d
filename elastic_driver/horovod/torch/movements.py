"""Tensors of all ranks for all, or of one rank for all: `allgather` and `broadcast`."""

from collections.abc import Sequence
from typing import Any

import torch

from elastic_driver.horovod.common.basics import rank, size
from elastic_driver.horovod.common.exceptions import HorovodUsageError
from elastic_driver.horovod.common.process_sets import ProcessSet, global_process_set
from elastic_driver.horovod.torch.handles import begin, first, place_in, synchronize
from elastic_driver.horovod.torch.reductions import Average, allreduce, grouped_allreduce
from elastic_driver.worker.torch_seams import coordinates, entries

__all__ = [
    "allgather",
    "allgather_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "sparse_allreduce_async",
]
Tensors = Sequence[torch.Tensor]


def _allgather(tensors: Tensors, name: str | None, process_set: ProcessSet, **more: Any) -> int:
    for tensor in tensors:
        if tensor.dim() == 0:
            raise HorovodUsageError("allgather needs tensors with at least one dimension")
    return begin("allgather", tensors, name, process_set, **more)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin `allgather`; return a handle."""
    return _allgather([tensor], name, process_set, pick=first)


class _GroupedAllgather(torch.autograd.Function):  # type: ignore[misc] # torch has no types
    """`grouped_allgather` with its gradient: the average over ranks of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, name: Any, process_set: Any, *tensors: Any) -> Any:
        """Return the gathered tensors."""
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return synchronize(_allgather(tensors, name, process_set, pick=tuple, gather=False))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of the arguments."""
        process_set = ctx.process_set
        averages = grouped_allreduce(list(grads), process_set=process_set)
        rows = allgather(torch.tensor([ctx.rows]), process_set=process_set)
        before = rows[: place_in(process_set).index].sum(dim=0).tolist()
        mine = [a.narrow(0, b, n) for a, b, n in zip(averages, before, ctx.rows, strict=True)]
        return (None, None, *mine)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all ranks, one after the other along the first dimension.

    The first dimension may differ from rank to rank; the others and the dtype are the same.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin `grouped_allgather`; return a handle."""
    return _allgather(tensors, name, process_set, pick=list)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return several gathered tensors, as one operation. See `allgather`."""
    return list(_GroupedAllgather.apply(name, process_set, *tensors))


def _broadcast(
    tensor: torch.Tensor,
    output: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    **more: Any,
) -> int:
    ranks = process_set.ranks or range(size())
    if root_rank not in ranks:
        raise HorovodUsageError(f"root rank {root_rank} is not in {process_set}")
    return begin(
        "broadcast", [tensor], name, process_set, outputs=[output], root=int(root_rank), **more
    )


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin `broadcast`; return a handle."""
    output = torch.empty_like(tensor, requires_grad=False)
    return _broadcast(tensor, output, root_rank, name, process_set, pick=first)


class _Broadcast(torch.autograd.Function):  # type: ignore[misc] # torch has no types
    """`broadcast` with its gradient: the average over ranks for the root, zero for the others."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, root_rank: int, name: Any, process_set: Any) -> Any:
        """Return the tensor of the root rank."""
        ctx.root_rank, ctx.process_set = root_rank, process_set
        output = torch.empty_like(tensor)
        return synchronize(
            _broadcast(tensor, output, root_rank, name, process_set, pick=first, gather=False)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of the arguments."""
        average = allreduce(grads[0], process_set=ctx.process_set)
        if rank() != ctx.root_rank:
            average = torch.zeros_like(average)
        return average, None, None, None


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor of `root_rank`, a rank of the world; it has the same shape on all ranks."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin `broadcast` in place; return a handle."""
    return _broadcast(tensor, tensor, root_rank, name, process_set, pick=lambda _: tensor)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Set a tensor to that of `root_rank`, and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Any:
    """Begin the sum or average of a sparse tensor; return a function that waits for the result.

    Indices and values of all ranks are put together; equal indices are added when the result is
    coalesced.
    """
    indices = coordinates(tensor).transpose(0, 1).contiguous()
    of_indices = allgather_async(indices, name=f"{name}.indices", process_set=process_set)
    of_values = allgather_async(entries(tensor), name=f"{name}.values", process_set=process_set)
    ranks = place_in(process_set).size

    def result() -> torch.Tensor:
        values, all_indices = synchronize(of_values), synchronize(of_indices)
        if op == Average:
            values = values / ranks
        return torch.sparse_coo_tensor(
            all_indices.transpose(0, 1), values, tensor.shape, check_invariants=False
        )

    return result
