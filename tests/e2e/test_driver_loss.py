"""Workers across the death of their driver: with a next one, and with none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_checkpoints import complete, environment
from tests.e2e.test_exact import EXACT, alone, result_of
from tests.support.job import JOBS, RunningJob, elasticrun

DURABLE = str(JOBS / "durable.py")
TWO_HOSTS = ("-H", "localhost:1,127.0.0.2:1", "-np", "2", "--min-np", "1")


def newest_steps(job: RunningJob) -> set[int]:
    """The last step of every worker."""
    newest = {record.pid: record.step for record in job.steps()}
    return set(newest.values())


def test_when_no_driver_comes_all_leave_after_a_common_step_with_a_checkpoint(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    args = (*TWO_HOSTS, "--driver-timeout", "3", "--grace-period", "20", "--", DURABLE)
    with elasticrun(*args, env=environment(folder, 10**6, EVERY=str(10**6))) as job:
        job.until_size(2)
        job.kill_driver()
        step = max(newest_steps(job))
        job.until_without_driver(lambda: min(newest_steps(job)) > step + 20, "they train on")
        job.assert_nothing_left(within=40.0)
        (last,) = newest_steps(job)
        assert complete(folder) == [last]


@pytest.mark.slow
def test_a_driver_and_a_worker_killed_together_change_no_bit() -> None:
    args = ("-np", "3", "--min-np", "1", "--driver-timeout", "120", "--", EXACT)
    with elasticrun(*args, env={"MODE": "fixed"}) as job:
        members = job.until_size(3, steps=4)
        job.kill(max(members, key=lambda pid: members[pid].rank))
        job.kill_driver()
        job.start("--resume")
        job.until(lambda: job.events("driver_resumed"), "the next driver")
        members = job.until_size(3, steps=4)
        job.kill_driver()
        job.kill(min(members, key=lambda pid: members[pid].rank))
        job.start("--resume")
        job.until(lambda: len(job.events("driver_resumed")) == 2, "the driver after it")
        assert job.wait(120) == 0, job.describe()
        assert result_of(job.stdout) == alone("fixed")
        job.assert_nothing_left()
