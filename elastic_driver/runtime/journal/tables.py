"""The tables of a journal's database; each row ends with a checksum of its other values.

SQLite notices a damaged structure, but not a flipped bit inside a value. So a row is checked before
it is used.

A file may have been made by somebody else: a view or a trigger in it would run what it says when a
table is read or written. So a file is used only if it has our tables, as we make them, and nothing
else.
"""

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote
from zlib import crc32

import msgspec

FORMAT = 3
UPGRADED = 2  # the format that has no checksums; a driver that goes on with it adds them
_COLUMNS = {
    "about": "run_id TEXT, argv TEXT, cwd TEXT",
    "terms": "term INTEGER PRIMARY KEY, n INTEGER, at REAL, unix REAL, unix_offset REAL, "
    "host TEXT, pid INTEGER, url TEXT",
    "events": "n INTEGER PRIMARY KEY, at REAL, machine TEXT, event BLOB",
    "snapshots": "n INTEGER, at REAL, machine TEXT, state BLOB",
    "keys": "key TEXT PRIMARY KEY, value BLOB",
}
_INDEX = "CREATE UNIQUE INDEX states ON snapshots (n, machine)"
_LONGEST_NAME = 60  # of what a file holds, in a message
_encode = msgspec.msgpack.Encoder().encode


def checksum(*values: Any) -> int:
    """Return the CRC-32 of the values of a row, as msgpack."""
    return crc32(_encode(values))


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a database, as a file that somebody else may have made; it loads no extensions."""
    where = f"file:{quote(str(path))}{'?mode=ro' * read_only}"
    database = sqlite3.connect(where, uri=True, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA trusted_schema=OFF")
        configure = getattr(database, "setconfig", None)  # from Python 3.12 on
        if configure is not None:
            configure(getattr(sqlite3, "SQLITE_DBCONFIG_DEFENSIVE"), True)  # noqa: B009
    except BaseException:
        database.close()
        raise
    return database


def stranger(database: sqlite3.Connection) -> str:
    """Return what a database holds that no journal has, in words; "": nothing. May be empty."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    last = "" if version == UPGRADED else ", sum INTEGER"
    own = {("table", each): f"CREATE TABLE {each} ({_COLUMNS[each]}{last})" for each in _COLUMNS}
    own[("index", "states")] = _INDEX
    for kind, name, text in database.execute("SELECT type, name, sql FROM sqlite_master"):
        made_by_sqlite = kind == "index" and text is None
        if own.get((kind, name)) != text and not made_by_sqlite:
            known = f"{'an' if kind == 'index' else 'a'} {kind}"
            known = f"another {kind}" if (kind, name) in own else known
            return f"{known} {str(name)[:_LONGEST_NAME]!r}"
    return ""


def create(database: sqlite3.Connection) -> None:
    """Make the tables in an empty database."""
    for table, columns in _COLUMNS.items():
        database.execute(f"CREATE TABLE {table} ({columns}, sum INTEGER)")
    database.execute(_INDEX)
    database.execute(f"PRAGMA user_version={FORMAT}")


def put(
    database: sqlite3.Connection,
    table: str,
    rows: Iterable[tuple[Any, ...]],
    *,
    replace: bool = False,
) -> None:
    """Write rows, each with its checksum; `replace`: there may be rows with these keys."""
    verb = "REPLACE" if replace else "INSERT"
    marks = ", ".join("?" for _ in range(_COLUMNS[table].count(",") + 2))
    summed = ((*row, checksum(*row)) for row in rows)
    database.executemany(f"{verb} INTO {table} VALUES ({marks})", summed)


def upgrade(database: sqlite3.Connection) -> None:
    """Add the checksums to a database of format 2; part of the caller's transaction."""
    if database.execute("PRAGMA user_version").fetchone()[0] != UPGRADED:
        return
    database.create_function("checksum", -1, checksum, deterministic=True)
    for table, columns in _COLUMNS.items():
        names = ", ".join(column.split()[0] for column in columns.split(", "))
        database.execute(f"ALTER TABLE {table} ADD COLUMN sum INTEGER")
        database.execute(f"UPDATE {table} SET sum = checksum({names})")  # noqa: S608
    database.execute(f"PRAGMA user_version={FORMAT}")
