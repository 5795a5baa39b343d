"""The tables of the newest schema, and the numbered steps that make and renew them.

A database has the number of the last step that was carried out in its table `schema_version`. A
step is never changed once it is released; a new schema is a new step.
"""

from collections.abc import Callable, Sequence

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    delete,
    insert,
    inspect,
    select,
    text,
)

metadata = MetaData()

version = Table("schema_version", metadata, Column("number", Integer, nullable=False))

jobs = Table(
    "jobs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run", Text, nullable=False),
    Column("began", Double, nullable=False),  # unix seconds; a name may be used again
    UniqueConstraint("run", "began"),
)

series = Table(
    "series",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("job", Integer, ForeignKey("jobs.id"), nullable=False),
    Column("subject", Text, nullable=False),
    Column("name", Text, nullable=False),
    UniqueConstraint("job", "subject", "name"),
)

figures = Table(
    "figures",
    metadata,
    Column("series", Integer, ForeignKey("series.id"), primary_key=True),
    Column("period", Integer, primary_key=True),  # seconds: 5, 60 or 3600
    Column("t", BigInteger, primary_key=True),  # the beginning of the period, unix seconds
    Column("n", BigInteger, nullable=False),  # of values
    Column("least", Double, nullable=False),
    Column("mean", Double, nullable=False),
    Column("most", Double, nullable=False),
    Index("figures_age", "period", "t"),
)

# ---- since schema 2 ------------------------------------------------------------------------

records = Table(  # what is known of a whole job; see `records.Record`
    "records",
    metadata,
    Column("job", Integer, ForeignKey("jobs.id"), primary_key=True),
    Column("name", Text, nullable=False),
    Column("command", Text, nullable=False),  # a digest
    Column("parameters", BigInteger),
    Column("batch", BigInteger),
    Column("micro_batches", BigInteger),
    Column("least", Integer, nullable=False),
    Column("most", Integer),
    Column("memory", BigInteger),
    Column("ended", Double),
    Column("exit_code", Integer),
    Index("records_name", "name"),
    Index("records_command", "command"),
)

speeds = Table(
    "speeds",
    metadata,
    Column("job", Integer, ForeignKey("jobs.id"), primary_key=True),
    Column("size", Integer, primary_key=True),
    Column("hosts", Integer, primary_key=True),
    Column("step_time", Double, nullable=False),  # seconds
    Column("error", Double, nullable=False),  # as a share of it
)

nodes = Table(  # the newest figures of machines; see `records.Node`
    "nodes",
    metadata,
    Column("name", Text, primary_key=True),
    Column("seen", Double, nullable=False),
    Column("slots", Integer),
    Column("idle", Integer),
    Column("cpu", Double),
    Column("memory_free", BigInteger),
    Column("memory_total", BigInteger),
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
