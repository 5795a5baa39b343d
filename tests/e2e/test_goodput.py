"""The goodput ledger of a real job against the clocks of its workers, and the report about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_checkpoints import JOB, complete, environment
from tests.e2e.test_control import ctl, here
from tests.support.job import JOBS, RunningJob, StepRecord, elasticrun

TRAIN = str(JOBS / "train.py")


def trained(job: RunningJob) -> float:
    """The seconds of all workers in steps, by their own clocks.

    The last world ends with their processes: what a script does after its last step counts, too.
    """
    exits = {e["worker"]: e["t"] for e in job.events("worker_exited") if e["exit_code"] == 0}
    worlds: dict[tuple[int, str], list[StepRecord]] = {}
    for record in job.steps():
        worlds.setdefault((record.round, record.worker), []).append(record)
    last = max(number for number, _ in worlds)
    return sum(
        (exits[worker] if number == last else records[-1].t) - records[0].began
        for (number, worker), records in worlds.items()
    )


def test_the_ledger_agrees_with_the_workers_own_clocks_across_kills_and_a_resumed_driver() -> None:
    env = {"STEPS": "900", "STEP_MS": "20"}  # ranks begin a world up to 0.3 s apart if it is busy
    args = ("-np", "3", "--min-np", "1", "--driver-timeout", "120", "--", TRAIN)
    with elasticrun(*args, env=env) as job:
        members = job.until_size(3, steps=20)
        job.kill(max(members, key=lambda pid: members[pid].rank))
        members = job.until_size(3, steps=10)
        job.kill_driver()
        job.kill(min(members, key=lambda pid: members[pid].rank))
        job.start("--resume")
        assert job.wait(120) == 0, job.describe()
        events = job.events()
        began, ended = events[0]["t"], events[-1]["t"]
        report = json.loads(ctl("report", str(job.run_dir), "--json"))
        seconds = report["goodput"]["seconds"]
        assert sum(seconds.values()) == pytest.approx(3 * (ended - began), rel=0.001)
        in_steps = seconds["training"] + seconds.get("slow", 0.0)
        assert in_steps == pytest.approx(trained(job), rel=0.05), seconds
        assert (report["state"], report["failures"], report["drivers"]) == ("succeeded", 2, 2)
        assert 800 < report["step"] <= 900  # as the last heartbeats told
        assert max(world["size"] for world in report["worlds"]) == 3
        shown = ctl("report", str(job.run_dir))
        assert "2 worker failures" in shown
        assert "█" in shown


def test_steps_that_are_trained_again_after_the_loss_of_all_workers_are_redone(
    tmp_path: Path,
) -> None:
    env = environment(tmp_path, 10**6, EVERY="300")
    with elasticrun("-np", "2", "--", JOB, env=env) as job:
        job.until(lambda: complete(tmp_path), "a checkpoint", within=60.0)
        (step,) = complete(tmp_path)

        def heard() -> bool:
            told: int = json.loads(ctl("status", "--json", *here(job)))["step"]
            return told > step + 20

        job.until(heard, "the driver has heard of later steps")
        for pid in job.until_size(2):
            job.kill(pid)
        job.until(lambda: job.events("steps_redone"), "the steps are trained again", within=60.0)
        report = json.loads(ctl("report", str(job.run_dir), "--json"))
        assert 20 < report["steps_redone"] <= max(r.step for r in job.steps()) - step
        assert 0.2 < report["goodput"]["seconds"]["redone"] < report["goodput"]["wall"]
        assert "of them trained again" in ctl("report", str(job.run_dir))
