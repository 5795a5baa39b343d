"""A job that comes back from its snapshot at any moment decides what it would have decided."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.job.job import Job
from elastic_driver.settings import Settings
from tests.sim import cluster
from tests.sim.restoring import Restoring
from tests.sim.runner import run_seed

SEEDS = 240
PER_TEST = 40


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_restored_jobs_decide_the_same_under_all_faults(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Restoring] = []

    def beside_a_twin(settings: Settings) -> Any:
        jobs.append(Restoring(Job(settings), first + len(jobs)))
        return jobs[-1]

    monkeypatch.setattr(cluster, "Job", beside_a_twin)
    for seed in range(first, first + PER_TEST):
        run_seed(seed)
        jobs[-1].compare()
    assert sum(job.restored for job in jobs) > 5 * PER_TEST
