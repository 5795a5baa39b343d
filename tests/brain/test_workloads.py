"""Workloads of several jobs, against equal shares (`tests.brain.workloads`; more at night)."""

from __future__ import annotations

from statistics import fmean

import pytest

from tests.brain.workloads import Work, equal_shares, measure


def test_jobs_are_done_much_sooner_than_with_static_equal_shares_and_none_starves() -> None:
    found = [measure(seed) for seed in range(5)]
    assert fmean(times.saved(times.static) for times in found) >= 0.2
    assert fmean(times.saved(times.present) for times in found) > 0
    assert max(times.slowest() for times in found) < 2


def test_equal_shares_are_divided_anew_when_a_job_comes_or_ends() -> None:
    def linear(size: int) -> float:
        return float(size)

    jobs = [Work("A", 0.0, linear, 80.0), Work("B", 4.0, linear, 40.0)]
    # A has 8 slots for 4 s; both have 4 for 10 s; A has 8 again for 1 s.
    assert equal_shares(jobs, 8) == pytest.approx({"A": 15.0, "B": 10.0})
