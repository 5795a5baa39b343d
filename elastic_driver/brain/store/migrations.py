"""The schema of a statistics database, made and renewed by numbered steps.

A database has the number of the last step that was carried out in its table `schema_version`. A
step is never changed once it is released; a new schema is a new step.
"""

from collections.abc import Callable, Sequence

from sqlalchemy import Connection, delete, insert, inspect, select, text

from elastic_driver.brain.store.tables import (
    figures,
    jobs,
    metadata,
    nodes,
    records,
    series,
    speeds,
    version,
)

_LOCK = 7_215_019  # PostgreSQL's number of the lock that a migration takes


class NewerSchemaError(Exception):
    """The database was made by a newer version of this program."""


def _first(connection: Connection) -> None:
    metadata.create_all(connection, tables=[jobs, series, figures])


def _second(connection: Connection) -> None:
    metadata.create_all(connection, tables=[records, speeds, nodes])


Step = Callable[[Connection], None]
STEPS: tuple[Step, ...] = (_first, _second)


def migrate(connection: Connection, steps: Sequence[Step] = STEPS) -> None:
    """Bring a database to the newest schema, within the open transaction.

    Raises NewerSchemaError, and changes nothing, if the database is newer than that.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    number = _number(connection)
    if number > len(steps):
        raise NewerSchemaError(
            f"has schema {number}, and this version knows schemas up to {len(steps)}"
        )
    if number < len(steps):
        for step in steps[number:]:
            step(connection)
        version.create(connection, checkfirst=True)
        connection.execute(delete(version))
        connection.execute(insert(version), {"number": len(steps)})


def _number(connection: Connection) -> int:
    if not inspect(connection).has_table(version.name):
        return 0
    number: int | None = connection.scalar(select(version.c.number))
    return number or 0
