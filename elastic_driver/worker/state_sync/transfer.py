"""Moves state from one rank to others: a small document first, then tensors, in bounded chunks.

`sharing` says what goes and to whom (`Route`): to a single receiver from rank to rank, so that
nobody else waits for it; to several by broadcast.
The document is read with torch's safe unpickler (`weights_only=True`): plain values, containers
and tensors pass, code does not. Tensors follow as bytes: small ones packed together, large ones
from where they lie to where they are to lie, in slices, so that neither side needs more than one
chunk beyond the state itself. Sizes are bytes.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from elastic_driver.errors import UsageError

CHUNK_BYTES = 32 * 1024 * 1024
ALONE_BYTES = 1024 * 1024  # a tensor of this size is not worth packing with others
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


class Route(Struct, frozen=True):
    """Who sends to whom, by rank."""

    source: int
    receivers: frozenset[int]

    @property
    def direct(self) -> bool:
        """Whether ranks that are neither source nor receiver have no part in it."""
        return len(self.receivers) == 1

    def concerns(self, rank: int) -> bool:
        """Whether this rank has to take part in each transfer."""
        return not self.direct or rank == self.source or rank in self.receivers

    def begin(self, content: Tensor) -> dist.Work:
        """Begin to copy the source's contiguous CPU tensor into those of all who take part.

        What is begun first arrives first. Wait for the end before `content` is used again.
        """
        if not self.direct:
            work = dist.broadcast(content, self.source, async_op=True)
        elif dist.get_rank() == self.source:
            (receiver,) = self.receivers
            work = dist.isend(content, receiver)
        else:
            work = dist.irecv(content, self.source)
        if work is None:
            raise AssertionError("this rank has no part in the group")
        return work

    def carry(self, content: Tensor) -> None:
        """The same, until it is done."""
        self.begin(content).wait()


def to_all(source: int) -> Route:
    """The route from one rank to all others."""
    return Route(source, frozenset(range(dist.get_world_size())) - {source})


def carry_bytes(data: bytes | None, route: Route) -> bytes:
    """The bytes of the source, on every rank the route concerns; others pass None."""
    length = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64)
    route.carry(length)
    if data is not None:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        content = torch.empty(int(length), dtype=torch.uint8)
    route.carry(content)
    return ctypes.string_at(content.data_ptr(), content.numel())  # does without numpy


def carry_tensors(tensors: Sequence[Tensor], route: Route) -> None:
    """Copy the source's tensors into the receivers'.

    Every rank that the route concerns passes tensors of the same shapes and dtypes in the same
    order; those of one that is neither source nor receiver are not touched.
    """
    rank = dist.get_rank()
    sending, receiving = rank == route.source, rank in route.receivers
    under_way = []  # one large tensor is read from memory while another is on its way
    for pieces, size in _chunks([tensor.numel() * tensor.element_size() for tensor in tensors]):
        index, start, stop, _ = pieces[0]
        tensor = tensors[index]
        if len(pieces) == 1 and (sending or receiving) and _lies_ready(tensor):
            under_way.append(route.begin(_as_bytes(tensor)[start:stop]))
            continue
        chunk = torch.empty(size, dtype=torch.uint8)
        if sending:
            for index, start, stop, at in pieces:
                chunk[at : at + stop - start].copy_(_as_bytes(tensors[index])[start:stop])
        route.carry(chunk)
        if receiving:
            for index, start, stop, at in pieces:
                _write(tensors[index], start, stop, chunk[at : at + stop - start])
    for work in under_way:
        work.wait()


def _lies_ready(tensor: Tensor) -> bool:
    """Whether its memory can be sent from, or received into, as it is."""
    return bool(tensor.device.type == "cpu" and tensor.is_contiguous())


def _chunks(sizes: Sequence[int]) -> Iterator[tuple[list[tuple[int, int, int, int]], int]]:
    """Chunks as (pieces, bytes); a piece is (tensor, first byte, last byte + 1, place in chunk).

    A large tensor has its chunks to itself, small ones share theirs.
    """
    pieces: list[tuple[int, int, int, int]] = []
    end = 0
    for index, size in enumerate(sizes):
        if size >= min(ALONE_BYTES, CHUNK_BYTES):
            for start in range(0, size, CHUNK_BYTES):
                stop = min(size, start + CHUNK_BYTES)
                yield [(index, start, stop, 0)], stop - start
        elif size:
            at = -(-end // _ALIGNMENT) * _ALIGNMENT
            if at + size > CHUNK_BYTES:
                yield pieces, end
                pieces, at = [], 0
            pieces.append((index, 0, size, at))
            end = at + size
    if pieces:
        yield pieces, end


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
