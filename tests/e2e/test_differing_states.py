"""Ranks that hold different states, in whole jobs: named, repaired, or the end of the job."""

from __future__ import annotations

import time

import pytest

from tests.support.job import JOBS, RunningJob, elasticrun

WRONG = str(JOBS / "wrong.py")
LR = "learning rate of group 0 of 'optimizer'"


def kill_one(job: RunningJob) -> None:
    """Kill the process of one worker, once the job trains."""
    job.until(lambda: job.events("state_synced"), "the first step")
    started = {event["worker"]: event["pid"] for event in job.events("worker_started")}
    job.kill(started["localhost.2.1"])


def test_a_rank_that_goes_wrong_in_the_midst_of_training_ends_the_job_and_is_named() -> None:
    env = {"WRONG_RANK": "2", "WRONG_STEP": "30"}
    with elasticrun("-np", "3", WRONG, env=env) as job:
        assert job.wait() == 65
        (event,) = job.events("state_differs")
        assert (event["action"], event["leaf"]) == ("stop", LR)
        assert event["values"] == [
            {"ranks": [0, 1], "value": "0.01"},
            {"ranks": [2], "value": "0.5"},
        ]
        assert 30 <= event["step"] < 50
        said = f"after step {event['step']} ({LR} is 0.01 on ranks 0, 1 and 0.5 on rank 2; the job"
        assert f"elasticrun: the ranks hold different states {said} ends)" in job.stderr
        assert "job failed: the ranks hold different states" in job.stderr
        job.assert_nothing_left()


def test_ranks_that_differ_after_a_change_of_the_world_are_repaired_and_train_on() -> None:
    env = {"WRONG_RANK": "1", "WRONG_ROUND": "2", "WRONG_STEP": "1", "STEPS": "250"}
    with elasticrun("-np", "3", "--reset-limit", "3", WRONG, env=env) as job:
        kill_one(job)
        assert job.wait() == 0, job.describe()
        (event,) = job.events("state_differs")
        assert (event["action"], event["leaf"]) == ("repair", LR)
        assert event["round"] in (2, 3), "the lost worker may be replaced before a heartbeat"
        repaired = job.events("round_completed")
        assert any("held different states" in each["reason"] for each in repaired)
        assert job.stdout.count("done at 250 with 0.01") == 3, job.stdout
        assert not job.events("worker_lost")


def test_with_warn_the_job_goes_on_as_it_is() -> None:
    env = {"WRONG_RANK": "0", "WRONG_STEP": "5"}
    with elasticrun("-np", "2", "--on-difference", "warn", WRONG, env=env) as job:
        assert job.wait() == 0, job.describe()
        events = job.events("state_differs")
        assert [event["action"] for event in events] == ["warn"] * len(events)
        assert events[0]["leaf"] == LR
        assert sorted(line[-3:] for line in job.stdout.split("\n") if "done at" in line) == [
            ".01",
            "0.5",
        ]


def test_a_rank_that_never_commits_is_named() -> None:
    env = {"FORGETS": "1", "STEPS": "150"}
    with elasticrun("-np", "2", WRONG, env=env) as job:
        event = job.until(lambda: job.events("commits_differ"), "the rank is named")[0]
        assert (event["kind"], event["ranks"]) == ("no_commits", "1")
        assert "elasticrun: the ranks do not commit alike (rank 1 has trained" in job.stderr
        assert time.time() - job.events("state_synced")[0]["t"] < 10


def test_a_difference_of_the_last_commits_is_found_before_the_job_ends() -> None:
    """No mark was due any more: the ranks are compared once more when their scripts end."""
    env = {"WRONG_RANK": "1", "WRONG_STEP": "21", "STEPS": "21"}
    with elasticrun("-np", "2", WRONG, env=env) as job:
        assert job.wait() == 65, job.describe()
        (event,) = job.events("state_differs")
        assert (event["action"], event["leaf"], event["step"]) == ("stop", LR, 21)
        assert f"{LR} is 0.01 on rank 0 and 0.5 on rank 1" in job.stderr
    with elasticrun("-np", "2", "--on-difference", "warn", WRONG, env=env) as job:
        assert job.wait() == 0, job.describe()
        (event,) = job.events("state_differs")
        assert (event["action"], event["leaf"], event["step"]) == ("warn", LR, 21)


def test_what_a_rank_changes_after_its_last_commit_is_not_compared() -> None:
    env = {"AFTER_RANK": "1", "STEPS": "21"}
    with elasticrun("-np", "2", WRONG, env=env) as job:
        assert job.wait() == 0, job.describe()
        assert not job.events("state_differs")
        assert "done at 21 with 0.7" in job.stdout


def test_an_average_in_buffers_that_goes_wrong_on_one_rank_is_named() -> None:
    averaged = str(JOBS / "averaged.py")
    with elasticrun("-np", "2", averaged, env={"WRONG_RANK": "1", "STEPS": "400"}) as job:
        assert job.wait() == 65, job.describe()
        (event,) = job.events("state_differs")
        assert event["leaf"] == "buffers of 'average'"


@pytest.mark.parametrize("env", [{}, {"BROADCAST": "1"}])
def test_statistics_of_a_normalisation_of_the_scripts_own_are_no_difference(
    env: dict[str, str],
) -> None:
    with elasticrun("-np", "2", str(JOBS / "averaged.py"), env=env) as job:
        assert job.wait() == 0, job.describe()
        assert not job.events("state_differs")
