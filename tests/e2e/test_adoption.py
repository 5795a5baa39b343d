"""Something is lost while no driver lives; the next driver finds out, and repairs it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.e2e.test_leaving import agent_of
from tests.support.job import (
    JOBS,
    RunningJob,
    StepRecord,
    assert_no_step_lost_or_repeated,
    elasticrun,
)

TRAIN = str(JOBS / "train.py")
TWO_HOSTS = ("-H", "localhost:1,127.0.0.2:1", "-np", "2", "--min-np", "1", "--", TRAIN)
SLOW_START_S = 120.0  # a machine that is busy imports torch slowly
pytestmark = pytest.mark.timeout(400)
Kill = Callable[[RunningJob, StepRecord], None]


def kill_worker(_job: RunningJob, other: StepRecord) -> None:
    os.kill(other.pid, 9)


def kill_agent(job: RunningJob, _other: StepRecord) -> None:
    os.kill(agent_of(job, "127.0.0.2"), 9)


@pytest.mark.parametrize(
    ("kill", "noticed"),
    [
        (kill_worker, ("worker_exited", "killed by signal 9")),
        (kill_agent, ("agent_lost", "its host says")),
    ],
)
def test_what_dies_while_no_driver_lives_is_replaced_by_the_next_driver(
    kill: Kill, noticed: tuple[str, str]
) -> None:
    with elasticrun(*TWO_HOSTS, env={"STEPS": "100000"}) as job:
        before = job.until_size(2, within=SLOW_START_S)
        other = next(r for r in before.values() if r.worker.startswith("127.0.0.2."))
        job.kill_driver()
        kill(job, other)
        job.start("--resume")
        event, reason = noticed
        job.until(lambda: job.events(event), f"the next driver says {event}", SLOW_START_S)
        assert reason in job.events(event)[0]["reason"]
        after = job.until_size(2, within=SLOW_START_S)
        assert before.keys() & after.keys() == before.keys() - {other.pid}
        assert_no_step_lost_or_repeated(job, min(record.step for record in after.values()))


@pytest.mark.parametrize("seen", ["job_started", "agent_started", "worker_started"])
def test_a_driver_that_dies_while_the_job_starts_costs_no_more_than_time(seen: str) -> None:
    with elasticrun(*TWO_HOSTS, env={"STEPS": "50"}) as job:
        job.until(lambda: job.events(seen), f"the first {seen}", SLOW_START_S)
        job.kill_driver()
        job.start("--resume")
        assert job.wait(SLOW_START_S) == 0, job.describe()
        assert_no_step_lost_or_repeated(job, 50)
        job.assert_nothing_left()
