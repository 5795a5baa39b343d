"""Lines about a rank that is slow now and then: the first ones, and then counts."""

from __future__ import annotations

import io

import pytest

from elastic_driver.job.decisions import Announce
from elastic_driver.runtime.reporter import FIRST_S, LONGEST_S, Level, Repeated, Reporter
from elastic_driver.words import worker_log_events as log

WHO = (1, "a", "a.1.1")


def test_the_first_time_is_told_with_its_end_and_later_ones_as_a_count() -> None:
    told = Repeated()
    assert told.take("rank_slow", WHO, 0.0) == ""
    assert told.take("rank_recovered", WHO, 1.0) == ""
    for at in range(2, int(FIRST_S), 2):
        assert told.take("rank_slow", WHO, at) is None
        assert told.take("rank_recovered", WHO, at + 1.0) is None
    assert told.take("rank_slow", WHO, FIRST_S) == (
        ", 30 more times in 60 s (elasticctl events has each)"
    )
    assert told.take("rank_recovered", WHO, FIRST_S + 1) is None
    assert told.take("rank_slow", WHO, 2 * FIRST_S) is None, "the next count comes after twice that"
    assert told.take("rank_slow", WHO, 3 * FIRST_S) == (
        ", 2 more times in 120 s (elasticctl events has each)"
    )


def test_counts_come_at_least_once_an_hour() -> None:
    told, shown = Repeated(), 0
    for at in range(0, 24 * 3600, 60):
        shown += told.take("rank_slow", WHO, float(at)) is not None
    assert 24 * 3600 / LONGEST_S < shown < 40


def test_each_rank_and_each_condition_is_told_by_itself() -> None:
    told = Repeated()
    assert told.take("rank_slow", WHO, 0.0) == ""
    assert told.take("rank_slow", (0, "a", "a.0.1"), 0.0) == ""
    assert told.take("worker_stalled", WHO, 0.0) == ""
    assert told.take("worker_resumed", WHO, 0.0) == ""
    assert told.take("rank_slow", WHO, 0.0) is None
    assert told.take("worker_lost", WHO, 0.0) == told.take("worker_lost", WHO, 0.0) == ""


@pytest.mark.parametrize(
    ("level", "as_json", "lines"),
    [(Level.NORMAL, False, 2), (Level.VERBOSE, False, 20), (Level.NORMAL, True, 20)],
)
def test_verbose_output_and_json_have_each_line(level: Level, as_json: bool, lines: int) -> None:
    stream = io.StringIO()
    reporter = Reporter(stream, level=level, as_json=as_json)
    for _ in range(10):
        for what in (log.RankSlow(), log.RankRecovered()):
            reporter.announced(Announce(what, "why", rank=1, host="a", worker="a.1.1"), b"{}")
    assert len(stream.getvalue().splitlines()) == lines
