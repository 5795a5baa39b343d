"""Shards and checkpoints: whatever is lost, the model that is there has every record once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.job import JOBS, RunningJob, elasticrun
from tests.support.processes import kill_all as kill_until_gone

JOB = str(JOBS / "shards_durable.py")


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {"CHECKPOINTS": str(folder), **more}


def complete(folder: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    return sorted(int(p.parent.name.split("-")[1]) for p in folder.glob("step-*/manifest.json"))


def entered(job: RunningJob) -> list[int]:
    return [int(step) for step in re.findall(r"enters step=(\d+)", job.stdout)]


def assert_every_record_is_in_the_model_once(job: RunningJob) -> None:
    assert job.wait(120) == 0, job.describe()
    line = next(line for line in job.stdout.splitlines() if "result {" in line)
    result = json.loads(line[line.index("{") :])
    assert result["never"] == 0, result
    assert result["extra"] == result["replayed"], result
    assert result["done"] == [1200, 320], "the driver counts the same"


def train_beyond(job: RunningJob, folder: Path, checkpoint: int) -> None:
    """Wait until steps were trained that the checkpoint of this step does not have."""
    job.until(lambda: max(complete(folder), default=0) >= checkpoint, "a checkpoint is complete")
    newest = max(complete(folder))
    job.until(lambda: job.steps()[-1].step >= newest + 9, "training goes on")


def kill_workers(job: RunningJob) -> None:
    for pid in job.live():
        job.kill(pid)


@pytest.mark.parametrize(
    "checkpoint",
    [20, pytest.param(100, marks=pytest.mark.night), pytest.param(160, marks=pytest.mark.slow)],
)
def test_all_workers_are_lost_and_the_checkpoint_has_its_shards(
    tmp_path: Path, checkpoint: int
) -> None:
    with elasticrun("-np", "2", "--", JOB, env=environment(tmp_path, STEP_MS="30")) as job:
        train_beyond(job, tmp_path, checkpoint)
        kill_workers(job)
        assert_every_record_is_in_the_model_once(job)
        assert entered(job)[2:] == [entered(job)[2]] * 2
        assert entered(job)[2] >= checkpoint


@pytest.mark.slow
def test_all_workers_are_lost_before_the_first_checkpoint(tmp_path: Path) -> None:
    options = ("-np", "3", "--restart-from-scratch")
    with elasticrun(*options, "--", JOB, env=environment(tmp_path, STEP_MS="100")) as job:
        job.until_size(3, steps=12)
        kill_workers(job)
        assert complete(tmp_path) == []
        assert_every_record_is_in_the_model_once(job)
        assert entered(job) == [0] * 6


@pytest.mark.slow
def test_the_driver_and_all_workers_are_lost_and_the_job_is_resumed(tmp_path: Path) -> None:
    with elasticrun("-np", "2", "--", JOB, env=environment(tmp_path, STEP_MS="30")) as job:
        train_beyond(job, tmp_path, 60)
        job.kill_driver()
        kill_until_gone(job.processes)
        job.start("--resume")
        assert_every_record_is_in_the_model_once(job)
        assert entered(job)[2] >= 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "checkpoint"),
    [
        ("1", 60),
        ("3", 180),
        pytest.param("1", 180, marks=pytest.mark.night),
        pytest.param("3", 60, marks=pytest.mark.night),
    ],
)
def test_a_new_job_of_another_size_goes_on_from_the_folder(
    tmp_path: Path, size: str, checkpoint: int
) -> None:
    with elasticrun("-np", "2", "--", JOB, env=environment(tmp_path, STEP_MS="30")) as lost:
        train_beyond(lost, tmp_path, checkpoint)
    with elasticrun("-np", size, "--", JOB, env=environment(tmp_path)) as job:
        assert_every_record_is_in_the_model_once(job)
        assert entered(job)[0] >= checkpoint


@pytest.mark.slow
def test_the_last_checkpoint_of_workers_without_a_driver_has_their_shards(tmp_path: Path) -> None:
    env = environment(tmp_path, STEP_MS="30")
    args = ("-np", "2", "--driver-timeout", "3", "--grace-period", "20", "--", JOB)
    with elasticrun(*args, env=env) as job:
        train_beyond(job, tmp_path, 40)
        job.kill_driver()
        job.assert_nothing_left(within=40.0)
        last = max(record.step for record in job.steps())
        assert max(complete(tmp_path)) == last, "it was written after the driver's death"
    with elasticrun("-np", "2", "--", JOB, env=env) as job:
        assert_every_record_is_in_the_model_once(job)
        assert entered(job)[0] == last
