"""The job's token: created once, kept in a file that only its owner may read.

The launcher creates it, agents and workers get the file's path, and clients send it with every
request as `Authorization: Bearer <token>`. The token itself never goes into an argument list,
an environment variable or a log.
"""

import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rendezvous.errors import TokenError

AUTHORIZATION = "Authorization"
_MAX_FILE_BYTES = 4096


def make_token() -> str:
    """Return a new random token of 256 bits, made of characters that fit into a header."""
    return secrets.token_urlsafe(32)


def write_token_file(path: str | os.PathLike[str], token: str) -> Path:
    """Write the token to `path` with mode 0600, as a whole or not at all; return the path.

    Raises TokenError if the file cannot be written.
    """
    target = Path(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as private:
            partial = Path(private, target.name)
            partial.touch(0o600)
            partial.write_text(f"{token}\n", encoding="ascii")
            partial.replace(target)
    except OSError as error:
        raise TokenError(
            f"cannot write the token file {target}: {error.strerror}; choose a directory "
            "this user may write to"
        ) from error
    return target


def read_token_file(path: str | os.PathLike[str]) -> str:
    """Return the token in `path`.

    Raises TokenError if the file is missing or empty, belongs to another user, or may be read
    or written by group or others: a token that others know protects nothing.
    """
    try:
        with open(path, encoding="ascii") as file:
            status = os.fstat(file.fileno())
            token = file.read(_MAX_FILE_BYTES).strip()
    except OSError as error:
        raise TokenError(
            f"cannot read the token file {path}: {error.strerror}; is the job still running, "
            "and is this the user who started it?"
        ) from error
    except UnicodeDecodeError:
        raise TokenError(f"the token file {path} holds no token; start the job again") from None
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise TokenError(
            f"the token file {path} has mode {mode:04o}, so others may know the token; "
            f"start the job again, or, if no other user could read it, chmod 600 {path}"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise TokenError(f"the token file {path} belongs to user {status.st_uid}; use your own")
    if not token:
        raise TokenError(f"the token file {path} is empty; start the job again")
    return token


def bearer(token: str) -> str:
    """Return the value of the Authorization header for this token."""
    return f"Bearer {token}"


def is_authorized(header: str | None, tokens: Iterable[str]) -> bool:
    """Return whether an Authorization header carries one of these tokens.

    All tokens are compared, each in constant time, so that the time taken tells nothing.
    """
    scheme, _, given = (header or "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    found = given.strip().encode("utf-8", "surrogateescape")
    matches = [hmac.compare_digest(found, token.encode()) for token in tokens]
    return any(matches)
