"""The copy of its share that a rank takes of the live tensors: the only pause of training.

`keeper` copies on the training thread, `format` writes from the copy in the
background. Who copies what follows from `split`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from elastic_driver.worker.checkpoints.folder import Kind
from elastic_driver.worker.checkpoints.split import Extent, Piece, share


def kinds_of(tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    """What a manifest says of these tensors."""
    return {
        name: Kind(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


class Staging:
    """Room for one rank's share of the tensors, used again for every checkpoint of a world.

    `kinds` are all tensors of the state, equal on every rank, `layout` a digest of them; `pieces`
    are this rank's share by name of the tensor, `room` holds them in the same order. Memory: the
    share's bytes, on the CPU, pinned where the tensors are on a GPU.
    """

    def __init__(self, kinds: dict[str, Kind], rank: int, size: int) -> None:
        self.kinds, self.rank, self.size = kinds, rank, size
        self.layout = hashlib.sha256(msgspec.json.encode(kinds)).hexdigest()
        extents = [Extent(kind.shape, dtype_of(kind.dtype).itemsize) for kind in kinds.values()]
        names = list(kinds)
        self.pieces = [(names[piece.tensor], piece) for piece in share(extents, rank, size)]
        self.room: list[Tensor] = []

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the share out of the live tensors; returns when they may be changed again."""
        parts = [_part(tensors[name], piece) for name, piece in self.pieces]
        if not self.room:
            self.room = [torch.empty(p.shape, dtype=p.dtype, pin_memory=p.is_cuda) for p in parts]
        with torch.no_grad():
            for room, part in zip(self.room, parts, strict=True):
                room.copy_(part, non_blocking=True)
        if any(part.is_cuda for part in parts):
            torch.cuda.synchronize()


def _part(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor.detach()[piece.start : piece.stop] if tensor.dim() else tensor.detach()


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of that name; raises `TypeError` where this torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"no torch.{name} here; read the checkpoint with the torch that wrote it")
    return dtype
