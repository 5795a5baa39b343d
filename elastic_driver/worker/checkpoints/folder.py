"""The folders and files of checkpoints: names, completeness, age, and the tensors of each rank.

A checkpoint is one folder below the `checkpoint_dir`, named after its step and the attempt at it.
Each rank adds its files and, last, a report of them. A folder is complete when it has a manifest,
which names the size and checksum of every file and is put in place by one rename when all reports
are there. Nothing is unpickled. `keeper` calls all this.

Which checkpoint is the newest follows from when it was written, not from its step: a training that
could not read its last checkpoints begins at an earlier step. A manifest names the checkpoints of
its own training; only these are ever deleted, and only if they can be read.

In data parallelism every rank holds everything, so any rank can write any part. All ranks compute
the same split of the tensors from the shapes alone (`share`). `keeper` copies a share on the
training thread (`Staging`), which is the only pause of training, and writes the copy in the
background.

The files have the format of `torch.distributed.checkpoint` (DCP): tensors as `torch.save` writes
them, one behind the other, and an index. So any tool that reads DCP checkpoints can read ours. We
read them through our own manifest, because DCP's index is a pickle.
"""

import hashlib
import io
import os
import pickle
import re
import shutil
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from elastic_driver.errors import ElasticError, UsageError
from elastic_driver.worker.state_sync.contents import TensorKind, torch_dtype
from rendezvous.own_files import open_plain, plain
from rendezvous.wire import UNREADABLE

MANIFEST = "manifest.json"
VALUES = "values.msgpack"  # everything in the state that is no tensor
FORMAT = 2
READ_BYTES = 4 * 1024 * 1024
_NAME = re.compile(r"step-(\d{12})-[0-9A-Za-z._-]+")
T = TypeVar("T")


class DamagedError(ElasticError):
    """A file of a checkpoint has changed since it was written, or is missing."""


class OtherFormatError(UsageError):
    """A checkpoint of another version of elastic-driver; it is left as it is."""


class Mark(Struct, frozen=True, array_like=True):
    """The size of a file in bytes, and the SHA-256 of its content."""

    size: int
    sha256: str


class Chunk(Struct, frozen=True, array_like=True):
    """A box of one tensor, and where its bytes are: `length` bytes from `start` of `file`."""

    tensor: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class Report(Struct, frozen=True):
    """The files of one rank. `layout` is a digest of all tensors' names, dtypes and shapes."""

    layout: str
    files: dict[str, Mark]
    chunks: tuple[Chunk, ...]


class Manifest(Struct, frozen=True):
    """A complete checkpoint: the state after `version` committed steps of a world of `world_size`.

    `tensors` are in the order in which the state sends them. `order` is larger than that of every
    manifest that could be read when this one was written. `earlier` are the names of the complete
    checkpoints of the same training, the newest first.
    """

    version: int
    world_size: int
    tensors: dict[str, TensorKind]
    chunks: tuple[Chunk, ...]
    files: dict[str, Mark]
    torch: str  # version that wrote it
    order: int = 0  # unix milliseconds of its completion, unless a clock was set back
    earlier: tuple[str, ...] = ()
    run: str = ""  # the run that wrote it
    format: int = FORMAT


class Age(Struct, frozen=True):
    """The part of a manifest of any format that says which one is newer, and whose it is."""

    order: int = 0
    run: str = ""
    format: int = 1


# ---- names -------------------------------------------------------------------------------


def folder_name(version: int, attempt: str) -> str:
    """Return the name for the state after `version` steps, as one world (`attempt`) writes it."""
    return f"step-{version:012d}-{attempt}"


def roll_call_name(digest: str) -> str:
    """Return the name of the folder in which workers without a driver agree (`keeper`)."""
    return f"leaving-{digest}"


def version_of(folder: Path) -> int:
    """Return the step in a folder's name; −1 for a folder that is no checkpoint."""
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else -1


