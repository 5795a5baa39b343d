"""`--spares N` in a real job: a spare takes a lost worker's slot, and no round is smaller."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

from tests.e2e.test_control import ctl, here
from tests.support.job import (
    JOBS,
    RunningJob,
    assert_no_step_lost_or_repeated,
    elasticrun,
    is_running,
)

TRAIN = str(JOBS / "train.py")
JOB = ("-np", "3", "--spares", "1", "--", TRAIN)
ENV = {"STEPS": "100000"}


def ready_spare(job: RunningJob, after: int = 0) -> Callable[[], dict[str, Any] | None]:
    """The start of the newest spare that is ready, if `after` others were ready before it."""

    def look() -> dict[str, Any] | None:
        ready = [event["worker"] for event in job.events("spare_ready")[after:]]
        started = [e for e in job.events("worker_started") if e["worker"] in ready[-1:]]
        return started[-1] if started and is_running(started[-1]["pid"]) else None

    return look


def test_whichever_worker_is_killed_a_spare_is_in_the_next_round_in_its_slot() -> None:
    with elasticrun(*JOB, env=ENV) as job:
        for number, rank in enumerate((2, 0, 1)):
            live = job.until_size(3)
            spare = job.until(ready_spare(job, number), "a spare is ready")
            assert spare["pid"] not in live
            victim = next(record for record in live.values() if record.rank == rank)
            job.kill(victim.pid)
            after = job.until_size(3)
            assert set(after) == set(live) - {victim.pid} | {spare["pid"]}
            promoted = job.events("spare_promoted")[-1]
            gone = job.events("worker_exited")[-1]
            assert (promoted["worker"], promoted["slot"]) == (spare["worker"], gone["slot"])
        assert job.rounds() == [3, 3, 3, 3]
        assert_no_step_lost_or_repeated(job, max(r.step for r in job.live().values()) - 2)
        job.process.send_signal(signal.SIGINT)
        job.wait()
        job.assert_nothing_left()


def test_the_end_of_a_spare_disturbs_nobody_and_another_one_follows() -> None:
    with elasticrun(*JOB, env=ENV) as job:
        live = job.until_size(3)
        spare = job.until(ready_spare(job), "a spare is ready")
        text = ctl("status", *here(job))
        assert re.search(rf"^- +spare +localhost +0 +{spare['pid']} ", text, re.MULTILINE)
        job.kill(spare["pid"])
        job.until(ready_spare(job, 1), "another spare is ready")
        assert set(job.until_size(3)) == set(live)
        assert job.rounds() == [3]


def test_a_job_with_spares_ends_when_its_workers_have_finished() -> None:
    with elasticrun(*JOB, env={"STEPS": "300"}) as job:
        job.until(ready_spare(job), "a spare is ready")
        assert job.wait() == 0
        assert job.stdout.count("done step=300") == 3
        job.assert_nothing_left()


def test_a_script_without_our_api_is_told_that_it_has_no_spares() -> None:
    args = ("-np", "2", "--spares", "1", "--", str(JOBS / "plain.py"))
    with elasticrun(*args, env={"STEPS": "3"}) as job:
        job.wait()
        assert "Traceback" not in job.stderr
        assert job.stderr.count("no spares are kept") == 1
        assert not job.events("spare_ready")
