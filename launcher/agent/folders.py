"""Private folders that show whether the process that made them still lives.

The holder of a folder keeps a file in it locked, with its pid and the time of its start inside. The
kernel releases the lock at the holder's end of any kind. So each process of the same user can see
whether a folder is in use or was left behind by a process that was killed or a machine that lost
its power. Temporary folders are shared with other users, so a folder and its file are believed only
if they are this user's, and no symbolic link is followed.

Workers of one agent share a *scratch folder*: a DataLoader's processes hand tensors over through a
socket in a temporary folder (`pymp-…`), which a process that is killed cannot remove. The agent
removes the scratch folder at its end; if the agent is killed too, the next sweep removes it.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from elastic_driver.runtime.run_dir import Holder
from rendezvous.wire import UNREADABLE

DRIVER_LOCK = "lock"  # in a run's folder
BEGINNING_S = 60.0  # the holder of a younger folder may not have locked it yet
_LOCK = "keeper"  # it is locked before it gets this name; without a lock its holder is dead
_BEGUN = "keeper.begun"  # its name before that
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LONGEST_HOLDER = 4096
_SCRATCH_PREFIX = "elastic-mp-"  # short, because the paths of sockets must be short
_LONGEST = 107 - len("/listener-12345678")  # bytes of the path of a socket's folder, unix(7)


@contextlib.contextmanager
def held_folder(folder: Path) -> Iterator[Path]:
    """Make the folder for this user alone, hold it while the context is open, and remove it."""
    folder.mkdir(mode=0o700)
    try:
        with (folder / _BEGUN).open("xb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(msgspec.json.encode(Holder.this_process()))
            lock.flush()
            os.rename(folder / _BEGUN, folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def holder_of(folder: Path) -> int | None:
    """Return the pid of the live process that holds this folder; None if there is none."""
    with _open_lock(folder) as lock:
        holder = None if lock is None or not _is_locked(lock) else _read_holder(lock)
    return None if holder is None else holder.pid


@contextlib.contextmanager
def process_of(folder: Path) -> Iterator[tuple[int, int] | None]:
    """Yield the live process that holds this folder as (pid, pidfd).

    None if there is none. The pidfd means this process for good, unlike its number.
    """
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(_open_lock(folder))
        found = None
        if lock is not None and _is_locked(lock) and (holder := _read_holder(lock)) is not None:
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(holder.pid)
                stack.callback(os.close, pidfd)
                found = (holder.pid, pidfd) if holder.lives else None
        yield found


def wait_for_holder(folder: Path) -> None:
    """Wait until no process holds this folder any more."""
    with _open_lock(folder) as lock:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_SH)


def clear_unheld(folder: Path) -> None:
    """Remove a folder if its holder has died or if it is empty."""
    with _open_lock(folder) as lock:
        dead = lock is not None and not _is_locked(lock)
    if dead:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


@contextlib.contextmanager
def _open_lock(folder: Path) -> Iterator[int | None]:
    """Open the file that a holder locks; None if there is none that can be believed."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        lock = None
        with contextlib.suppress(OSError):
            inside = os.open(folder, flags | os.O_DIRECTORY)
            stack.callback(os.close, inside)
            file = os.open(_LOCK, flags, dir_fd=inside)
            stack.callback(os.close, file)
            if _is_ours(os.fstat(inside)) and _is_ours(os.fstat(file)):
                lock = file
        yield lock


def _is_ours(status: os.stat_result) -> bool:
    """Return whether nobody else can have made or changed this file or folder."""
    kind = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    return kind and status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE


def _is_locked(lock: int) -> bool:
    try:
        # A shared lock: other processes that look at the same time do not count as holders.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _read_holder(lock: int) -> Holder | None:
    """Return the holder that the file names, if it lives."""
    with contextlib.suppress(msgspec.DecodeError):
        holder = msgspec.json.decode(os.pread(lock, _LONGEST_HOLDER, 0), type=Holder)
        return holder if holder.lives else None
    return None


def sweep(prefix: str) -> None:
    """Remove this user's temporary folders with this prefix that no process holds."""
    for folder in Path(tempfile.gettempdir()).glob(prefix + "*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            if (folder / _LOCK).exists():
                clear_unheld(folder)
            elif time.time() - found.st_mtime > BEGINNING_S:  # killed as it began or ended
                (folder / _BEGUN).unlink(missing_ok=True)
                folder.rmdir()


@contextlib.contextmanager
def scratch_folder() -> Iterator[str | None]:
    """Yield a scratch folder; None: it cannot be made, and workers use their own."""
    sweep_scratch()
    folder = Path(tempfile.gettempdir(), _SCRATCH_PREFIX + secrets.token_hex(4))
    with contextlib.ExitStack() as stack:
        scratch = None
        with contextlib.suppress(OSError):
            if len(str(folder)) <= _LONGEST:
                scratch = str(stack.enter_context(held_folder(folder)))
        yield scratch


def sweep_scratch() -> None:
    """Remove the scratch folders of this user's agents that were killed."""
    sweep(_SCRATCH_PREFIX)


# ---- files of a driver that has died -----------------------------------------------------


def remove_orphans(names: Iterable[str], is_ours: Callable[[str], bool]) -> None:
    """Remove the files of our driver, which has died.

    Another driver may have written files at the same paths meanwhile; `is_ours` knows those of our
    driver by their content. The next driver of this run uses them again, and holds the folder's
    lock. Files of derived tokens lie beside that of the driver's token, and go with it.
    """
    for path in map(Path, names):
        with contextlib.suppress(OSError):
            content = path.read_text(encoding="ascii", errors="replace")
            if is_ours(content) and not _has_driver(path.parent):
                for derived in path.parent.glob(f"{path.name}-*"):
                    derived.unlink(missing_ok=True)
                path.unlink()
                clear_unheld(path.parent)  # it was made for this alone


def _has_driver(folder: Path) -> bool:
    """Return whether a living driver of this machine holds the folder's lock."""
    try:
        first = (folder / DRIVER_LOCK).read_bytes().partition(b"\n")[0]
        return msgspec.json.decode(first, type=Holder).lives
    except (OSError, *UNREADABLE):
        return False
