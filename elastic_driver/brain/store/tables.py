"""The tables of the newest schema; `migrations` makes them."""

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
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
