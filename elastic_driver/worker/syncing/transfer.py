"""Moves state from one rank to others: a small document first, then tensors, in bounded chunks.

`state` calls `send` on the rank whose state wins and `receive` on all others, in the same order.
The document is read with torch's safe unpickler (`weights_only=True`): plain values, containers
and tensors pass, code does not. Tensors follow as bytes, small ones packed together, large ones in
slices, so that neither side needs more than one chunk beyond the state itself. Sizes are bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_driver.errors import UsageError

CHUNK_BYTES = 32 * 1024 * 1024
_ALIGNMENT = 16  # of a tensor inside a chunk, so that any dtype can be viewed in place


# ---- documents ---------------------------------------------------------------------------


def packed(value: Any, what: str) -> bytes:
    """`value` in the form that `unpacked` reads.

    Raises `UsageError`, naming `what`, for a value that a safe reader would refuse.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unpacked(buffer.getvalue())
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"{what} cannot be sent to other workers: {_first_line(error)}. Give its class "
            "state_dict() and load_state_dict(), keep plain values and tensors in the state, or "
            f"allow {type(value).__name__} with torch.serialization.add_safe_globals([...])"
        ) from error
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """The value in `data`; raises `pickle.UnpicklingError` where it is more than data."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


# ---- trees: a value with its tensors taken out -------------------------------------------


def apart(value: Any) -> tuple[Any, list[Tensor]]:
    """`value` with each tensor replaced by its index in the list that comes with it.

    Containers are rebuilt as tagged pairs, so that no value can be mistaken for an index.
    """
    tensors: list[Tensor] = []
    return _apart(value, tensors), tensors


def _apart(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return ("tensor", len(tensors) - 1)
    if type(value) is dict:
        return ("dict", [(key, _apart(item, tensors)) for key, item in value.items()])
    if type(value) in (list, tuple):
        return (type(value).__name__, [_apart(item, tensors) for item in value])
    return ("value", value)


def paths(tree: Any, path: str = "") -> list[str]:
    """The dotted path to each tensor of a value that was taken `apart`, in their order."""
    kind, content = tree
    if kind == "tensor":
        return [path]
    if kind == "dict":
        inside = [(str(key), item) for key, item in content]
    elif kind in ("list", "tuple"):
        inside = [(str(index), item) for index, item in enumerate(content)]
    else:
        return []
    dotted = f"{path}." if path else ""
    return [name for key, item in inside for name in paths(item, dotted + key)]


def join(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """The value that was taken `apart`."""
    kind, content = tree
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: join(item, tensors) for key, item in content}
    if kind == "list":
        return [join(item, tensors) for item in content]
    if kind == "tuple":
        return tuple(join(item, tensors) for item in content)
    return content


# ---- over the process group --------------------------------------------------------------


def broadcast_bytes(data: bytes | None, source: int) -> bytes:
    """The bytes of rank `source`, on every rank."""
    length = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64)
    dist.broadcast(length, source)
    if data is not None:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        content = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(content, source)
    return bytes(content.numpy().tobytes())


def broadcast_tensors(tensors: Sequence[Tensor], source: int, receiving: bool) -> None:
    """Copy rank `source`'s tensors into those of every rank that is `receiving`.

    All ranks pass tensors of the same shapes and dtypes in the same order; a rank that is neither
    source nor receiving takes part without its tensors being touched.
    """
    sending = dist.get_rank() == source
    for pieces, size in _chunks([tensor.numel() * tensor.element_size() for tensor in tensors]):
        chunk = torch.empty(size, dtype=torch.uint8)
        if sending:
            for index, start, stop, at in pieces:
                chunk[at : at + stop - start].copy_(_as_bytes(tensors[index])[start:stop])
        dist.broadcast(chunk, source)
        if receiving and not sending:
            for index, start, stop, at in pieces:
                _write(tensors[index], start, stop, chunk[at : at + stop - start])


def _chunks(sizes: Sequence[int]) -> Iterator[tuple[list[tuple[int, int, int, int]], int]]:
    """Chunks as (pieces, bytes); a piece is (tensor, first byte, last byte + 1, place in chunk)."""
    pieces: list[tuple[int, int, int, int]] = []
    at = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if at >= CHUNK_BYTES:
                yield pieces, at
                pieces, at = [], 0
            stop = min(size, start + CHUNK_BYTES - at)
            pieces.append((index, start, stop, at))
            at += -(-(stop - start) // _ALIGNMENT) * _ALIGNMENT
            start = stop
    if pieces:
        yield pieces, at


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _write(tensor: Tensor, start: int, stop: int, data: Tensor) -> None:
    """Put bytes `start` … `stop` of the tensor in its logical order, whatever its strides."""
    target = tensor.detach()
    if target.is_contiguous():
        target.reshape(-1).view(torch.uint8)[start:stop].copy_(data)
        return
    whole = target.contiguous()
    whole.reshape(-1).view(torch.uint8)[start:stop].copy_(data)
    target.copy_(whole)
