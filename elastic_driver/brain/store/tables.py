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
