"""The tables of a journal's database; each row ends with a checksum of its other values.

SQLite notices a damaged structure, but not a flipped bit inside a value. So a row is checked before
it is used.
"""

import sqlite3
from collections.abc import Iterable
from typing import Any
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
_encode = msgspec.msgpack.Encoder().encode


def checksum(*values: Any) -> int:
    """Return the CRC-32 of the values of a row, as msgpack."""
    return crc32(_encode(values))


def create(database: sqlite3.Connection) -> None:
    """Make the tables in an empty database."""
    for table, columns in _COLUMNS.items():
        database.execute(f"CREATE TABLE {table} ({columns}, sum INTEGER)")
    database.execute("CREATE UNIQUE INDEX states ON snapshots (n, machine)")
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
