"""Private folders that show whether the process that made them still lives.

The holder of a folder keeps a file in it locked, with its pid inside. The kernel releases the lock
at the holder's end of any kind. So each process of the same user can see whether a folder is in use
or was left behind by a process that was killed or a machine that lost its power.

Workers of one agent share a *scratch folder*: a DataLoader's processes hand tensors over through a
socket in a temporary folder (`pymp-…`), which a process that is killed cannot remove. The agent
removes the scratch folder at its end; if the agent is killed too, the next sweep removes it.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from elastic_driver.runtime.run_lock import Holder

DRIVER_LOCK = "lock"  # in a run's folder
BEGINNING_S = 60.0  # the holder of a younger folder may not have locked it yet
_LOCK = "keeper"  # it is locked before it gets this name; without a lock its holder is dead
_BEGUN = "keeper.begun"  # its name before that
_SCRATCH_PREFIX = "elastic-mp-"  # short, because the paths of sockets must be short
_LONGEST = 107 - len("/listener-12345678")  # bytes of the path of a socket's folder, unix(7)


@contextlib.contextmanager
def held_folder(folder: Path) -> Iterator[Path]:
    """Make the folder for this user alone, hold it as long as this lasts, and remove it."""
    folder.mkdir(mode=0o700)
    try:
        with (folder / _BEGUN).open("x") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(str(os.getpid()))
            lock.flush()
            os.rename(folder / _BEGUN, folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def holder_of(folder: Path) -> int | None:
    """Return the pid of the live process that holds this folder; None if there is none."""
    with contextlib.suppress(OSError), (folder / _LOCK).open() as lock:
        try:
            # A shared lock: other processes that look at the same time do not count as holders.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(lock.read() or 0) or None
    return None


def wait_for_holder(folder: Path) -> None:
    """Wait until no process holds this folder any more."""
    with contextlib.suppress(OSError), (folder / _LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


def clear_unheld(folder: Path) -> None:
    """Remove a folder if its holder has died or if it is empty."""
    if (folder / _LOCK).exists() and holder_of(folder) is None:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def sweep(prefix: str) -> None:
    """Remove this user's temporary folders with this prefix that no process holds."""
    for folder in Path(tempfile.gettempdir()).glob(prefix + "*"):
        with contextlib.suppress(OSError):
            found = folder.stat()
            if found.st_uid != os.geteuid():
                continue
            if (folder / _LOCK).exists():
                clear_unheld(folder)
            elif time.time() - found.st_mtime > BEGINNING_S:  # killed as it began or ended
                (folder / _BEGUN).unlink(missing_ok=True)
                folder.rmdir()


@contextlib.contextmanager
def scratch_folder() -> Iterator[str | None]:
    """Hold a scratch folder as long as this lasts; None: it cannot be made, workers use theirs."""
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


def remove_orphans(names: Iterable[str], marks: Iterable[str]) -> None:
    """Remove the files of our driver, which has died.

    Another driver may have written files at the same paths meanwhile; those of our driver hold one
    of its marks. The next driver of this run uses them again, and holds the folder's lock.
    """
    for path in map(Path, names):
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            if any(mark.encode() in content for mark in marks) and not _has_driver(path.parent):
                path.unlink()
                clear_unheld(path.parent)  # it was made for this alone


def _has_driver(folder: Path) -> bool:
    """Return whether a living driver of this machine holds the folder's lock."""
    try:
        first = (folder / DRIVER_LOCK).read_bytes().partition(b"\n")[0]
        return msgspec.json.decode(first, type=Holder).lives
    except (OSError, msgspec.DecodeError):
        return False
