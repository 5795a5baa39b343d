"""The failures of a statistics database, and what they mean."""

import errno
import re
import sqlite3
from pathlib import Path

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from elastic_driver.brain.store.migrations import NewerSchemaError
from elastic_driver.masking import without_password

_CORRUPT = (11, 26)  # SQLITE_CORRUPT and SQLITE_NOTADB; Python names them since 3.11
# What is said of a mistake that no waiting mends: by a server, by its client, by a resolver.
_MISTAKES = re.compile(
    "authentication failed|no password supplied|does not exist|no pg_hba.conf entry"
    "|permission denied|unable to open database file"
    r"|invalid connection option|invalid \w+ value"
    "|Name or service not known|No address associated|nodename nor servname"
)
# What libpq says of a server that has not proved itself, and what to do.
_TRUST = "give ?sslrootcert=FILE of its CA, or a Unix socket (?host=/var/run/postgresql)"
_UNPROVED = {
    "does not support SSL": f"it speaks no TLS; {_TRUST}; ?sslmode=disable trusts the network",
    "root certificate file": f"its certificate cannot be checked; {_TRUST}",
    "certificate verify failed": f"another CA has signed its certificate; {_TRUST}",
    "does not match host name": "its certificate is another host's; name the host as it does",
    "authentication method requirement|channel binding": "it does not prove that it knows the "
    "password (scram-sha-256); have the server ask that way, or write ?require_auth=METHOD",
}
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def is_final(error: BaseException) -> bool:
    """Return whether no later try can succeed."""
    return isinstance(error, NewerSchemaError)


def is_mistake(error: BaseException) -> bool:
    """Return whether the user has to mend something: the address, a password or a right."""
    too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    known = isinstance(error, _NO_FILE) or too_long or is_final(error)
    text = described(error)
    return known or _MISTAKES.search(text) is not None or text in _UNPROVED.values()


def is_bad_row(error: BaseException) -> bool:
    """Return whether the database refuses what was written, and would always do so."""
    return isinstance(error, DataError | IntegrityError)


def is_corrupt(error: BaseException) -> bool:
    """Return whether a file is no whole database of SQLite."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)  # since Python 3.11
    if code is not None:
        return code & 0xFF in _CORRUPT
    words = ("malformed", "not a database")
    return isinstance(cause, sqlite3.DatabaseError) and any(each in str(cause) for each in words)


def described(error: BaseException) -> str:
    """Return an error in a line, without statements and passwords."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    text = (getattr(cause, "strerror", None) or str(cause)).strip() or type(cause).__name__
    for words, meaning in _UNPROVED.items():
        if isinstance(error, DBAPIError) and re.search(words, text):
            return meaning
    # Of several addresses the last one; a hint stands behind a tab.
    lines = [line for line in text.splitlines() if not line.startswith("\t")]
    return without_password((lines or [text])[-1].strip())


def set_aside(file: str) -> str:
    """Rename a file that is corrupt, so that a new database can begin; return its new name."""
    new = f"{file}.corrupt"
    for end in ("-wal", "-shm"):
        Path(file + end).unlink(missing_ok=True)
    Path(file).replace(new)
    return new
