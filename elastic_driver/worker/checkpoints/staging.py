"""The copy that a rank takes of its share of the live tensors: the only pause of training.

In data parallelism every rank holds everything, so any rank can write any part. All ranks compute
the same split from the shapes alone. `keeper` copies on the training thread, `format` writes from
the copy in the background.
"""

import hashlib
from collections.abc import Mapping
from math import prod

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from elastic_driver.worker.state_sync.values import TensorKind


class Piece(Struct, frozen=True, array_like=True):
    """Rows `start` … `stop` (its end) of a tensor; a scalar is one row."""

    tensor: str
    start: int
    stop: int


def share(kinds: Mapping[str, TensorKind], rank: int, size: int) -> list[Piece]:
    """Return the pieces that `rank` of `size` writes: at most one of each tensor, in their order.

    The tensors are laid end to end and cut into `size` equal lengths of bytes; each cut is moved
    down to the row it falls into. Every row belongs to exactly one rank, and a share differs from
    the mean by less than one row. Tensors without elements belong to nobody.
    """
    sizes = {name: rows_and_bytes(kind) for name, kind in kinds.items()}
    total = sum(rows * row_bytes for rows, row_bytes in sizes.values())
    first, last = total * rank // size, total * (rank + 1) // size
    pieces, at = [], 0
    for name, (rows, row_bytes) in sizes.items():
        if row_bytes:
            start, stop = (min(max((edge - at) // row_bytes, 0), rows) for edge in (first, last))
            if start < stop:
                pieces.append(Piece(name, start, stop))
            at += rows * row_bytes
    return pieces


def rows_and_bytes(kind: TensorKind) -> tuple[int, int]:
    """Return the number of rows of such a tensor, and the bytes of one row."""
    rows = kind.shape[0] if kind.shape else 1
    return rows, prod(kind.shape[1:]) * kind.torch_dtype.itemsize


class Staging:
    """Memory for one rank's share of the tensors, used again for every checkpoint of a world.

    `kinds` are all tensors of the state, equal on every rank, `digest` is theirs; `pieces` are this
    rank's share, `copies` hold them in the same order. Memory: the share's bytes, on the CPU,
    pinned where the tensors are on a GPU.
    """

    def __init__(self, kinds: dict[str, TensorKind], rank: int, size: int) -> None:
        self.kinds, self.rank, self.size = self.layout = kinds, rank, size
        self.digest = hashlib.sha256(msgspec.json.encode(kinds)).hexdigest()
        self.pieces = share(kinds, rank, size)
        self.copies: list[Tensor] = []

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the share out of the live tensors; they may be changed when this returns."""
        parts = []
        for piece in self.pieces:
            tensor = tensors[piece.tensor].detach()
            parts.append(tensor[piece.start : piece.stop] if tensor.dim() else tensor)
        if not self.copies:
            self.copies = [torch.empty(p.shape, dtype=p.dtype, pin_memory=p.is_cuda) for p in parts]
        with torch.no_grad():
            for copy, part in zip(self.copies, parts, strict=True):
                copy.copy_(part, non_blocking=True)
        if any(part.is_cuda for part in parts):
            torch.cuda.synchronize()
