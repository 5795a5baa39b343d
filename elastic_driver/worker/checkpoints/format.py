"""Tensors to and from files, in the format of `torch.distributed.checkpoint` (DCP).

DCP's writer and reader do the work. DCP's `save` and `load` need collectives around them; this
module needs none. Every rank knows the split of the tensors, so each writes its own share
(`write_share`), and rank 0, which reads all reports, writes DCP's index (`write_index`): the folder
then is an ordinary DCP checkpoint, which any tool can read. We read it through our own manifest
(`read_into`), since DCP's index is a pickle.

Importing DCP takes about a second, so this module is imported only to write or read.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    FileSystemWriter,
    metadata,
    planner,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from elastic_driver.worker.checkpoints.folder import Chunk, Manifest, Mark, Report, mark_of
from elastic_driver.worker.checkpoints.staging import Piece, Staging
from elastic_driver.worker.state_sync.values import TensorKind

INDEX = ".metadata"  # DCP's name for it


def write_share(folder: Path, staging: Staging) -> Report:
    """Write a staged share into the folder, to disk; return what was written.

    Raises OSError or RuntimeError where that fails.
    """
    items = [_write_item(piece, staging.kinds[piece.tensor]) for piece in staging.pieces]
    copies = dict(zip((item.index for item in items), staging.copies, strict=True))
    # All that the writer needs of a planner: the data of an item.
    source = SimpleNamespace(resolve_data=lambda item: copies[item.index])
    # No copying ahead: the tensors are on the CPU, and a GPU must not be touched from here.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    # A plan's position is the rank, which gives the file its name.
    plans = [planner.SavePlan([])] * staging.rank + [planner.SavePlan(items)]
    results = writer.write_data(writer.prepare_global_plan(plans)[-1], source).value()
    boxes = {item.index: item.tensor_data.chunk for item in items}
    chunks = tuple(_chunk(result, boxes[result.index]) for result in results)
    files = {name: mark_of(folder / name) for name in sorted({c.file for c in chunks})}
    return Report(staging.digest, files, chunks)


def write_index(folder: Path, manifest: Manifest) -> Mark:
    """Write DCP's own index beside the files, so that other tools can read the checkpoint."""
    index = _index(manifest)
    written = [WriteResult(key, where.length, where) for key, where in index.storage_data.items()]
    FileSystemWriter(folder).finish(index, [written])
    return mark_of(folder / INDEX)


def read_into(folder: Path, manifest: Manifest, targets: Sequence[Tensor]) -> None:
    """Fill tensors of the manifest's kinds, in its order, from the files of a checkpoint."""
    wanted = dict(zip(manifest.tensors, targets, strict=True))
    filled = {name: tensor for name, tensor in wanted.items() if tensor.numel()}
    if not filled:
        return
    index, loading, reader = _index(manifest), DefaultLoadPlanner(), FileSystemReader(folder)
    loading.set_up_planner(filled, index, is_coordinator=True)
    reader.set_up_storage_reader(index, is_coordinator=True)
    plans = loading.create_global_plan([reader.prepare_local_plan(loading.create_local_plan())])
    plan = loading.finish_plan(reader.prepare_global_plan(plans)[0])
    with torch.no_grad():
        reader.read_data(plan, loading).wait()


# ---- our structs as DCP's ----------------------------------------------------------------


def _write_item(piece: Piece, kind: TensorKind) -> planner.WriteItem:
    rest = kind.shape[1:]
    offsets = (piece.start, *(0 for _ in rest)) if kind.shape else ()
    sizes = (piece.stop - piece.start, *rest) if kind.shape else ()
    chunk = metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = planner.TensorWriteData(chunk, _properties(kind), torch.Size(kind.shape))
    return planner.WriteItem(
        metadata.MetadataIndex(piece.tensor, offsets), planner.WriteItemType.SHARD, tensor_data=data
    )


def _chunk(result: WriteResult, box: metadata.ChunkStorageMetadata) -> Chunk:
    where = result.storage_data
    return Chunk(
        tensor=result.index.fqn,
        offsets=tuple(box.offsets),
        sizes=tuple(box.sizes),
        file=where.relative_path,
        start=where.offset,
        length=where.length,
    )


def _index(manifest: Manifest) -> metadata.Metadata:
    tensors = {
        name: metadata.TensorStorageMetadata(_properties(kind), torch.Size(kind.shape), [])
        for name, kind in manifest.tensors.items()
    }
    places = {}
    for chunk in manifest.chunks:
        box = metadata.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        tensors[chunk.tensor].chunks.append(box)
        where = _StorageInfo(chunk.file, chunk.start, chunk.length)
        places[metadata.MetadataIndex(chunk.tensor, chunk.offsets)] = where
    # Tools that load without a template nest the tensors by this: by attribute of the state.
    nesting = {name: tuple(name.split(".", 1)) for name in tensors}
    return metadata.Metadata(tensors, planner_data=nesting, storage_data=places)


def _properties(kind: TensorKind) -> metadata.TensorProperties:
    return metadata.TensorProperties(dtype=kind.torch_dtype)
