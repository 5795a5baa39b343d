"""Random programs of Horovod calls; `python -m tests.horovod.seeds` plays as many as you like."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.horovod.seeds.__main__ import play
from tests.horovod.seeds.plan import Fault, plan_of


def test_plans_are_the_same_each_time_and_have_every_fault() -> None:
    plans = [plan_of(seed, 3) for seed in range(300)]
    assert plans == [plan_of(seed, 3) for seed in range(300)]
    faults = Counter(each.fault for plan in plans for each in plan.planned)
    assert all(faults[fault] >= 50 for fault in Fault), faults
    assert sum(bool(plan.steps) for plan in plans) > 50
    assert sum(bool(each.late) for plan in plans for each in plan.planned) > 500


@pytest.mark.timeout(200)  # torch is imported by each rank
def test_results_are_right_or_errors_are_named() -> None:
    assert play(3, first=0, count=15) == ""
