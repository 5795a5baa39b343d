"""The name of a node that joins, the names that this machine's nodes have taken, and the secret.

The first node of a machine has the machine's name, a second one at the same server `name-2`. The
next process that holds a name is the successor of the one before, and the node keeps its name.

A process holds a name until it ends, however it ends: a locked file in a folder that nobody but
this user can write to. (Names of the kernel's own, as of abstract sockets, are for all users of the
machine: whoever takes one first keeps it from its owner.) Where no such folder can be had, the user
is told so, and everything goes on as if no other process had the name.

Server and node both have the secret, and it is in no argument. It is one of three, in this order:
a key derived from the text of --token-file; the run's own token, if node and server share a state
directory; a key derived from --run-id, which is only as secret as the id. Each proves to the other
that it has it (`rendezvous.auth`), and the node gets a token of its own, a new one for each run.
So no process of a run that is over can talk to the next run.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from elastic_driver.errors import UsageError
from elastic_driver.runtime.run_dir import default_state_dir, read_endpoint
from rendezvous.auth import read_token_file
from rendezvous.errors import TokenError
from rendezvous.own_files import own_folder

# ---- names --------------------------------------------------------------------------------


LEAST_CHARS = 16
_SALT = b"elastic-driver: nodes that join"
_COST = 2**14  # scrypt's N; with r=8 about 16 MiB and 50 ms for each guess (RFC 7914)


def own_name() -> str:
    """Return this machine's name with only the characters of a host name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:150].lstrip("._-") or "node"


def machine_id() -> str:
    """Return an id that tells machines of the same name apart (machine-id(5))."""
    for path in (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id")):
        with contextlib.suppress(OSError):
            if text := path.read_text(errors="replace").strip():
                return text[:64]
    return own_name()[:64]


# ---- the secret --------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def derive(text: str) -> str:
    """Return the key of a --token-file's text or a run id; everyone who knows it can make the key.

    It takes time, so that guesses which are tested against a proof take time, too.
    """
    return hashlib.scrypt(text.encode(), salt=_SALT, n=_COST, r=8, p=1, dklen=32).hex()


def read_secret(path: str) -> str:
    """Return the text of a --token-file; raises TokenError or UsageError if it is no secret."""
    if not Path(path).exists():
        raise UsageError(
            f"--token-file {path} does not exist; copy the server's, or make one for server and "
            f"nodes with: (umask 077; openssl rand -hex 32 > {path})"
        )
    text = read_token_file(path)
    if len(text.split()) != 1 or not text.isprintable():
        raise UsageError(f"--token-file {path} holds more than one word; one is the secret")
    if len(text) < LEAST_CHARS:
        raise UsageError(
            f"--token-file {path} holds {len(text)} characters, which can be guessed; make one "
            f"with: (umask 077; openssl rand -hex 32 > {path})"
        )
    return text


def of_server(token_file: str | None, run_id: str | None) -> tuple[str, ...]:
    """Return the secrets that the server takes from nodes beside its own token."""
    if token_file is not None:
        return (derive(read_secret(token_file)),)
    return () if run_id is None else (derive(run_id),)


def of_node(
    token_file: str | None, run_id: str | None, state_dir: Path, port: int
) -> tuple[str, ...]:
    """Return the secrets that a node may try, the best first; none: it has no secret (yet).

    Without a token file these are the tokens of the runs of that name, or at that port, in a shared
    state directory, and the key of the run id.
    """
    if token_file is not None:
        return (derive(read_secret(token_file)),)
    tokens = []
    for folder in sorted(state_dir.glob("*")) if run_id is None else [state_dir / run_id]:
        run = read_endpoint(folder)
        # A token may be unreadable: it is another user's, or the run is just ending.
        with contextlib.suppress(TokenError):
            if run is not None and (run_id is not None or urlsplit(run.url).port == port):
                tokens.append(read_token_file(folder / "token"))
    return (*tokens, *(() if run_id is None else (derive(run_id),)))


# ---- names that are taken on this machine -------------------------------------------------


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
