"""The name of a node that joins, and the secret.

The first node of a machine has the machine's name, a second one at the same server `name-2`
(`launcher.join.claims`). The next process that holds a name is the successor of the one before, and
the node keeps its name.

Server and node both have the secret, and it is in no argument. It is one of three, in this order:
a key derived from the text of --token-file; the run's own token, if node and server share a state
directory; a key derived from --run-id, which is only as secret as the id. Each proves to the other
that it has it (`rendezvous.auth`), and the node gets a token of its own, a new one for each run.
So no process of a run that is over can talk to the next run.
"""

import contextlib
import functools
import hashlib
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from elastic_driver.errors import UsageError
from elastic_driver.runtime.run_dir import read_endpoint
from rendezvous.auth import read_token_file
from rendezvous.errors import TokenError

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
