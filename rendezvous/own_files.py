"""Folders and files that nobody but this user can have made or changed.

State folders may lie where other users can write (`/tmp`, a group's project): another user could
make the folder first, or put a link into it that leads to a file of ours. So a folder is used only
if it is this user's and nobody else may write to it, and no link in it is followed.
"""

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def own_folder(path: Path) -> None:
    """Make a folder for this user alone (0700), with those above it; or take one that is so.

    Raises `PermissionError` for a folder that others own or may write to, that has something of
    theirs or a link in it, or that is a link itself; other kinds of `OSError` where it cannot be
    made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = _open_folder(path)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise _refused(f"it belongs to user {status.st_uid}")
        if status.st_mode & _OTHERS_WRITE:
            mode = stat.S_IMODE(status.st_mode)
            raise _refused(f"other users may write to it (mode {mode:04o})")
        os.fchmod(folder, 0o700)
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # it is gone again
                    _refuse_stranger(entry)
    finally:
        os.close(folder)


def _open_folder(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            raise _refused("it is a link") from None
        raise


def shown_folder(path: Path) -> None:
    """Make a folder that others may look into, and only this user writes to; or take one of ours.

    For results in a place that users share. Who owns it is compared with who owns what we make
    there, as a file server may know us by another number. Raises `PermissionError` for a folder of
    another user's, or a link; other kinds of `OSError` where it cannot be made.
    """
    path.mkdir(mode=0o755, exist_ok=True)
    folder = _open_folder(path)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() and status.st_uid != _owner_of_ours(folder):
            raise _refused(f"it belongs to user {status.st_uid}")
        if status.st_mode & _OTHERS_WRITE:
            with contextlib.suppress(OSError):  # a file system without rights of its own
                os.fchmod(folder, stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
    finally:
        os.close(folder)


def _owner_of_ours(folder: int) -> int:
    """Return the owner of a file that this process makes in an open folder."""
    name = f".{secrets.token_hex(8)}"
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        return os.fstat(file).st_uid
    finally:
        os.close(file)
        os.unlink(name, dir_fd=folder)


def _refuse_stranger(entry: "os.DirEntry[str]") -> None:
    owner = entry.stat(follow_symlinks=False).st_uid
    if entry.is_symlink():
        raise _refused(f"{entry.name!r} in it is a link")
    if owner != os.geteuid():
        raise _refused(f"{entry.name!r} in it belongs to user {owner}")


def open_own(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """Open a file; a link is followed only if this user or root has made it. Raises `OSError`.

    `mode`: of a file that is made.

    A link of another user's could make us read, or send, a file that only we can read.
    """
    flags |= os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    owner = os.lstat(path).st_uid
    if owner not in (os.geteuid(), 0):
        raise _refused(f"it is a link that user {owner} has made")
    return os.open(path, flags, mode)


def open_named(path: str | os.PathLike[str]) -> int:
    """Open for writing a file that a user has named, which may lie where others write, too.

    A link, a pipe or a device counts only if this user or root has made it: another user's could
    lead to a file of ours, or never be read. Raises `OSError`.
    """
    flags, linked = os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.path.islink(path)
    try:
        opened = open_own(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:  # ENXIO: a pipe that nobody reads yet
        if error.errno != errno.ENXIO or os.stat(path).st_uid not in (os.geteuid(), 0):
            raise
        opened = open_own(path, flags, 0o666)
    status = os.fstat(opened)
    if not (linked or stat.S_ISREG(status.st_mode) or status.st_uid in (os.geteuid(), 0)):
        os.close(opened)
        raise _refused(f"it is a pipe or a device of user {status.st_uid}")
    os.set_blocking(opened, True)
    return opened


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a plain file for reading; raises `OSError`, also where something else is there.

    Nothing blocks or has no end: a pipe or a device that somebody has put there is refused.
    """
    return plain(open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb"))


def plain(file: BinaryIO) -> BinaryIO:
    """Return an open file; closes it and raises `PermissionError` if it is a pipe or a device."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _refused("it is no plain file")
    return file


def read_own(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the content of a plain file of at most `most` bytes; raises `OSError`, EFBIG for more.

    Nothing blocks: a pipe that somebody has put there is refused.
    """
    with plain(open(open_own(path, os.O_RDONLY | os.O_NONBLOCK), "rb")) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes")
    return content


def write_own(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write a file with mode 0600, as a whole or not at all; return its path. Raises `OSError`.

    A file, or a link, that is there is replaced, and never written to.
    """
    target = Path(path)
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as private:
        partial = Path(private, target.name)
        partial.touch(0o600)
        partial.write_bytes(data)
        partial.replace(target)
    return target


def _refused(why: str) -> PermissionError:
    return PermissionError(errno.EPERM, f"{why}, so it is not only ours")
