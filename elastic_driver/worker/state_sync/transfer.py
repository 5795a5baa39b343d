"""Moves bytes and tensors from one rank to others, in chunks of bounded size.

`sharing` decides what is sent and to whom (`Route`): to one receiver from rank to rank, so that
no other rank waits; to several by broadcast. Tensors are sent as bytes. Small ones are packed
together; large ones go straight from the sender's memory to the receiver's, in slices, so that
each side needs at most one chunk of memory beyond the state itself. Sizes are bytes.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

CHUNK_BYTES = 32 * 1024 * 1024
ALONE_BYTES = 1024 * 1024  # a tensor of this size is not worth packing with others
_ALIGNMENT = 16  # of a tensor inside a chunk, so that any dtype can be viewed in place


class Route(Struct, frozen=True):
    """The rank that sends and the ranks that receive."""

    source: int
    receivers: frozenset[int]

    @property
    def direct(self) -> bool:
        """True if only source and receiver take part, and no other rank."""
        return len(self.receivers) == 1

    def concerns(self, rank: int) -> bool:
        """Return whether this rank has to take part in each transfer."""
        return not self.direct or rank == self.source or rank in self.receivers

    def begin(self, content: Tensor) -> dist.Work:
        """Begin to copy the source's contiguous CPU tensor into those of all who take part.

        Transfers arrive in the order in which they begin. Wait for the returned work before
        `content` is used again.
        """
        if not self.direct:
            work = dist.broadcast(content, self.source, async_op=True)
        elif dist.get_rank() == self.source:
            (receiver,) = self.receivers
            work = dist.isend(content, receiver)
        else:
            work = dist.irecv(content, self.source)
        if work is None:
            raise AssertionError("this rank is not a member of the process group")
        return work


def to_all(source: int) -> Route:
    """Return the route from one rank to all others."""
    return Route(source, frozenset(range(dist.get_world_size())) - {source})


def carry_bytes(data: bytes | None, route: Route) -> bytes:
    """Return the source's bytes, on every rank that the route concerns; others pass None."""
    length = torch.tensor([0 if data is None else len(data)])
    route.begin(length).wait()
    content = bytearray(int(length)) if data is None else bytearray(data)
    route.begin(torch.frombuffer(content, dtype=torch.uint8)).wait()
    return bytes(content)


def carry_tensors(tensors: Sequence[Tensor], route: Route) -> None:
    """Copy the source's tensors into the receivers'.

    Every rank that the route concerns passes tensors of the same shapes and dtypes in the same
    order. A rank that is neither source nor receiver passes tensors that are not touched.
    """
    rank = dist.get_rank()
    sending, receiving = rank == route.source, rank in route.receivers
    pending = []  # one large tensor is read from memory while another is being sent
    for pieces, size in _chunks([tensor.numel() * tensor.element_size() for tensor in tensors]):
        index, start, stop, _ = pieces[0]
        tensor = tensors[index]
        if len(pieces) == 1 and (sending or receiving) and _can_send_in_place(tensor):
            pending.append(route.begin(_as_bytes(tensor)[start:stop]))
            continue
        chunk = torch.empty(size, dtype=torch.uint8)
        if sending:
            for index, start, stop, at in pieces:
                chunk[at : at + stop - start].copy_(_as_bytes(tensors[index])[start:stop])
        route.begin(chunk).wait()
        if receiving:
            for index, start, stop, at in pieces:
                _write(tensors[index], start, stop, chunk[at : at + stop - start])
    for work in pending:
        work.wait()


def _can_send_in_place(tensor: Tensor) -> bool:
    return bool(tensor.device.type == "cpu" and tensor.is_contiguous())


def _chunks(sizes: Sequence[int]) -> Iterator[tuple[list[tuple[int, int, int, int]], int]]:
    """Yield chunks as (pieces, bytes); a piece is (tensor, first byte, end byte, place in chunk).

    A large tensor has its chunks to itself; small ones share theirs.
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
    """Write bytes `start` … `stop` of the tensor in its logical order, whatever its strides."""
    target = tensor.detach()
    whole = target.contiguous()  # the tensor itself, or a copy of one with other strides
    whole.reshape(-1).view(torch.uint8)[start:stop].copy_(data)
    if not target.is_contiguous():
        target.copy_(whole)
