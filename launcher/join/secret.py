"""The secret that lets a node join: server and node both have it, and it is in no argument.

It is one of three, in this order: the text of --token-file; the run's own token, if node and server
share a state directory; a key derived from --run-id, which is only as secret as the id. The node
sends it with its first request and gets the job's token, a new one for each run. So no process of a
run that is over can talk to the next run.
"""

import contextlib
import hashlib
from pathlib import Path

from elastic_driver.errors import UsageError
from elastic_driver.runtime.run_dir import read_endpoint
from rendezvous.auth import read_token_file
from rendezvous.client import parse_url
from rendezvous.errors import TokenError

LEAST_CHARS = 16
_SALT = b"elastic-driver: nodes that join"
_COST = 2**14  # scrypt's N; with r=8 about 16 MiB and 50 ms for each guess (RFC 7914)


def derive(run_id: str) -> str:
    """Return the key of a run id; everyone who knows the id can make it."""
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
    """Return the secrets that a node may try, the best first; none: it has no secret (yet).

    Without a token file these are the tokens of the runs of that name, or at that port, in a shared
    state directory, and the key of the run id.
    """
    if token_file is not None:
        return (read_secret(token_file),)
    tokens = []
    for folder in sorted(state_dir.glob("*")) if run_id is None else [state_dir / run_id]:
        run = read_endpoint(folder)
        # A token may be unreadable: it is another user's, or the run is just ending.
        with contextlib.suppress(TokenError):
            if run is not None and (run_id is not None or parse_url(run.url).port == port):
                tokens.append(read_token_file(folder / "token"))
    return (*tokens, *(() if run_id is None else (derive(run_id),)))
