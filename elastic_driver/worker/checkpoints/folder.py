"""The folders of checkpoints: their names, what makes one complete, which are damaged or old.

A checkpoint is one folder below the `checkpoint_dir`, named after its step and the attempt at it.
Each rank adds its files and, last, a report of them (`part-<rank>.json`). Complete is a folder with
a manifest, which names the size and checksum of every file and is put in place by one rename when
all reports are there. Nothing here knows what is in the files; torch is never imported, nothing
is unpickled. Called from the background thread of `writer`, and by `keeper` to load.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from elastic_driver.errors import ElasticError

MANIFEST = "manifest.json"
VALUES = "values.msgpack"  # everything in the state that is no tensor
FORMAT = 1
READ_BYTES = 4 * 1024 * 1024
_NAME = re.compile(r"step-(\d{12})-[0-9A-Za-z._-]+")
_ASIDE = "damaged-"  # prefix of a folder that failed its checksums
T = TypeVar("T")


class DamagedError(ElasticError):
    """A checkpoint is not what was written."""


class Mark(Struct, frozen=True, array_like=True):
    """What a file must be: its size in bytes and the SHA-256 of its content."""

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
    """What one rank has written. `layout` is a digest of all tensors' names, types and shapes."""

    layout: str
    files: dict[str, Mark]
    chunks: tuple[Chunk, ...]


class Kind(Struct, frozen=True, array_like=True):
    """The dtype (torch's name for it) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


class Manifest(Struct, frozen=True):
    """A complete checkpoint: the state after `version` committed steps of a world of `world_size`.

    `tensors` are in the order in which the state sends them.
    """

    version: int
    world_size: int
    tensors: dict[str, Kind]
    chunks: tuple[Chunk, ...]
    files: dict[str, Mark]
    torch: str  # version that wrote it
    format: int = FORMAT


# ---- names -------------------------------------------------------------------------------


def folder_name(version: int, attempt: str) -> str:
    """The folder for the state after `version` steps, written by one world: the `attempt`."""
    return f"step-{version:012d}-{attempt}"


def version_of(folder: Path) -> int | None:
    """The step in a folder's name; None for what is no checkpoint."""
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def report_path(folder: Path, rank: int) -> Path:
    """Where a rank reports what it has written."""
    return folder / f"part-{rank}.json"


def trouble_path(folder: Path, rank: int) -> Path:
    """Where a rank says why it could not write."""
    return folder / f"part-{rank}.failed"


def is_complete(folder: Path) -> bool:
    """Whether the checkpoint was finished; it may be damaged all the same."""
    return (folder / MANIFEST).is_file()


def checkpoints(root: Path) -> list[Path]:
    """All checkpoint folders, complete or not, those of the highest step first."""
    found = [path for path in root.iterdir() if version_of(path) is not None]
    return sorted(found, key=lambda path: (version_of(path), path.name), reverse=True)


# ---- writing -----------------------------------------------------------------------------


def mark_of(path: Path) -> Mark:
    """Size and checksum of a file as it is on disk now."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return Mark(size, digest.hexdigest())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to; what is there afterwards is on disk under `path`, whole or not at all."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        yield fresh
        _sync(fresh)
        fresh.replace(path)
        _sync(path.parent)
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)


def write_document(path: Path, document: Struct) -> None:
    """Put a document in place: a line with its checksum, then JSON."""
    body = msgspec.json.encode(document)
    with replacing(path) as fresh:
        fresh.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def read_document(path: Path, kind: type[T]) -> T:
    """The document in a file; raises `DamagedError` where it is another, OSError unreadable."""
    digest, _, body = path.read_bytes().partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise DamagedError(f"{path.name} does not have the checksum it was written with")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise DamagedError(
            f"{path.name} is none of this version of elastic-driver: {error}"
        ) from None


def complete(folder: Path, manifest: Manifest) -> None:
    """Make the checkpoint one that is loaded: its last file, on disk after all others."""
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
    """The manifest of a complete checkpoint whose files all are what was written.

    Reads every byte. Raises `DamagedError` naming the first file that is not, and OSError where
    the disk does not give it.
    """
    manifest = read_document(folder / MANIFEST, Manifest)
    if manifest.format != FORMAT or manifest.version != version_of(folder):
        raise DamagedError(f"{MANIFEST} is not this folder's")
    strange = [name for name in manifest.files if Path(name).name != name]
    strange += [chunk.file for chunk in manifest.chunks if chunk.file not in manifest.files]
    if strange:
        raise DamagedError(f"{MANIFEST} speaks of {strange[0]!r}, which is no file of it")
    for name, mark in manifest.files.items():
        _check(folder / name, mark)
    return manifest


def _check(path: Path, mark: Mark) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    if size != mark.size:
        raise DamagedError(f"{path.name} has {size} bytes, {mark.size} were written")
    if mark_of(path) != mark:
        raise DamagedError(f"{path.name} does not have the checksum it was written with")


# ---- removing ----------------------------------------------------------------------------


def remove(folder: Path) -> None:
    """Delete a checkpoint; whatever moment it is interrupted in, a rest is never complete."""
    with suppress(OSError):
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is not tried again and does not count; for a reader
    to look at. Returns its new path, or the old one where it cannot be renamed.
    """
    aside = folder.with_name(_ASIDE + folder.name)
    try:
        return folder.rename(aside)
    except OSError:
        return folder


def retire(root: Path, keep: int) -> None:
    """Delete what is older than the newest `keep` complete ones, and half-written older ones.

    A half-written one of a step before a complete one stays so: ranks write in the order of steps.
    """
    found = checkpoints(root)
    finished = [path for path in found if is_complete(path)]
    newest = version_of(finished[0]) if finished else None
    for path in found:
        if path in finished[:keep]:
            continue
        version = version_of(path)
        if path in finished or (newest is not None and version is not None and version < newest):
            remove(path)


def sweep(root: Path) -> list[Path]:
    """Delete every half-written checkpoint, before anybody of this job writes; which they were."""
    half = [path for path in checkpoints(root) if not is_complete(path)]
    for path in half:
        remove(path)
    return half
