"""Reductions over the ranks: `allreduce` and its forms."""

from collections.abc import Sequence
from typing import Any

import torch

from elastic_driver.horovod.common.basics import Reduction, size
from elastic_driver.horovod.common.process_sets import ProcessSet, global_process_set
from elastic_driver.horovod.common.util import (
    get_average_backwards_compatibility_fun,
    num_rank_is_power_2,
)
from elastic_driver.horovod.torch.compression import Compression, Compressor
from elastic_driver.horovod.torch.handles import begin, first, synchronize

Average = Reduction.Average
Sum = Reduction.Sum
Adasum = Reduction.Adasum
Min = Reduction.Min
Max = Reduction.Max
Product = Reduction.Product
Tensors = Sequence[torch.Tensor]
Compress = type[Compressor]
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(Reduction)


def _allreduce(
    tensors: Tensors,
    outputs: Tensors,
    name: str | None,
    op: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
    **more: Any,
) -> int:
    """Begin an allreduce; `scales` are the factors before and after it."""
    operation = op if isinstance(op, Reduction) else Reduction(op)
    if operation == Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum works on all ranks only, not on a process set")
        if not num_rank_is_power_2(size()):
            raise NotImplementedError(f"Adasum needs 2, 4, 8, … ranks; the world has {size()}")
    before, after = scales
    return begin(
        "allreduce",
        tensors,
        name,
        process_set,
        outputs=outputs,
        op=int(operation),
        prescale=float(before),
        postscale=float(after),
        **more,
    )


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin the reduction of a tensor over the ranks; return a handle. See `allreduce`."""
    op = handle_average_backwards_compatibility(op, average)
    output = torch.empty_like(tensor, requires_grad=False)
    scales = prescale_factor, postscale_factor
    return _allreduce([tensor], [output], name, op, scales, process_set, pick=first)


class _Allreduce(torch.autograd.Function):  # type: ignore[misc] # torch has no types
    """`allreduce` with its gradient, the same reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, name: Any, op: int, scales: Any, process_set: Any) -> Any:
        """Return the reduced tensor."""
        ctx.rest = op, scales, process_set
        output = torch.empty_like(tensor)
        return synchronize(
            _allreduce([tensor], [output], name, op, scales, process_set, pick=first, gather=False)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of the arguments."""
        op, scales, process_set = ctx.rest
        return _Allreduce.apply(grads[0], None, op, scales, process_set), None, None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compress = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the reduction of a tensor over the ranks; the tensor stays as it is.

    Args:
        tensor: of the same shape and dtype on all ranks.
        average: the older form of `op`: True for Average, False for Sum.
        name: makes the calls of the ranks one operation.
        compression: of what is sent.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: what the tensor is multiplied by before.
        postscale_factor: what the result is multiplied by.
        process_set: the ranks that take part.

    Raises `HorovodInternalError` where ranks disagree, or where the world breaks.
    """
    op = handle_average_backwards_compatibility(op, average)
    sent, context = compression.compress(tensor)
    scales = prescale_factor, postscale_factor
    reduced = _Allreduce.apply(sent, name, op, scales, process_set)
    return compression.decompress(reduced, context)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin `allreduce` in place; return a handle."""
    op = handle_average_backwards_compatibility(op, average)
    scales = prescale_factor, postscale_factor
    tensors = [tensor]
    return _allreduce(tensors, tensors, name, op, scales, process_set, pick=lambda _: tensor)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Set a tensor to its reduction over the ranks, and return it. See `allreduce`."""
    return synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin the reduction of several tensors as one operation; return a handle."""
    op = handle_average_backwards_compatibility(op, average)
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    scales = prescale_factor, postscale_factor
    return _allreduce(tensors, outputs, name, op, scales, process_set, pick=list)


class _GroupedAllreduce(torch.autograd.Function):  # type: ignore[misc] # torch has no types
    """`grouped_allreduce` with its gradient."""

    @staticmethod
    def forward(ctx: Any, name: Any, op: int, scales: Any, process_set: Any, *tensors: Any) -> Any:
        """Return the reduced tensors."""
        ctx.rest = op, scales, process_set
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        return synchronize(
            _allreduce(tensors, outputs, name, op, scales, process_set, pick=tuple, gather=False)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of the arguments."""
        op, scales, process_set = ctx.rest
        reduced = _GroupedAllreduce.apply(None, op, scales, process_set, *grads)
        return (None, None, None, None, *reduced)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Compress = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the reductions of several tensors, as one operation. See `allreduce`."""
    op = handle_average_backwards_compatibility(op, average)
    sent = [compression.compress(tensor) for tensor in tensors]
    scales = prescale_factor, postscale_factor
    reduced = _GroupedAllreduce.apply(name, op, scales, process_set, *(t for t, _ in sent))
    return [compression.decompress(t, c) for t, (_, c) in zip(reduced, sent, strict=True)]


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin `grouped_allreduce` in place; return a handle."""
    op = handle_average_backwards_compatibility(op, average)
    scales = prescale_factor, postscale_factor
    return _allreduce(tensors, tensors, name, op, scales, process_set, pick=lambda _: list(tensors))


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Set several tensors to their reductions, as one operation, and return them."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return list(synchronize(handle))