def is_complete(folder: Path) -> bool:
    """Return whether the checkpoint was finished; it may be damaged or unreadable all the same.

    True also where that cannot be seen: what is perhaps complete is never deleted as half written.
    """
    try:
        (folder / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def checkpoints(root: Path) -> list[Path]:
    """Return all checkpoint folders, complete or not, the highest step first."""
    found = [path for path in root.iterdir() if version_of(path) >= 0 and not _is_other(path)]
    return sorted(found, key=lambda path: (version_of(path), path.name), reverse=True)


def _is_other(path: Path) -> bool:
    """Return whether something is there that is no folder, or a link that another user has made."""
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid in (os.geteuid(), 0):
            status = path.stat()
    except OSError:  # what cannot be seen may be a folder
        return False
    return not stat.S_ISDIR(status.st_mode)


def newest_first(root: Path) -> list[Path]:
    """Return all complete checkpoints, the one that was written last first."""
    found = [path for path in checkpoints(root) if is_complete(path)]
    return sorted(found, key=_order_of, reverse=True)  # of equal ones, the highest step


def _order_of(folder: Path) -> int:
    """Return the order of a checkpoint; that of its folder where the manifest cannot be read."""
    try:
        age = age_of(folder)
        if age.order:
            return age.order
    except (OSError, DamagedError):
        pass
    with suppress(OSError):
        return folder.stat().st_mtime_ns // 10**6
    return 0


def ages(root: Path) -> dict[str, Age]:
    """Return the ages of all complete checkpoints of this format that can be read, by name."""
    found = {}
    for path in checkpoints(root):
        with suppress(OSError, DamagedError):
            if (age := age_of(path)).format == FORMAT:
                found[path.name] = age
    return found


def next_order(ages: Iterable[Age]) -> int:
    """Return the order of a checkpoint that is completed now, beside checkpoints of these ages."""
    return max([time.time_ns() // 10**6, *(age.order + 1 for age in ages)])


# ---- writing -----------------------------------------------------------------------------


def mark_of(path: Path) -> Mark:
    """Return size and checksum of a file as it is on disk now."""
    digest = hashlib.sha256()
    size = 0
    with open_plain(path) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return Mark(size, digest.hexdigest())


def new_file(path: Path) -> BinaryIO:
    """Open a file for writing; what is there is replaced, and a link or a pipe is refused."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return plain(open(os.open(path, flags, 0o666), "wb"))


def write_file(path: Path, content: bytes) -> Mark:
    """Put a file on disk, whole or not at all; return its size and checksum."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with new_file(fresh) as file:
            file.write(content)
        _sync(fresh)
        fresh.replace(path)
        _sync(path.parent)
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
    return Mark(len(content), hashlib.sha256(content).hexdigest())


def write_document(path: Path, document: Struct) -> None:
    """Write a document to disk: a line with its checksum, then JSON."""
    body = msgspec.json.encode(document)
    write_file(path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def read_document(path: Path, kind: type[T]) -> T:
    """Return the document in a file.

    Raises `DamagedError` where its checksum is wrong, OSError where it cannot be read.
    """
    with open_plain(path) as file:
        digest, _, body = file.read().partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise DamagedError(f"{path.name} does not have the checksum it was written with")
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        problem = f"{path.name} is not of this version of elastic-driver: {error}"
        raise DamagedError(problem) from None


def age_of(folder: Path) -> Age:
    """Return the age of a checkpoint of any format; raises as `read_document` does."""
    return read_document(folder / MANIFEST, Age)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a complete checkpoint.

    Raises `DamagedError` and OSError as `read_document` does, `OtherFormatError` for a checkpoint
    of another version of elastic-driver.
    """
    found = age_of(folder).format
    if found != FORMAT:
        raise OtherFormatError(
            f"{folder} is a checkpoint of format {found}, this version of elastic-driver reads "
            f"format {FORMAT}: go on with the version that wrote it, or give another checkpoint_dir"
        )
    manifest = read_document(folder / MANIFEST, Manifest)
    if manifest.version != version_of(folder):
        raise DamagedError(f"{MANIFEST} is not this folder's")
    return manifest


def complete(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, on disk after all other files: from now on the checkpoint is loaded."""
    _sync(folder)
    write_document(folder / MANIFEST, manifest)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading -----------------------------------------------------------------------------


def verified(folder: Path) -> Manifest:
    """Return the manifest of a complete checkpoint, after a check of every byte of its files.

    Raises `DamagedError` with the name of the first file that has changed since it was written,
    OSError where a file cannot be read, `OtherFormatError` as `read_manifest` does.
    """
    manifest = read_manifest(folder)
    strange = [name for name in manifest.files if Path(name).name != name]
    strange += [chunk.file for chunk in manifest.chunks if chunk.file not in manifest.files]
    if strange:
        raise DamagedError(f"{MANIFEST} names {strange[0]!r}, which is not one of its files")
    for name, mark in manifest.files.items():
        try:
            found = mark_of(folder / name)
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        if found.size != mark.size:
            raise DamagedError(f"{name} has {found.size} bytes, {mark.size} were written")
        if found != mark:
            raise DamagedError(f"{name} does not have the checksum it was written with")
    return manifest


def is_readable(folder: Path) -> bool:
    """Return whether a complete checkpoint seems whole: each of its files opens, at its size."""
    try:
        manifest = read_manifest(folder)
        for name, mark in manifest.files.items():
            with open_plain(folder / name) as file:
                if os.fstat(file.fileno()).st_size != mark.size:
                    return False
                file.read(1)
    except (OSError, ElasticError):
        return False
    return True


# ---- removing ----------------------------------------------------------------------------


def remove(folder: Path) -> None:
    """Delete a checkpoint, its manifest first: an interrupted deletion leaves no complete one.

    Of a link, nothing but the link.
    """
    with suppress(OSError):
        if folder.is_symlink():
            folder.unlink()
        elif folder.is_dir():  # `rmtree` would wait at a pipe
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is kept for people and never tried again.

    Returns its new path, or the old one where it cannot be renamed.
    """
    try:
        return folder.rename(folder.with_name(f"damaged-{folder.name}"))
    except OSError:
        return folder


def make_room(folder: Path) -> None:
    """Rename a complete checkpoint of an earlier run that has the name of one to be written now."""
    number = 2
    while is_complete(folder):
        other = folder.with_name(f"{folder.name}.{number}")
        if not other.exists():
            folder.rename(other)
        number += 1


def retire(root: Path, newest: Path, old: Iterable[str]) -> None:
    """Delete old checkpoints, by name, and half-written ones of steps before the newest one.

    Ranks write in the order of steps, so these are never completed.
    """
    for name in old:
        remove(root / name)
    for path in checkpoints(root):
        if version_of(path) < version_of(newest) and not is_complete(path):
            remove(path)


def sweep(root: Path) -> list[Path]:
    """Delete every half-written checkpoint, before this job writes; return their paths.

    Also delete what is left of agreements without a driver.
    """
    remove_roll_calls(root)
    half = [path for path in checkpoints(root) if not is_complete(path)]
    for path in half:
        remove(path)
    return half


def remove_roll_calls(root: Path) -> None:
    """Delete the folders in which workers without a driver have agreed."""
    for path in root.glob(roll_call_name("*")):
        if path.is_dir():  # `rmtree` would wait at a pipe
            shutil.rmtree(path, ignore_errors=True)


# ---- tensors ---------------------------------------------------------------------------

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
    with new_file(path) as file:
        for piece, copy in zip(staging.pieces, staging.copies, strict=True):
            start = file.tell()
            offsets = [piece.start, *([0] * copy.dim())][: copy.dim()]
            torch.save(copy, file)
            box = tuple(offsets), tuple(copy.shape)
            chunks.append(Chunk(piece.tensor, *box, path.name, start, file.tell() - start))
        file.flush()
        os.fsync(file.fileno())
    return Report(staging.digest, {path.name: mark_of(path)}, tuple(chunks))


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

    from elastic_driver.worker.torch_seams import place_in  # noqa: PLC0415

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
    return write_file(folder / INDEX, pickle.dumps(index))
