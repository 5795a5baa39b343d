"""Arithmetic with tensors in reductions, besides the sum over the ranks."""

from collections.abc import Sequence

import torch

from elastic_driver.horovod.engine.agreement import OPERATIONS
from elastic_driver.horovod.engine.messages import Request
from elastic_driver.horovod.engine.operation import SetPlace
from elastic_driver.worker import torch_seams

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}
_ADASUM_TAG = 3


def adasum(vector: torch.Tensor, place: SetPlace) -> torch.Tensor:
    """Return the adaptive sum of the ranks' vectors (Maleki et al., arXiv:2006.02924).

    Pairs of ranks at distance 1, 2, 4, … combine their vectors; the number of ranks is a power of
    two. Both ranks of a pair compute the same bits.
    """
    distance = 1
    while distance < place.size:
        peer = place.index ^ distance
        other = torch.empty_like(vector)
        send = place.group.send([vector], peer, _ADASUM_TAG)
        place.group.recv([other], peer, _ADASUM_TAG).wait()
        send.wait()
        first, second = (vector, other) if place.index < peer else (other, vector)
        vector = _adaptive_sum(first, second)
        distance *= 2
    return vector


def _adaptive_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x, y = a.double().reshape(-1), b.double().reshape(-1)
    dot, of_x, of_y = float(x @ y), float(x @ x), float(y @ y)
    weight_x = 1 - dot / (2 * of_x) if of_x else 1.0
    weight_y = 1 - dot / (2 * of_y) if of_y else 1.0
    return (x * weight_x + y * weight_y).to(a.dtype).view(a.shape)


def rows_of(rows: int, size: int, index: int) -> tuple[int, int]:
    """Return the first row and the number of rows that rank `index` of `size` gets of them."""
    least, longer = divmod(rows, size)
    return index * least + min(index, longer), least + (index < longer)


def divided(tensor: torch.Tensor, divisor: int) -> torch.Tensor:
    """Divide in place; integers in double precision, towards zero."""
    if divisor == 1:
        return tensor
    if tensor.is_floating_point():
        return tensor.div_(divisor)
    return tensor.copy_((tensor.double() / divisor).trunc())


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in place; integers in double precision, towards zero."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point():
        return tensor.mul_(factor)
    return tensor.copy_((tensor.double() * factor).trunc())


def divide_all(tensors: Sequence[torch.Tensor], divisor: int) -> None:
    """Divide tensors of one dtype in place, as `divided` does."""
    if divisor != 1 and tensors[0].is_floating_point():
        torch_seams.divide_all(tensors, divisor)
    elif divisor != 1:
        for tensor in tensors:
            divided(tensor, divisor)


def scale_all(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply each tensor in place; one call for all would round the factor to float16."""
    for tensor in tensors:
        scaled(tensor, factor)


def neutral(pattern: Request | None) -> list[torch.Tensor]:
    """Return tensors that change nothing in the reduction of the others."""
    assert pattern is not None  # noqa: S101 - absent ranks get the pattern
    found = []
    for name, shape in zip(pattern.dtypes, pattern.shapes, strict=True):
        dtype = DTYPES[name]
        info = torch.finfo(dtype) if dtype.is_floating_point else None
        limits = info or (torch.iinfo(dtype) if dtype != torch.bool else None)
        value: float = 0
        operation = OPERATIONS[pattern.op]
        if operation == "Product":
            value = 1
        elif operation in ("Min", "Max") and limits is not None:
            value = limits.max if operation == "Min" else limits.min
            value = value if info is None else float("inf" if operation == "Min" else "-inf")
        found.append(torch.full(shape, value, dtype=dtype))
    return found
