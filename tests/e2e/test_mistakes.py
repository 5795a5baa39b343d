"""Scripts with a mistake that only several ranks can make: it is named, and does no harm."""

from __future__ import annotations

import pytest

from tests.support.job import JOBS, RunningJob, elasticrun

JOB = str(JOBS / "mistaken.py")
PAGE = "docs/common-mistakes.md"


def told(job: RunningJob) -> list[str]:
    """What the workers have said about mistakes."""
    return [line for line in job.stderr.splitlines() if PAGE in line]


@pytest.mark.parametrize("how", ["alone", "alone, with a metric"])
def test_gradients_that_nothing_averages_are_named_with_the_difference(how: str) -> None:
    with elasticrun("-np", "2", JOB, env={"MISTAKE": how, "STEPS": "1000"}) as job:
        assert job.wait() == 65, job.describe()
        (line,) = told(job)
        assert line.startswith("[0]<stderr>:elastic: the ranks hold different states")
        assert "call the model through elastic.wrap(state.model)" in line
        assert ("exchanged nothing" in line) == (how == "alone")


@pytest.mark.parametrize("how", ["swallows a step", "swallows the whole loop"])
def test_a_broken_world_that_an_except_swallows_costs_no_step_and_is_named(how: str) -> None:
    env = {"MISTAKE": how, "LOST": "10", "STEPS": "60"}
    with elasticrun("-np", "3", JOB, env=env) as job:
        assert job.wait() == 0, job.describe()
        done = [
            line.partition(":done at ")[2] for line in job.stdout.splitlines() if "done" in line
        ]
        assert len(set(done)) == 1, "all ranks hold the same weights"
        assert done[0].startswith("60, committed 60: "), "each commit is a step that was trained"
        lines = told(job)
        assert lines, job.describe()
        assert all("#swallowed" in line for line in lines)
        assert len(lines) <= 3, "ranks 0 and 1, and a rank that became one of these"
        job.assert_nothing_left()


def test_a_rank_that_returns_early_is_named_and_the_others_finish() -> None:
    with elasticrun("-np", "3", JOB, env={"MISTAKE": "returns early"}) as job:
        assert job.wait() == 0, job.describe()
        (event,) = job.events("finished_alone")
        assert event["worker"] == "localhost.1.1"
        assert event["reason"].startswith("rank 1 is done, 2 others train on from step 20;")
        assert job.stdout.count("done at 60") == 2


def test_a_collective_that_one_rank_calls_is_named() -> None:
    env = {"MISTAKE": "a barrier"}
    with elasticrun("-np", "3", "--hang-timeout", "1.5", JOB, env=env) as job:
        event = job.until(lambda: job.events("collectives_differ"), "the mismatch is named")[0]
        assert "rank 1 at File" in event["reason"]
        assert "in uneven" in event["reason"]
        assert job.wait() == 0, job.describe()


def test_a_loop_with_nothing_left_after_a_change_is_explained() -> None:
    env = {"MISTAKE": "nothing left", "LOST": "16"}
    with elasticrun("-np", "3", "--min-np", "2", JOB, env=env) as job:
        assert job.wait() != 0
        (line,) = told(job)
        assert "'loss' was never set in a call of the training function that made no" in line


def test_nothing_is_said_about_a_right_script_that_loses_a_rank() -> None:
    with elasticrun("-np", "3", JOB, env={"LOST": "10", "STEPS": "100"}) as job:
        assert job.wait() == 0, job.describe()
        assert told(job) == []
        assert not job.events("finished_alone", "collectives_differ", "state_differs")
