"""Rows of a tensor for each rank: `alltoall` and `reducescatter`."""

from collections.abc import Sequence
from typing import Any

import torch

from elastic_driver.horovod.common.basics import Reduction
from elastic_driver.horovod.common.exceptions import HorovodInternalError, HorovodUsageError
from elastic_driver.horovod.common.process_sets import ProcessSet, global_process_set
from elastic_driver.horovod.torch.compression import Compression
from elastic_driver.horovod.torch.handles import begin, first, place_in, synchronize
from elastic_driver.horovod.torch.movements import grouped_allgather
from elastic_driver.horovod.torch.reductions import Average, Compress, Sum

__all__ = [
    "alltoall",
    "alltoall_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]
Tensors = Sequence[torch.Tensor]


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
