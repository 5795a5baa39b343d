"""The job's token: made once, kept in a file only its owner may read, sent with every request.

The launcher makes it, agents and workers are told the file's path, clients send it as
`Authorization: Bearer <token>`. The token itself is never put into an argument list, an
environment or a log.
"""

from __future__ import annotations

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
    """A new random token of 256 bits, fit for a header."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def write_token_file(path: str | os.PathLike[str], token: str) -> Path:
    """Write the token to `path`, mode 0600, whole or not at all; return the path.

    Raises TokenError where the file cannot be written.
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
    """The token in `path`.

    Raises TokenError where the file is missing or empty, belongs to somebody else, or may be
    read or written by group or others: a token others know protects nothing.
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
    """The value of the Authorization header for this token."""
    return _SCHEME + token


def is_authorized(header: str | None, token: str) -> bool:
    """Whether an Authorization header carries this token, in time that tells nothing of it."""
    if header is None or header[: len(_SCHEME)].lower() != _SCHEME.lower():
        return False
    given = header[len(_SCHEME) :].strip()
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())


def is_authorized_by_any(header: str | None, tokens: Iterable[str]) -> bool:
    """Whether the header carries one of these tokens; all are compared, for an even time."""
    matches = [is_authorized(header, token) for token in tokens]
    return any(matches)
