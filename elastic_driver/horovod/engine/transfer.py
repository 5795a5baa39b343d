"""Moves tensors between the ranks of a process set, once all have agreed; one thread calls it.

Tensors of a batch are copied into one buffer and moved at once. What is only moved, not computed
with, goes as bytes, so every dtype works. The first part of this file is the arithmetic of
reductions besides the sum over the ranks: Adasum, division and scaling in place, and tensors that
change nothing.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist

from elastic_driver.horovod.engine.operation import Operation, SetPlace
from elastic_driver.horovod.engine.requests import OPERATIONS, Agreement, Request
from elastic_driver.worker import torch_seams
from elastic_driver.worker.torch_seams import copy_all, unflatten, viewed_by

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


_GLOO_OP = {
    "Average": dist.ReduceOp.SUM,
    "Sum": dist.ReduceOp.SUM,
    "Min": dist.ReduceOp.MIN,
    "Max": dist.ReduceOp.MAX,
    "Product": dist.ReduceOp.PRODUCT,
}
_CARRIED_AS = {torch.int16: torch.int32, torch.bool: torch.int32}  # gloo refuses these
COALESCED_BYTES = 2**20  # of a batch that needs no buffer of ours
ONE_PASS_BYTES = 2**16  # a call for each smaller tensor takes longer than a second pass
Item = tuple[Agreement, Operation | None]  # None: this rank has joined
Pair = tuple[torch.Tensor, torch.Tensor]  # an input and its output
Finish = Callable[[], None]  # waits for a transfer, and sets its results


class Transfers:
    """Carries out batches; keeps buffers of each dtype for fused tensors."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def start(self, batch: Sequence[Item], place: SetPlace) -> Finish:
        """Begin to move the tensors of a batch; the returned call sets the results once they are.

        Batches may overlap; all ranks start them in the same order.
        """
        kind = batch[0][0].kind
        if kind == "allreduce":
            return self._allreduce(batch, place)
        if kind == "broadcast":
            self._broadcast([op for _, op in batch if op is not None], place)
        elif kind == "allgather":
            self._allgather([(a, op) for a, op in batch if op is not None], place)
        elif kind == "reducescatter":
            self._reducescatter([op for _, op in batch if op is not None], place)
        elif kind == "alltoall":
            for agreement, operation in batch:
                if operation is not None:
                    _alltoall(agreement, operation, place)
        else:
            for agreement, operation in batch:
                if operation is not None:
                    operation.result = agreement.value
        return _is_finished

    # ---- reductions ----------------------------------------------------------------------

    def _allreduce(self, batch: Sequence[Item], place: SetPlace) -> Finish:
        agreement, operation = batch[0]
        request = agreement.pattern if operation is None else operation.request
        assert request is not None  # noqa: S101 - absent ranks get the pattern
        inputs: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        for agreement, operation in batch:
            if operation is None:
                nothing = neutral(agreement.pattern)
                inputs += nothing
                outputs += nothing
            else:
                inputs += operation.tensors
                outputs += operation.outputs
                operation.result = operation.outputs
        pairs = list(zip(inputs, outputs, strict=True))
        if OPERATIONS[request.op] != "Adasum":
            return self._reduce(pairs, request, place)
        for tensor, output in pairs:
            output.copy_(adasum(scaled(tensor.clone(), request.prescale), place))
            scaled(output, request.postscale)
        return _is_finished

    def _reducescatter(self, operations: Sequence[Operation], place: SetPlace) -> None:
        """Reduce, and keep this rank's rows; the first ranks get one more where they differ."""
        whole = [[torch.empty_like(tensor) for tensor in op.tensors] for op in operations]
        pairs: list[Pair] = []
        for operation, outputs in zip(operations, whole, strict=True):
            pairs += zip(operation.tensors, outputs, strict=True)
        self._reduce(pairs, operations[0].request, place)()
        for operation, outputs in zip(operations, whole, strict=True):
            operation.result = [
                output.narrow(0, *rows_of(len(output), place.size, place.index)).clone()
                for output in outputs
            ]

    def _reduce(self, pairs: Sequence[Pair], request: Request, place: SetPlace) -> Finish:
        if len(set(request.dtypes)) == 1:  # so it is in each batch of several operations
            return self._reduce_alike(pairs[0][0].dtype, pairs, request, place)
        by_dtype: dict[torch.dtype, list[Pair]] = {}
        for pair in pairs:
            by_dtype.setdefault(pair[0].dtype, []).append(pair)
        started = [
            self._reduce_alike(dtype, alike, request, place) for dtype, alike in by_dtype.items()
        ]

        def finish() -> None:
            for each in started:
                each()

        return finish

    def _reduce_alike(
        self, dtype: torch.dtype, pairs: Sequence[Pair], request: Request, place: SetPlace
    ) -> Finish:
        """Begin to reduce tensors of one dtype over the ranks, in one transfer."""
        carried = _CARRIED_AS.get(dtype, dtype)
        if carried == dtype and len(pairs) > 1 and _nbytes(pairs) <= COALESCED_BYTES:
            return _reduce_coalesced(pairs, request, place)
        (first, output), operation = pairs[0], OPERATIONS[request.op]
        joined = len(pairs) > 1 or carried != dtype or not output.is_contiguous()
        if joined:
            flat = self._joined([tensor for tensor, _ in pairs], carried)
        else:
            flat = output.view(-1)
            if output.data_ptr() != first.data_ptr():
                flat.copy_(first.reshape(-1))
        scaled(flat, request.prescale)
        work = None
        if place.group is not None and flat.numel():
            options = dist.AllreduceOptions()
            options.reduceOp = _GLOO_OP[operation]
            work = place.group.allreduce([flat], options)
        divisor = place.size if operation == "Average" else 1

        def finish() -> None:
            if work is not None:
                work.wait()
            if not joined:
                scaled(divided(flat, divisor), request.postscale)
                return
            outputs = [output for _, output in pairs]
            _put_reduced(flat, outputs, divisor, request.postscale)
            self._give_back(flat)

        return finish

    # ---- bytes ---------------------------------------------------------------------------

    def _broadcast(self, operations: Sequence[Operation], place: SetPlace) -> None:
        root = place.ranks.index(operations[0].request.root)
        inputs = [tensor for op in operations for tensor in op.tensors]
        outputs = [tensor for op in operations for tensor in op.outputs]
        if len(inputs) == 1 and outputs[0].is_contiguous():
            flat = as_bytes(outputs[0])
            if place.index == root and outputs[0].data_ptr() != inputs[0].data_ptr():
                outputs[0].copy_(inputs[0])
        else:
            flat = self._joined([as_bytes(tensor) for tensor in inputs], torch.uint8)
        if place.group is not None and flat.numel():
            options = dist.BroadcastOptions()
            options.rootRank = root
            place.group.broadcast([flat], options).wait()
        sizes = [tensor.numel() * tensor.element_size() for tensor in inputs]
        if len(inputs) > 1 or not outputs[0].is_contiguous():
            for start, size, output in zip(
                accumulate(sizes, initial=0), sizes, outputs, strict=False
            ):
                _put_bytes(flat[start : start + size], output)
            self._give_back(flat)
        for operation in operations:
            operation.result = operation.outputs

    def _allgather(self, batch: Sequence[tuple[Agreement, Operation]], place: SetPlace) -> None:
        inputs = [tensor for _, op in batch for tensor in op.tensors]
        rows = [  # of each tensor, by rank
            [agreement.sizes[r][n] for r in range(place.size)]
            for agreement, op in batch
            for n in range(len(op.tensors))
        ]
        row_bytes = [prod(t.shape[1:]) * t.element_size() for t in inputs]
        longest = max(
            sum(n[r] * size for n, size in zip(rows, row_bytes, strict=True))
            for r in range(place.size)
        )
        mine = self._joined([as_bytes(tensor) for tensor in inputs], torch.uint8, longest)
        parts = [mine] * place.size
        if place.group is not None and longest:
            parts = list(mine.new_empty(place.size, longest).unbind())
            place.group.allgather([parts], [mine]).wait()
        results = iter(_gathered(inputs, rows, row_bytes, parts))
        self._give_back(mine)
        for _, operation in batch:
            operation.result = [next(results) for _ in operation.tensors]

    def _joined(
        self, tensors: Sequence[torch.Tensor], dtype: torch.dtype, length: int | None = None
    ) -> torch.Tensor:
        """Return the elements of all tensors in a buffer, until `_give_back`."""
        count = sum(tensor.numel() for tensor in tensors)
        length = count if length is None else length
        free = self._free.setdefault((dtype, tensors[0].device), [])
        buffer = free.pop() if free else None
        if buffer is None or len(buffer) < length:
            buffer = torch.empty(length, dtype=dtype, device=tensors[0].device)
        if all(tensor.dtype == dtype for tensor in tensors):
            torch.cat([tensor.reshape(-1) for tensor in tensors], out=buffer[:count])
        else:
            buffer[:count].copy_(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        return buffer[:length]

    def _give_back(self, part: torch.Tensor) -> None:
        """Keep a buffer of `_joined` for the next call."""
        buffer = part if (whole := viewed_by(part)) is None else whole
        self._free[buffer.dtype, buffer.device].append(buffer)


def _is_finished() -> None:
    """Do nothing: the transfer is over."""


def _nbytes(pairs: Sequence[Pair]) -> int:
    return sum([output.nbytes for _, output in pairs])


def _reduce_coalesced(pairs: Sequence[Pair], request: Request, place: SetPlace) -> Finish:
    """Begin to reduce small tensors in place; torch copies them faster than calls for each."""
    outputs = [output for _, output in pairs]
    if moved := [pair for pair in pairs if pair[0] is not pair[1]]:
        copy_all([output for _, output in moved], [tensor for tensor, _ in moved])
    operation = OPERATIONS[request.op]
    scale_all(outputs, request.prescale)
    work = None
    if place.group is not None:
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = _GLOO_OP[operation]
        work = place.group.allreduce_coalesced(outputs, options)

    def finish() -> None:
        if work is not None:
            work.wait()
        divide_all(outputs, place.size if operation == "Average" else 1)
        scale_all(outputs, request.postscale)

    return finish


def _gathered(
    inputs: Sequence[torch.Tensor],
    rows: Sequence[Sequence[int]],
    row_bytes: Sequence[int],
    parts: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return each tensor with the rows of all ranks, from the bytes of the ranks."""
    results = [t.new_empty((sum(n), *t.shape[1:])) for t, n in zip(inputs, rows, strict=True)]
    filled = [0] * len(inputs)
    targets = [as_bytes(result) for result in results]
    for rank, part in enumerate(parts):
        start = 0
        for number, target in enumerate(targets):
            size = rows[number][rank] * row_bytes[number]
            target[filled[number] : filled[number] + size].copy_(part[start : start + size])
            filled[number] += size
            start += size
    return results


def _alltoall(agreement: Agreement, operation: Operation, place: SetPlace) -> None:
    (tensor,) = operation.tensors
    received = [splits[place.index] for splits in agreement.sizes]
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    row = prod(tensor.shape[1:]) * tensor.element_size()
    if place.group is None:
        output.copy_(tensor)
    else:
        sent = agreement.sizes[place.index]
        place.group.alltoall_base(
            as_bytes(output),
            as_bytes(tensor),
            [n * row for n in received],
            [n * row for n in sent],
            dist.AllToAllOptions(),
        ).wait()
    operation.result = [output, torch.tensor(received, dtype=torch.int32)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a vector of bytes; of the same memory if they are contiguous."""
    return tensor.reshape(-1).view(torch.uint8)


def _put_reduced(
    flat: torch.Tensor, outputs: Sequence[torch.Tensor], divisor: int, factor: float
) -> None:
    """Copy a buffer to its tensors, divided and scaled; large ones in one pass over memory."""
    together = list(zip(unflatten(flat, outputs), outputs, strict=True))
    if divisor != 1 and flat.is_floating_point():
        for part, output in together:
            if part.nbytes >= ONE_PASS_BYTES:
                torch.div(part, divisor, out=output)
        together = [pair for pair in together if pair[0].nbytes < ONE_PASS_BYTES]
    if together:
        parts = [part for part, _ in together]
        divide_all(parts, divisor)
        copy_all([output for _, output in together], parts)
    scale_all(outputs, factor)


def _put_bytes(part: torch.Tensor, output: torch.Tensor) -> None:
    if output.is_contiguous():
        as_bytes(output).copy_(part)
    else:
        whole = torch.empty(output.shape, dtype=output.dtype)
        as_bytes(whole).copy_(part)
        output.copy_(whole)
