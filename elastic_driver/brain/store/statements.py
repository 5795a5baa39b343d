"""Statements about the figures of jobs, for SQLite and PostgreSQL alike."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from sqlalchemy import Connection, func, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from elastic_driver.brain.store.rows import (
    COARSER,
    JobKey,
    Summary,
    begin_of,
    coarser,
    expired_before,
)
from elastic_driver.brain.store.tables import figures, jobs, series

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
