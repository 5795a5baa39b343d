"""Shares of a step by measured speed."""

from __future__ import annotations

from pathlib import Path

from elastic_driver.worker.pace import KEPT, Pace, balanced_shares
from tests.support.gloo import run_ranks


def test_the_pace_is_the_median_of_the_last_micro_batches() -> None:
    pace = Pace()
    assert pace.speed() == 0
    for _ in range(KEPT):
        pace.note(9.0, 1)
    for seconds in (2.0, *[1.0] * KEPT, 50.0):
        pace.note(seconds, 4)
    assert pace.speed() == 4.0


def test_alone_a_worker_trains_everything() -> None:
    assert balanced_shares(8, 1, Pace()) == [8]


def shares(rank: int, size: int) -> list[list[int]]:
    pace = Pace()
    unknown = balanced_shares(8, size, pace)
    if rank < 2:
        pace.note(1.0 if rank == 0 else 3.0, 1)  # the last one is a newcomer
    return [unknown, balanced_shares(8, size, pace)]


def test_every_rank_finds_the_same_shares_and_the_slow_one_has_fewer(tmp_path: Path) -> None:
    found = run_ranks(3, shares, tmp_path)
    assert found[0] == found[1] == found[2]
    unknown, known = found[0]
    assert unknown == [3, 3, 2]
    assert known[0] > known[2] > known[1] >= 1
    assert sum(known) == 8
