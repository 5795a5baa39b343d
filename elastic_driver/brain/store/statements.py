"""Tables and statements of a statistics database, for SQLite and PostgreSQL alike.

The tables are those of the newest schema, which numbered steps make and renew. A database has the
number of the last step that was carried out in its table `schema_version`. A step is never changed
once it is released; a new schema is a new step.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Row,
    Table,
    Text,
    UniqueConstraint,
    and_,
    delete,
    func,
    insert,
    inspect,
    or_,
    select,
    text,
    true,
)
from sqlalchemy.dialects import postgresql, sqlite

from elastic_driver.brain.algorithm import SpeedAt
from elastic_driver.brain.grants import Kind
from elastic_driver.brain.store.records import (
    COARSER,
    DAY,
    FRESH_S,
    JobKey,
    Node,
    Record,
    Summary,
    begin_of,
    coarser,
    expired_before,
    in_order,
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


# ---- migration -----------------------------------------------------------------------------

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


# ---- figures -------------------------------------------------------------------------------

Keyed: TypeAlias = tuple[int, int, Summary]  # the number of a series, t, values


def insert_new(connection: Connection, table: Any, values: list[dict[str, Any]]) -> None:
    """Insert rows; one whose key is there already changes nothing."""
    connection.execute(_insert(connection, table).on_conflict_do_nothing(), values)


def replace(connection: Connection, table: Any, values: list[dict[str, Any]]) -> None:
    """Insert rows; one whose key is there already is replaced."""
    if values:
        insert = _insert(connection, table)
        key = [column.name for column in table.primary_key]
        new = {each.name: insert.excluded[each.name] for each in table.columns}
        new = {name: value for name, value in new.items() if name not in key}
        connection.execute(insert.on_conflict_do_update(index_elements=key, set_=new), values)


def _insert(connection: Connection, table: Any) -> Any:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    return dialect.insert(table)


def put(connection: Connection, period: int, rows: Iterable[Keyed]) -> None:
    """Write rows of a period."""
    values = [
        {"series": number, "period": period, "t": t, **summary._asdict()}
        for number, t, summary in rows
    ]
    replace(connection, figures, values)


def job_number(connection: Connection, job: JobKey) -> int | None:
    """Return the number of a job; None if it is not there."""
    query = select(jobs.c.id).where(jobs.c.run == job.run, jobs.c.began == job.began)
    number: int | None = connection.scalar(query)
    return number


def jobs_with_old_rows(now: float) -> Any:
    """Return a query for the numbers of the jobs that have rows to delete."""
    old = or_(
        *(
            (figures.c.period == period) & (figures.c.t < expired_before(now, period))
            for period, _coarse in COARSER
        )
    )
    return select(series.c.job).join_from(series, figures).where(old).distinct()


def roll_up(connection: Connection, job: int, until: float | None) -> None:
    """Make a job's rows of longer periods, from the newest one on that there is.

    None: also those of periods that are not over.
    """
    ours = figures.c.series.in_(select(series.c.id).where(series.c.job == job))
    for fine, coarse in COARSER:
        newest = select(func.max(figures.c.t)).where(ours, figures.c.period == coarse)
        begin = connection.scalar(newest) or 0
        query = select(figures).where(ours, figures.c.period == fine, figures.c.t >= begin)
        if until is not None:
            query = query.where(figures.c.t < begin_of(until, coarse))
        found = connection.execute(query.order_by(figures.c.series, figures.c.t))
        rows = ((number, t, Summary(*values)) for number, _period, t, *values in found)
        put(connection, coarse, list(coarser(rows, coarse)))


# ---- whole jobs and nodes ------------------------------------------------------------------

_KIND = ("name", "command", "parameters", "batch")
_OF_SPEED = ("size", "hosts", "step_time", "error")
_OF_RECORD = (*_KIND, "least", "most", "micro_batches", "memory", "ended", "exit_code")


def remember(connection: Connection, job: JobKey, record: Record) -> None:
    """Write what is known of a job; what an earlier driver of it knew stays known."""
    insert_new(connection, jobs, [job._asdict()])
    number = job_number(connection, job)
    values = _values(record)
    before = connection.execute(select(records).where(records.c.job == number)).first()
    if before is not None:
        known = {name: getattr(before, name) for name in _OF_RECORD}
        values = {name: known[name] if new is None else new for name, new in values.items()}
        values["memory"] = max((m for m in (known["memory"], record.memory) if m), default=None)
    replace(connection, records, [{"job": number, **values}])
    measured = [
        {"job": number, **{name: getattr(each, name) for name in _OF_SPEED}}
        for each in record.speeds
    ]
    replace(connection, speeds, measured)


def similar(connection: Connection, kind: Kind, most: int) -> list[Record]:
    """Return the newest finished jobs like this one that were measured, the newest first.

    A job of the same command is like this one if its model has as many parameters, and its batch as
    many samples. Jobs whose batches are both not known have batches of each worker's own.
    """
    like = records.c.name == kind.name
    if kind.parameters is not None:
        # "IS NOT DISTINCT FROM", as both databases understand it: two unknown batches are alike.
        batch = records.c.batch.is_not_distinct_from(kind.batch)
        same = and_(records.c.command == kind.command, records.c.parameters == kind.parameters)
        like = or_(like, and_(same, batch))
    measured = select(speeds.c.job).where(speeds.c.job == records.c.job).exists()
    query = select(records).where(like, records.c.ended.is_not(None), measured)
    query = query.order_by(records.c.ended.desc(), records.c.job.desc()).limit(most)
    found = connection.execute(query).all()
    measured_at = _speeds(connection, [each.job for each in found])
    return [_record(each, measured_at.get(each.job, [])) for each in found]


def all_records(connection: Connection) -> list[tuple[JobKey, Record]]:
    """Return all jobs that have a record, in the order of their beginnings."""
    query = select(records, jobs.c.run, jobs.c.began).join_from(records, jobs)
    found = connection.execute(query).all()
    measured = _speeds(connection, None)
    keyed = [
        (JobKey(each.run, each.began), _record(each, measured.get(each.job, []))) for each in found
    ]
    # Databases order text in ways of their own.
    return sorted(keyed, key=lambda pair: (pair[0].began, pair[0].run))


def put_nodes(connection: Connection, found: Sequence[Node]) -> None:
    """Write the newest figures of machines; forget those that were not seen for a day."""
    replace(connection, nodes, [node._asdict() for node in found])
    if found:
        newest = max(node.seen for node in found)
        connection.execute(delete(nodes).where(nodes.c.seen < newest - DAY))


def fresh_nodes(connection: Connection, now: float) -> list[Node]:
    """Return the machines whose figures are fresh now, by their names."""
    fresh = nodes.c.seen.between(now - FRESH_S, now + FRESH_S)  # clocks differ
    return _nodes(connection, fresh)


def known_nodes(connection: Connection) -> list[Node]:
    """Return all machines, by their names."""
    return _nodes(connection, true())


def _nodes(connection: Connection, which: ColumnElement[bool]) -> list[Node]:
    query = select(*(nodes.c[name] for name in Node._fields)).where(which)
    found = [Node(*each) for each in connection.execute(query)]
    return sorted(found, key=lambda node: node.name)


def _values(record: Record) -> dict[str, Any]:
    kind = {name: getattr(record.kind, name) for name in _KIND}
    rest = {name: getattr(record, name) for name in _OF_RECORD if name not in _KIND}
    return {**kind, **rest}


def _record(row: Row[Any], measured: Iterable[SpeedAt]) -> Record:
    kind = Kind(**{name: getattr(row, name) for name in _KIND})
    rest = {name: getattr(row, name) for name in _OF_RECORD if name not in _KIND}
    return Record(kind=kind, speeds=in_order(measured), **rest)


def _speeds(connection: Connection, of: Sequence[int] | None) -> dict[int, list[SpeedAt]]:
    """Return the measured speeds of jobs by their numbers; None: of all jobs."""
    query = select(speeds) if of is None else select(speeds).where(speeds.c.job.in_(of))
    found: dict[int, list[SpeedAt]] = {}
    for job, size, hosts, step_time, error in connection.execute(query):
        measured = SpeedAt(size=size, hosts=hosts, step_time=step_time, error=error)
        found.setdefault(job, []).append(measured)
    return found
