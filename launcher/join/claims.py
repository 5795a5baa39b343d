"""Names that one process of this user has on this machine until it ends, however it ends.

A name is a locked file in a folder that nobody but this user can write to. (Names of the kernel's
own, as of abstract sockets, are for all users of the machine: whoever takes one first keeps it from
its owner.) Where no such folder can be had, the user is told so, and everything goes on as if no
other process had the name.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from elastic_driver.runtime.run_dir import default_state_dir
from launcher.join.identity import machine_id, own_name
from rendezvous.own_files import own_folder

FOLDER = ".names"  # in the default folder of all runs; no run has such a name
_MOST = 1000  # nodes of one machine at one server
_NETWORK = "/proc/self/ns/net"  # containers with networks of their own are machines of their own
_ATTEMPTS = 10  # the last holder removes its file, perhaps just after it was opened here


class _Names:
    """The names of this user's processes on this machine."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Make the folder; raises OSError if there can be none of this user's own."""
        self.folder = default_state_dir(environ) / FOLDER
        own_folder(self.folder)
        network = os.readlink(_NETWORK) if os.path.exists(_NETWORK) else ""
        self._machine = f"{machine_id()} {os.uname().nodename} {network}"

    def take(self, name: str, held: contextlib.ExitStack) -> bool:
        """Hold a name until `held` is closed; return whether no other process has it."""
        digest = hashlib.sha256(f"{self._machine} {name}".encode()).hexdigest()[:32]
        path = self.folder / digest
        for _attempt in range(_ATTEMPTS):
            with contextlib.ExitStack() as ours:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                file = os.open(path, flags, 0o600)
                ours.callback(os.close, file)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False)):
                        ours.callback(_remove, path)  # before the lock is free
                        held.push(ours.pop_all())
                        return True
        raise OSError(errno.EBUSY, "its files come and go too fast")


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def claim_port(port: int, environ: Mapping[str, str], say: Callable[[str], None]) -> Iterator[bool]:
    """Yield whether this process is the one of this user and machine that serves at this port.

    The claim comes before anything is opened: two processes that start together both find the port
    free. `say` shows a line where nothing can be claimed; then it is this process.
    """
    with contextlib.ExitStack() as held:
        ours = True
        try:
            ours = _Names(environ).take(f"serve {port}", held)
        except OSError as error:
            why = _why_not(environ, error)
            say(f"no names can be kept {why}; another process of yours may serve at port {port}")
        yield ours


@contextlib.contextmanager
def claim_name(
    places: Sequence[str], environ: Mapping[str, str], say: Callable[[str], None]
) -> Iterator[str]:
    """Yield a name that no other live node of this user and machine has at any of these places.

    `places`: the server's address, and what else tells its job. `say` shows a line where nothing
    can be claimed; then it is the machine's name. Raises OSError for more than 1000 nodes.
    """
    base = own_name()
    with contextlib.ExitStack() as held:
        try:
            name = _first_free(base, places, environ, held)
        except OSError as error:
            say(
                f"no names can be kept {_why_not(environ, error)}; a second node of yours on this "
                "machine would take the place of this one"
            )
            name = base
        if name is None:
            raise OSError(f"{_MOST} nodes of this machine have joined {places[0]} already")
        yield name


def _first_free(
    base: str, places: Sequence[str], environ: Mapping[str, str], held: contextlib.ExitStack
) -> str | None:
    names = _Names(environ)
    for number in range(1, _MOST + 1):
        with contextlib.ExitStack() as tried:
            if all(names.take(f"join {place} {number}", tried) for place in places):
                held.push(tried.pop_all())
                return base if number == 1 else f"{base}-{number}"
    return None


def _why_not(environ: Mapping[str, str], error: OSError) -> str:
    folder = default_state_dir(environ) / FOLDER
    return f"in {folder}: {error.strerror or error}"
