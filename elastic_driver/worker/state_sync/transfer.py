"""Moves bytes and tensors from one rank to others, in chunks of bounded size.

`sharing` chooses the sender and the receivers (`Route`). A single receiver is sent to directly, so
that no other rank waits; several receive by broadcast. Tensors are sent as bytes. Small ones are
packed together; large ones go straight from the sender's memory to the receiver's, in slices, so
that each side needs at most one chunk of memory beyond the state itself. Only a tensor that is not
contiguous is copied as a whole. Sizes are bytes.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from elastic_driver.worker.state_sync.values import as_bytes

CHUNK_BYTES = 32 * 1024 * 1024
ALONE_BYTES = 1024 * 1024  # a tensor of this size is not worth packing with others


class Route(Struct, frozen=True):
    """The rank that sends and the ranks that receive."""

    source: int
    receivers: frozenset[int]

    @property
    def takes_all(self) -> bool:
        """True if every rank of the world has to take part in each transfer."""
        return len(self.receivers) > 1

    def begin(self, content: Tensor) -> dist.Work:
        """Begin to copy the source's contiguous CPU tensor into that of every rank that takes part.

        Transfers arrive in the order in which they begin. Wait for the returned work before
        `content` is used again.
        """
        if self.takes_all:
            return dist.broadcast(content, self.source, async_op=True)
        if dist.get_rank() == self.source:
            (receiver,) = self.receivers
            return dist.isend(content, receiver)
        return dist.irecv(content, self.source)


def carry_bytes(data: bytes | None, route: Route) -> bytes:
    """Return the source's bytes on every rank that takes part; all but the source pass None."""
    length = torch.tensor([0 if data is None else len(data)])
    route.begin(length).wait()
    content = bytearray(int(length)) if data is None else bytearray(data)
    route.begin(torch.frombuffer(content, dtype=torch.uint8)).wait()
    return bytes(content)


def carry_tensors(tensors: Sequence[Tensor], route: Route) -> None:
    """Copy the source's tensors into the receivers'.

    Every rank that takes part passes tensors of the same shapes and dtypes in the same
    order. A rank that is neither source nor receiver passes meta tensors.
    """
    sending, receiving = dist.get_rank() == route.source, dist.get_rank() in route.receivers
    pending: list[dist.Work] = []  # one large tensor is read from memory while another is sent
    for group in _groups(tensors):
        flat = [as_bytes(tensor) for tensor in group]
        alone = [[part] for part in flat[0].split(CHUNK_BYTES)]
        for parts in alone if len(flat) == 1 else [flat]:
            if len(parts) == 1 and parts[0].device.type == "cpu":
                pending.append(route.begin(parts[0]))
                continue
            sizes = [len(part) for part in parts]
            chunk = torch.empty(sum(sizes), dtype=torch.uint8)
            if sending:
                torch.cat([part.cpu() for part in parts], out=chunk)
            route.begin(chunk).wait()
            if receiving:
                for part, data in zip(parts, chunk.split(sizes), strict=True):
                    part.copy_(data)
        if receiving and not all(tensor.is_contiguous() for tensor in group):
            while pending:
                pending.pop().wait()
            for tensor, data in zip(group, flat, strict=True):  # the data are in a copy
                tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))
    for work in pending:
        work.wait()


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield each large tensor alone, and small ones together, up to the size of a chunk."""
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes >= min(ALONE_BYTES, CHUNK_BYTES):
            yield [tensor]
        elif tensor.nbytes:
            if size + tensor.nbytes > CHUNK_BYTES:
                yield group
                group, size = [], 0
            group.append(tensor)
            size += tensor.nbytes
    if group:
        yield group
