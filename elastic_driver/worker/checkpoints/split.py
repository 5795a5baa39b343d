"""Which rows of which tensors each rank writes: an even share of the bytes, without a word.

In data parallelism every rank holds everything, so any rank can write any part. All ranks compute
the same split from the shapes alone; `format` writes one share each. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from msgspec import Struct


class Extent(Struct, frozen=True, array_like=True):
    """The shape of a tensor and the bytes of one of its elements."""

    shape: tuple[int, ...]
    item_bytes: int

    @property
    def rows(self) -> int:
        """Length of the first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape[1:]) * self.item_bytes

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes


class Piece(Struct, frozen=True, array_like=True):
    """Rows `start` … `stop` of tensor number `tensor`."""

    tensor: int
    start: int
    stop: int


def share(extents: Sequence[Extent], rank: int, size: int) -> list[Piece]:
    """The pieces that `rank` of `size` writes: at most one of each tensor, in their order.

    The tensors are laid end to end and cut into `size` equal lengths; each cut is moved down to
    the row it falls into. Every row belongs to exactly one rank, and a share differs from the mean
    by less than one row. Tensors without elements belong to nobody.
    """
    total = sum(extent.bytes for extent in extents)
    first, last = total * rank // size, total * (rank + 1) // size
    pieces, at = [], 0
    for index, extent in enumerate(extents):
        start, stop = _row(extent, first - at), _row(extent, last - at)
        if start < stop:
            pieces.append(Piece(index, start, stop))
        at += extent.bytes
    return pieces


def _row(extent: Extent, offset: int) -> int:
    """The row that byte `offset` of the tensor falls into, within 0 … rows."""
    if extent.row_bytes == 0:
        return 0
    return min(max(offset // extent.row_bytes, 0), extent.rows)
