"""A wait for a peer that nothing ends: no worker waits without end, in training or at its end."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.job import JOBS, RunningJob, elasticrun

SCRIPT = str(JOBS / "unended.py")
GIVEN_UP = "a collective was not ended by the loss of its peer"


def ends(job: RunningJob, worker: str) -> list[dict[str, Any]]:
    return [event for event in job.events("worker_exited") if event["worker"] == worker]


@pytest.mark.parametrize("place", ["hook", "buffers"])
def test_a_wait_in_our_wrapper_is_given_up_and_the_process_goes_on(place: str) -> None:
    with elasticrun("-np", "2", "--", SCRIPT, env={"WAITS_IN": place}) as job:
        assert job.wait(60) == 0, job.describe()
        started = re.findall(r"round=(\d) rank=(\d) pid=(\d+)", job.stdout)
        assert {round_id for round_id, *_ in started} == {"1", "2"}
        assert len({pid for *_, pid in started}) == 2, "both workers keep their process"
        reasons = {event["worker"]: event["reason"] for event in job.events("worker_ready")}
        assert reasons["localhost.0.1"] == f"a collective broke: {GIVEN_UP}"
        assert "Unable to cast" not in job.stderr + str(job.events())
        job.assert_nothing_left()


def test_a_wait_in_torch_that_no_call_wakes_ends_with_its_process() -> None:
    with elasticrun("-np", "2", "--", SCRIPT, env={"WAITS_IN": "reducer"}) as job:
        assert job.wait(90) == 0, job.describe()
        (end, *_) = ends(job, "localhost.0.1")
        assert end["exit_code"] == 75
        assert GIVEN_UP in job.stderr
        assert "round=2" in job.stdout, "it was replaced"
        job.assert_nothing_left()


def test_a_script_that_ends_while_gloo_still_waits_ends() -> None:
    env = {"WAITS_IN": "hook", "THEN": "raise"}
    with elasticrun("-np", "2", "--min-np", "1", "--", SCRIPT, env=env) as job:
        (end,) = job.until(lambda: ends(job, "localhost.0.1"), "it has ended", within=60)
        assert end["exit_code"] == 1, job.describe()
        job.until(lambda: "ValueError: the script gives up" in job.stderr, "its traceback")
        assert job.wait(60) == 0, job.describe()
        job.assert_nothing_left()
