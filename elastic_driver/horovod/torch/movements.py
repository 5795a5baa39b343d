"""Operations that move rows: `allgather`, `broadcast`, `alltoall` and `reducescatter`.

Each has an asynchronous form, and its gradient where Horovod's has one.
"""

from typing import Any

import torch

from elastic_driver.horovod.common.basics import Reduction, rank, size
from elastic_driver.horovod.common.exceptions import HorovodInternalError, HorovodUsageError
from elastic_driver.horovod.common.process_sets import ProcessSet, global_process_set
from elastic_driver.horovod.torch.compression import Compression
from elastic_driver.horovod.torch.handles import begin, first, place_in, synchronize
from elastic_driver.horovod.torch.reductions import (
    Average,
    Compress,
    Sum,
    Tensors,
    allreduce,
    grouped_allreduce,
)
from elastic_driver.worker.torch_seams import coordinates, entries


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


def _alltoall(
    tensor: torch.Tensor,
    splits: Any,
    name: str | None,
    process_set: ProcessSet,
    **more: Any,
) -> int:
    if tensor.dim() == 0:
        raise HorovodUsageError("alltoall needs a tensor with at least one dimension")
    ranks = place_in(process_set).size
    if splits is None:
        rows, rest = divmod(tensor.shape[0], ranks)
        if rest:
            raise HorovodUsageError(
                f"alltoall without splits: {len(tensor)} rows cannot be divided by {ranks} ranks"
            )
        counts = [rows] * ranks
    else:
        counts = _counts(splits, ranks, tensor.shape[0])
    return begin("alltoall", [tensor], name, process_set, splits=tuple(counts), **more)


def _counts(splits: Any, ranks: int, rows: int) -> list[int]:
    """Return the rows for each rank as numbers; raises `HorovodUsageError` where they are wrong."""
    if isinstance(splits, torch.Tensor):
        if splits.dtype not in (torch.int32, torch.int64):
            raise HorovodUsageError(f"alltoall: splits are {splits.dtype}; give torch.int32")
        splits = splits.tolist()
    counts = [int(count) for count in splits]
    if len(counts) != ranks or min(counts) < 0 or sum(counts) != rows:
        raise HorovodUsageError(
            f"alltoall: splits {counts} do not divide {rows} rows among {ranks} ranks"
        )
    return counts


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin `alltoall`; return a handle."""
    pick = first if splits is None else tuple
    return _alltoall(tensor, splits, name, process_set, pick=pick)


class _Alltoall(torch.autograd.Function):  # type: ignore[misc] # torch has no types
    """`alltoall` with its gradient: the rows go back to the ranks that they came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, splits: Any, name: Any, process_set: Any) -> Any:
        """Return the rows received, and how many came from each rank."""
        ctx.process_set = process_set
        output, received = synchronize(
            _alltoall(tensor, splits, name, process_set, pick=tuple, gather=False)
        )
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of the arguments."""
        back, _ = _Alltoall.apply(grads[0].contiguous(), ctx.received, None, ctx.process_set)
        return back, None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of a tensor to each rank; return those received.

    Args:
        tensor: the rows for rank 0, then those for rank 1, and so on.
        splits: the number of rows for each rank; None: as many for each.
        name: makes the calls of the ranks one operation.
        process_set: the ranks that take part.

    Returns the rows received, by rank; with `splits` also how many came from each.
    """
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def _reducescatter(
    tensors: Tensors,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    scales: tuple[float, float],
    **more: Any,
) -> int:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise HorovodUsageError("reducescatter needs tensors with at least one dimension")
    operation = Reduction(op)
    if operation not in (Average, Sum):
        raise HorovodInternalError(f"reducescatter: {operation.name} is not supported")
    return begin(
        "reducescatter",
        tensors,
        name,
        process_set,
        op=int(operation),
        prescale=float(scales[0]),
        postscale=float(scales[1]),
        **more,
    )


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin `reducescatter`; return a handle."""
    scales = prescale_factor, postscale_factor
    return _reducescatter([tensor], name, op, process_set, scales, pick=first)


class _GroupedReducescatter(torch.autograd.Function):  # type: ignore[misc] # torch has no types
    """`grouped_reducescatter` with its gradient, the gathered gradients of the parts."""

    @staticmethod
    def forward(ctx: Any, name: Any, op: int, process_set: Any, scales: Any, *tensors: Any) -> Any:
        """Return this rank's parts of the reduced tensors."""
        ctx.rest = op, process_set, scales
        return synchronize(
            _reducescatter(tensors, name, op, process_set, scales, pick=tuple, gather=False)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of the arguments."""
        op, process_set, (before, after) = ctx.rest
        factor = before * after
        if op == Sum:
            factor *= place_in(process_set).size
        gathered = grouped_allgather([grad.contiguous() for grad in grads], process_set=process_set)
        return (None, None, None, None, *(whole * factor for whole in gathered))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compress = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction of a tensor over the ranks.

    The first ranks get one row more where the rows cannot be divided evenly. `op` is Average or
    Sum; see `allreduce` for the other arguments.
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin `grouped_reducescatter`; return a handle."""
    scales = prescale_factor, postscale_factor
    return _reducescatter(tensors, name, op, process_set, scales, pick=list)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Compress = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's rows of several reductions, as one operation. See `reducescatter`."""
    sent = [compression.compress(tensor) for tensor in tensors]
    scales = prescale_factor, postscale_factor
    parts = _GroupedReducescatter.apply(name, op, process_set, scales, *(t for t, _ in sent))
    return [compression.decompress(t, c) for t, (_, c) in zip(parts, sent, strict=True)]
