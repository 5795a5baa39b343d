"""The secret that lets a node join: server and node both have it, and it is in no argument.

It is one of three, in this order: the text of --token-file; the run's own token, where node and
server share a state directory; a key derived from --run-id, which is only as secret as that. The
node sends it with its first request and is given the job's token, a new one for each run, so that
nothing of a run that is over can speak to the next one.
"""

import hashlib
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from elastic_driver.errors import UsageError
from elastic_driver.runtime.run_dir import Endpoint
from rendezvous.auth import read_token_file
from rendezvous.errors import TokenError

LEAST_CHARS = 16
_SALT = b"elastic-driver: nodes that join"
_COST = 2**14  # scrypt's N; with r=8 about 16 MiB and 50 ms for each guess (RFC 7914)


def derive(run_id: str) -> str:
    """Return the key that everybody who knows the run id has."""
    return hashlib.scrypt(run_id.encode(), salt=_SALT, n=_COST, r=8, p=1, dklen=32).hex()


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
        return (read_secret(token_file),)
    return () if run_id is None else (derive(run_id),)


def of_node(
    token_file: str | None, run_id: str | None, state_dir: Path, port: int
) -> tuple[str, ...]:
    """Return the secrets a node may try, the best first; none: it has nothing (yet) to show."""
    if token_file is not None:
        return (read_secret(token_file),)
    found = _found(state_dir, run_id, port)
    return found if run_id is None else (*found, derive(run_id))


def _found(state_dir: Path, run_id: str | None, port: int) -> tuple[str, ...]:
    """Return tokens of runs in the state directory: of this name, or else at this port."""
    folders = sorted(state_dir.glob("*")) if run_id is None else [state_dir / run_id]
    tokens = []
    for folder in folders:
        try:
            content = (folder / "endpoint.json").read_bytes()
            url = urlsplit(msgspec.json.decode(content, type=Endpoint).url)
            if run_id is not None or url.port == port:
                tokens.append(read_token_file(folder / "token"))
        except (OSError, ValueError, TokenError):  # another run's, or one that is just ending
            continue
    return tuple(tokens)
