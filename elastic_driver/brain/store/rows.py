"""Rows of statistics, and how rows of one period become a row of a longer one. Pure.

A row sums up the values of one series in the period that begins at `t` (unix seconds) and lasts
`period` seconds. Rows of 5 seconds become rows of a minute, and these rows of an hour.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

FINE, MINUTE, HOUR = 5, 60, 3600  # the periods
DAY = 24 * HOUR
COARSER = ((FINE, MINUTE), (MINUTE, HOUR))  # what becomes what
KEPT = {FINE: DAY, MINUTE: 30 * DAY, HOUR: 365 * DAY}  # for how long


class JobKey(NamedTuple):
    """One job: the name of its run, and when that began (unix seconds)."""

    run: str
    began: float


class Series(NamedTuple):
    """One figure over time: `subject` is "job", "script", "host:NAME" or "worker:NAME"."""

    subject: str
    name: str


class Summary(NamedTuple):
    """The values of one period."""

    n: int  # how many
    least: float
    mean: float
    most: float


class Row(NamedTuple):
    """The values of a series in the period that begins at `t`."""

    series: Series
    t: int
    values: Summary


def begin_of(t: float, period: int) -> int:
    """Return the beginning of the period that `t` is in."""
    return math.floor(t / period) * period


def expired_before(now: float, period: int) -> int:
    """Return the time before which rows of this period are too old.

    It is the beginning of a longer period: such a row never loses a part of what it is made of.
    """
    longer = next((coarse for fine, coarse in COARSER if fine == period), period)
    return begin_of(now - KEPT[period], longer)


def summed_up(parts: Iterable[Summary]) -> Summary:
    """Return one summary for several; there is at least one."""
    all_parts = list(parts)
    n = sum(part.n for part in all_parts)
    least, most = min(part.least for part in all_parts), max(part.most for part in all_parts)
    mean = math.fsum(part.mean * (part.n / n) for part in all_parts)
    return Summary(n, least, min(max(mean, least), most), most)


def coarser(
    rows: Iterable[tuple[int, int, Summary]], period: int
) -> Iterator[tuple[int, int, Summary]]:
    """Yield the rows of a longer period; each is the key of a series, `t` and the values.

    `rows` are in the order of series and time.
    """
    for (series, t), group in groupby(rows, lambda row: (row[0], begin_of(row[1], period))):
        yield series, t, summed_up(row[2] for row in group)


class Buckets:
    """Values that come one by one, gathered into rows of `FINE` seconds."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, Series], list[float]] = {}
        self.newest = 0  # the beginning of the newest row; older ones are complete

    def add(self, t: float, series: Series, value: float) -> None:
        """Take in a value; what is no finite number is left out."""
        if math.isfinite(value):
            begin = begin_of(t, FINE)
            self.newest = max(self.newest, begin)
            self._open.setdefault((begin, series), []).append(float(value))

    def take(self, *, all_rows: bool = False) -> list[Row]:
        """Remove and return the rows that are complete, or all of them, oldest first."""
        ready = [key for key in self._open if all_rows or key[0] < self.newest]
        return [Row(key[1], key[0], _summary(self._open.pop(key))) for key in sorted(ready)]


def _summary(values: list[float]) -> Summary:
    return summed_up([Summary(1, value, value, value) for value in values])
