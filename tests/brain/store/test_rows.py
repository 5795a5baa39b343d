"""Values become rows, and rows become rows of longer periods."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.brain.store.records import (
    DAY,
    FINE,
    HOUR,
    MINUTE,
    Buckets,
    Row,
    Series,
    Summary,
    coarser,
    expired_before,
    summed_up,
)

SPEED = Series("job", "steps_per_s")
VALUES = st.lists(st.floats(-1e15, 1e15), min_size=1, max_size=30)


def test_values_of_five_seconds_are_one_row() -> None:
    buckets = Buckets()
    for t, value in ((10.0, 1.0), (11.0, 3.0), (14.9, 2.0), (15.0, 9.0)):
        buckets.add(t, SPEED, value)
    assert buckets.take() == [Row(SPEED, 10, Summary(3, 1.0, 2.0, 3.0))]
    assert buckets.take() == [], "the newest row may get more values"
    assert buckets.take(all_rows=True) == [Row(SPEED, 15, Summary(1, 9.0, 9.0, 9.0))]


def test_what_is_no_number_is_left_out() -> None:
    buckets = Buckets()
    for value in (math.nan, math.inf, -math.inf):
        buckets.add(10.0, SPEED, value)
    assert buckets.take(all_rows=True) == []


@given(VALUES, VALUES)
def test_parts_sum_up_to_the_whole(first: list[float], second: list[float]) -> None:
    def of(values: list[float]) -> Summary:
        return summed_up([Summary(1, value, value, value) for value in values])

    parts, whole = summed_up([of(first), of(second)]), of(first + second)
    assert (parts.n, parts.least, parts.most) == (whole.n, whole.least, whole.most)
    assert math.isclose(parts.mean, whole.mean, rel_tol=1e-9, abs_tol=10.0)
    assert parts.least <= parts.mean <= parts.most


def test_rows_of_a_minute_are_made_by_series() -> None:
    fine = [
        (1, 55, Summary(1, 1, 1, 1)),
        (1, 60, Summary(1, 2, 2, 2)),
        (1, 65, Summary(3, 4, 6, 8)),
    ]
    fine.append((2, 60, Summary(2, 7, 7, 7)))
    assert list(coarser(fine, MINUTE)) == [
        (1, 0, Summary(1, 1, 1, 1)),
        (1, 60, Summary(4, 2, 5, 8)),
        (2, 60, Summary(2, 7, 7, 7)),
    ]


def test_a_row_is_kept_until_all_of_the_longer_period_is_old() -> None:
    now = 100 * DAY + 90.0
    assert expired_before(now, FINE) == 99 * DAY + MINUTE
    assert expired_before(now, MINUTE) == 70 * DAY
    assert expired_before(400 * DAY + 1.0, HOUR) == 35 * DAY
