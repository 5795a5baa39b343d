"""The tensors of a checkpoint: the share of each rank, its copy in memory, and the files.

In data parallelism every rank holds everything, so any rank can write any part. All ranks compute
the same split from the shapes alone. `keeper` copies a share on the training thread, which is the
only pause of training, and writes the copy in the background.

The files have the format of `torch.distributed.checkpoint` (DCP): tensors as `torch.save` writes
them, one behind the other, and an index. So any tool that reads DCP checkpoints can read ours. We
read them through our own manifest, because DCP's index is a pickle.
"""

import hashlib
import io
import os
import pickle
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from elastic_driver.worker.checkpoints import folder as folders
from elastic_driver.worker.checkpoints.folder import Chunk, Manifest, Mark, Report
from elastic_driver.worker.state_sync.values import TensorKind, torch_dtype
from rendezvous.own_files import open_plain

INDEX = ".metadata"  # DCP's name for it


class Piece(Struct, frozen=True, array_like=True):
    """Rows `start` … `stop` (its end) of a tensor; a scalar is one row."""

    tensor: str
    start: int
    stop: int


def share(kinds: Mapping[str, TensorKind], rank: int, size: int) -> list[Piece]:
    """Return the pieces that `rank` of `size` writes: at most one of each tensor, in their order.

    The tensors are laid end to end and cut into `size` equal lengths of bytes; each cut is moved
    down to the row it falls into. Every row belongs to exactly one rank, and a share differs from
    the mean by less than one row. Tensors without elements belong to no rank.
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
    """Return the number of rows of a tensor of this kind, and the bytes of one row."""
    dtype, shape = kind
    return shape[0] if shape else 1, prod(shape[1:]) * torch_dtype(dtype).itemsize


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
            self.copies = [
                torch.empty(p.shape, dtype=p.dtype, pin_memory=p.device.type != "cpu")
                for p in parts
            ]
        with torch.no_grad():
            for copy, part in zip(self.copies, parts, strict=True):
                copy.copy_(part, non_blocking=True)
        if any(part.device.type != "cpu" for part in parts):
            torch.accelerator.synchronize()


def file_name(rank: int) -> str:
    """Return DCP's name for the file of a rank."""
    return f"__{rank}_0.distcp"


def write_share(folder: Path, staging: Staging) -> Report:
    """Write a staged share to disk, into the folder; return the report of it.

    Raises OSError or RuntimeError where that fails.
    """
    path = folder / file_name(staging.rank)
    chunks = []
    with folders.new_file(path) as file:
        for piece, copy in zip(staging.pieces, staging.copies, strict=True):
            start, offsets = file.tell(), [piece.start, *([0] * copy.dim())][: copy.dim()]
            torch.save(copy, file)
            box = tuple(offsets), tuple(copy.shape)
            chunks.append(Chunk(piece.tensor, *box, path.name, start, file.tell() - start))
        file.flush()
        os.fsync(file.fileno())
    return Report(staging.digest, {path.name: folders.mark_of(path)}, tuple(chunks))


def read_into(folder: Path, manifest: Manifest, targets: Sequence[Tensor]) -> None:
    """Fill tensors of the manifest's kinds, in its order, from the files of a checkpoint."""
    wanted = dict(zip(manifest.tensors, targets, strict=True))
    with torch.no_grad():
        for chunk in manifest.chunks:
            with open_plain(folder / chunk.file) as file:
                file.seek(chunk.start)
                content = io.BytesIO(file.read(chunk.length))
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            wanted[chunk.tensor][box].copy_(torch.load(content, "cpu", weights_only=True))


def write_index(folder: Path, manifest: Manifest) -> Mark:
    """Write DCP's own index beside the files, so that other tools can read the checkpoint."""
    # Importing DCP takes about a second, so only the thread that writes in the background does it.
    from torch.distributed.checkpoint import metadata  # noqa: PLC0415

    from elastic_driver.worker.torch_seams.saved_files import place_in  # noqa: PLC0415

    tensors = {}
    for name, (dtype, shape) in manifest.tensors.items():
        properties = metadata.TensorProperties(dtype=torch_dtype(dtype))
        tensors[name] = metadata.TensorStorageMetadata(properties, torch.Size(shape), [])
    places = {}
    for chunk in manifest.chunks:
        box = metadata.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        tensors[chunk.tensor].chunks.append(box)
        where = place_in(chunk.file, chunk.start, chunk.length)
        places[metadata.MetadataIndex(chunk.tensor, chunk.offsets)] = where
    # Tools that load without a template nest the tensors by this: by attribute of the state.
    nesting = {name: tuple(name.split(".", 1)) for name in tensors}
    index = metadata.Metadata(tensors, planner_data=nesting, storage_data=places)
    return folders.write_file(folder / INDEX, pickle.dumps(index))
