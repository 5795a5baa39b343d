"""The driver is killed, and another one goes on with the job while its workers train."""

from __future__ import annotations

from tests.e2e.test_control import ctl
from tests.support.job import JOBS, RunningJob, assert_no_step_lost_or_repeated, elasticrun

TRAIN = str(JOBS / "train.py")


def where(job: RunningJob) -> tuple[str, ...]:
    return "--state-dir", str(job.run_dir.parent), "--run-id", job.run_id


def steps_beyond(job: RunningJob, step: int) -> bool:
    """Whether every live worker has finished this step."""
    return all(record.step > step for record in job.live().values())


def newest_step(job: RunningJob) -> int:
    return max(record.step for record in job.steps())


def test_workers_train_on_without_a_driver_and_the_next_one_scales_and_ends_the_job() -> None:
    args = ("-H", "localhost:2", "-np", "2", "--min-np", "1", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "1500"}) as job:
        pids = set(job.until_size(2))
        job.kill_driver()
        step = newest_step(job)
        job.until_without_driver(lambda: steps_beyond(job, step + 20), "steps without a driver")
        assert "elasticrun --resume" in ctl("status", *where(job), code=75)
        job.start("--resume")
        job.until(lambda: job.events("driver_resumed"), "the next driver")
        step = newest_step(job)
        job.until(lambda: steps_beyond(job, step + 20), "steps with the next driver")
        assert set(job.live()) == pids
        ctl("scale", "1", *where(job))
        job.until_size(1)
        ctl("scale", "2", *where(job))
        assert len(pids & set(job.until_size(2))) == 1
        assert job.wait(120) == 0, job.describe()
        assert_no_step_lost_or_repeated(job, 1500)
        numbers = [event["n"] for event in job.events()]
        assert numbers == list(range(1, len(numbers) + 1))
        job.assert_nothing_left()
