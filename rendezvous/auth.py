"""The job's token: created once, kept in a file that only its owner may read.

The launcher creates it, agents and workers get the file's path, and clients send it with every
request as `Authorization: Bearer <token>`. The token itself never goes into an argument list,
an environment variable or a log.
"""

import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from rendezvous.errors import TokenError

AUTHORIZATION = "Authorization"
_SCHEME = "Bearer "
_TOKEN_BYTES = 32
_MAX_FILE_BYTES = 4096


def make_token() -> str:
    """Return a new random token of 256 bits, made of characters that fit into a header."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def write_token_file(path: str | os.PathLike[str], token: str) -> Path:
    """Write the token to `path` with mode 0600, as a whole or not at all; return the path.

    Raises TokenError if the file cannot be written.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(token + "\n")
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
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
            f"start the job again, or, if nobody could read it, chmod 600 {path}"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise TokenError(f"the token file {path} belongs to user {status.st_uid}; use your own")
    if not token:
        raise TokenError(f"the token file {path} is empty; start the job again")
    return token


def bearer(token: str) -> str:
    """Return the value of the Authorization header for this token."""
    return _SCHEME + token


def is_authorized(header: str | None, tokens: Iterable[str]) -> bool:
    """Return whether an Authorization header carries one of these tokens.

    All tokens are compared, each in constant time, so that the time taken tells nothing.
    """
    if header is None or header[: len(_SCHEME)].lower() != _SCHEME.lower():
        return False
    given = header[len(_SCHEME) :].strip().encode("utf-8", "surrogateescape")
    matches = [hmac.compare_digest(given, token.encode()) for token in tokens]
    return any(matches)
