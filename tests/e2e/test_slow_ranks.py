"""A rank that is slowed for real is named while the job trains, and nobody is without a reason."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics

import pytest

from elastic_driver.worker.measuring.samples import block
from tests.support.job import JOBS, RunningJob, elasticrun
from tests.support.slowing import slowed

PACED = str(JOBS / "paced.py")
SHARE = 0.08  # of a processor: several times slower, also beside busy neighbours
REPORTED_STEPS = 30


def step_time(job: RunningJob, rank: int) -> float:
    """The median time of this rank's steps so far, in seconds."""
    times = [r.t for r in job.steps() if r.rank == rank]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def before_other_programs(job: RunningJob) -> None:
    """Let the job run first, where we may: a rank that they hold up for seconds *is* slow.

    Of the steps only their own jitter is to be judged, and tests run side by side.
    """
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, job.process.pid, -15)  # its processes inherit it


@pytest.mark.slow
def test_a_slowed_rank_is_named_with_its_host_and_is_free_of_it_when_it_has_recovered() -> None:
    hosts = "localhost:1,127.0.0.2:1,127.0.0.3:1"
    with elasticrun("-H", hosts, "-np", "3", "--", PACED) as job:
        before_other_programs(job)
        workers = job.until_size(3, steps=60, within=90.0)
        (victim,) = (r for r in workers.values() if r.rank == 1)
        every = block(step_time(job, 1))
        with slowed(victim.pid, SHARE) as how:
            begun = max(r.step for r in job.steps())
            event = job.until(
                lambda: next((e for e in job.events("rank_slow") if e["rank"] == 1), None),
                "the slowed rank is named",
                within=120.0,
            )
        took = event["step"] - begun
        print(f"{how}: named after {took} steps, {every} told together before: {event}")
        assert (event["host"], event["worker"]) == ("127.0.0.2", victim.worker)
        assert event["kind"] == "compute"
        assert took <= REPORTED_STEPS * every
        assert {e["rank"] for e in job.events("rank_slow")} == {1}, job.describe()
        job.until(lambda: job.events("rank_recovered"), "it has recovered", within=120.0)
        assert "rank 1 on 127.0.0.2 holds the others up" in job.stderr


@pytest.mark.slow
def test_hundreds_of_jittered_steps_name_nobody() -> None:
    env = {"STEPS": "400", "WORK_MS": "10", "JITTER": "0.25"}
    with elasticrun("-np", "3", "--", PACED, env=env) as job:
        before_other_programs(job)
        assert job.wait(120.0) == 0, job.describe()
        assert max(r.step for r in job.steps()) == 400
        assert job.events("rank_slow") == [], job.describe()
