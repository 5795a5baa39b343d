"""The driver is killed, and another one goes on with the job while its workers train."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.e2e.test_checkpoints import fill
from tests.e2e.test_control import ctl
from tests.support.clock import jumping_clock
from tests.support.job import JOBS, RunningJob, assert_no_step_lost_or_repeated, elasticrun
from tests.support.processes import signal_each

TRAIN = str(JOBS / "train.py")
DURABLE = str(JOBS / "durable.py")
COUNT = "i=0; while [ $i -lt 300 ]; do echo line $i; i=$((i+1)); sleep 0.02; done"


def where(job: RunningJob) -> tuple[str, ...]:
    return "--state-dir", str(job.run_dir.parent), "--run-id", job.run_id


def say(job: RunningJob, *args: str) -> tuple[int, str]:
    """The exit status and the one line on stderr of another `elasticrun` for this run."""
    before = job.process
    job.start(*args, stderr="other")  # the job's driver may have something to say, too
    job.process, other = before, job.process
    status = other.wait(60)
    return status, (job.folder / "other").read_text().splitlines()[-1]


def steps_beyond(job: RunningJob, step: int) -> bool:
    """Whether every live worker has finished this step."""
    return all(record.step > step for record in job.live().values())


def newest_step(job: RunningJob) -> int:
    return max(record.step for record in job.steps())


def test_workers_train_on_without_a_driver_and_the_next_one_scales_and_ends_the_job() -> None:
    args = ("-H", "localhost:2", "-np", "2", "--min-np", "1", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
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
        plan = job.run_dir.parent / "plan.yaml"
        plan.write_text("number: 3\nworkers: 1\n")
        ctl("apply", str(plan), *where(job))
        job.until_size(1)
        job.kill_driver()
        job.start("--resume")
        job.until(lambda: len(job.events("driver_resumed")) == 2, "a third driver")
        assert "plan 3 is stale" in ctl("apply", str(plan), *where(job), code=64)
        assert len(job.until_size(1)) == 1
        ctl("scale", "2", *where(job))
        assert len(pids & set(job.until_size(2))) == 1
        ctl("stop", *where(job))
        assert job.wait(120) == 143, job.describe()
        assert_no_step_lost_or_repeated(job, newest_step(job))
        numbers = [event["n"] for event in job.events()]
        assert numbers == list(range(1, len(numbers) + 1))
        job.assert_nothing_left()


def test_a_byte_that_changes_in_the_journal_begins_no_second_world_beside_the_workers() -> None:
    args = ("-H", "localhost:2", "-np", "2", "--min-np", "1", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
        pids = set(job.until_size(2, steps=20))
        job.kill_driver()
        log = job.run_dir / "journal.db-wal"
        content = bytearray(log.read_bytes())
        content[len(content) // 2] ^= 0xFF
        log.write_bytes(content)
        others = [job.run_dir / name for name in ("journal.db", "lock", "token", "events.jsonl")]
        before = [file.read_bytes() for file in (log, *others)]
        for command in (("--resume",), args):
            status, line = say(job, *command)
            assert status == 64
            assert "the journal is damaged: its write-ahead log has changed between" in line
            assert f"run {job.run_id} cannot go on, and its workers may train" in line
            assert f"end its agents (kill {job.agents()[0]}), put its files away (mv " in line
            assert [file.read_bytes() for file in (log, *others)] == before, "nothing is changed"
        step = newest_step(job)
        job.until_without_driver(lambda: steps_beyond(job, step + 20), "they train on")
        assert set(job.live()) == pids


Damage: TypeAlias = Callable[[Path], object]


@pytest.mark.parametrize(
    ("damage", "goes_on"),
    [
        (lambda run: (run / "lock").unlink(), True),
        (
            lambda run: [file.unlink() for file in (*run.glob("journal*"), run / "events.jsonl")],
            False,
        ),
        (shutil.rmtree, False),
    ],
)
def test_a_run_whose_files_are_gone_gets_no_second_world_beside_its_workers(
    damage: Damage, goes_on: bool
) -> None:
    args = ("-H", "localhost:2", "-np", "2", "--min-np", "1", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
        pids = set(job.until_size(2, steps=20))
        agent = job.agents()[0]
        job.kill_driver()
        damage(job.run_dir)
        if goes_on:
            job.start(*args)
            job.until(lambda: job.events("driver_resumed"), "the next driver")
        else:
            status, line = say(job, *args)
            assert status == 64
            assert f"end its agents (kill {agent})" in line
        step = newest_step(job)
        job.until_without_driver(lambda: steps_beyond(job, step + 20), "they train on")
        assert set(job.live()) == pids


def test_a_worker_that_dies_without_a_driver_is_replaced_by_the_next_one() -> None:
    args = ("-H", "localhost:2", "-np", "2", "--min-np", "1", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "400", "STEP_MS": "20"}) as job:
        victim, survivor = sorted(job.until_size(2))
        job.kill_driver()
        job.kill(victim)
        status, line = say(job, "-np", "2", "--", TRAIN)
        assert status == 64
        assert f"elasticrun --resume --state-dir {job.run_dir.parent} --run-id {job.run_id}" in line
        job.start(*args)  # the same command
        job.until(lambda: "its driver 1 (process " in job.stderr, "it says that the job goes on")
        assert survivor in job.until_size(2)
        status, line = say(job, "--resume")
        assert status == 64
        assert f"is in use by process {job.process.pid}" in line
        assert job.wait(120) == 0, job.describe()
        assert_no_step_lost_or_repeated(job, 400)
        assert len(job.events("worker_exited")) == 3
        status, line = say(job, "--resume")
        assert status == 0
        assert f"run {job.run_id} is over since" in line
        job.assert_nothing_left()


def test_a_plain_script_and_its_output_go_on_across_a_driver_s_death() -> None:
    with elasticrun("-np", "2", "--", "sh", "-c", COUNT) as job:
        job.until(lambda: "line 20\n" in job.stdout, "output")
        job.kill_driver()
        job.start("--resume")
        assert job.wait(60) == 0, job.describe()
        for rank in (0, 1):
            lines = re.findall(rf"^\[{rank}\]<stdout>:line (\d+)$", job.stdout, re.MULTILINE)
            assert lines == [str(number) for number in range(300)]
        job.assert_nothing_left()


def test_a_job_goes_on_from_its_checkpoint_after_its_machine_was_restarted(tmp_path: Path) -> None:
    env = {"CHECKPOINTS": str(tmp_path), "STEPS": "300", "EVERY": "20"}
    with elasticrun("-np", "2", "--", DURABLE, env=env) as job:
        job.until(lambda: list(tmp_path.glob("step-*/manifest.json")), "a checkpoint")
        job.kill_driver()
        signal_each(job.processes(), signal.SIGKILL)
        job.start("--resume")
        assert job.wait(120) == 0, job.describe()
        entered = [int(step) for step in re.findall(r"enters step=(\d+)", job.stdout)]
        assert entered[:2] == [0, 0]
        assert entered[-1] > 0
        job.assert_nothing_left()


def test_a_full_disk_ends_no_job_and_the_driver_comes_back_once_there_is_room(
    small_disk: Path,
) -> None:
    args = ("-H", "localhost:2", "-np", "2", "--min-np", "1", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}, state_dir=small_disk / "state") as job:
        victim, survivor = sorted(job.until_size(2))
        fill(small_disk / "big")
        job.kill(victim)
        job.until(lambda: len(set(job.live()) - {victim}) == 2, "a new worker trains")
        assert "the journal has failed" in job.stderr
        pids = set(job.live())
        job.kill_driver()
        job.start("--resume")
        assert job.wait() == 75
        assert "No space left on device; make room, and resume again" in job.stderr
        step = newest_step(job)
        job.until_without_driver(lambda: steps_beyond(job, step + 20), "steps without a driver")
        assert set(job.live()) == pids
        (small_disk / "big").unlink()
        mount("ro", small_disk)
        status, line = say(job, "--resume")
        assert status == 75
        assert "Read-only file system; mount it for writing, and resume again" in line
        step = newest_step(job)
        job.until_without_driver(lambda: steps_beyond(job, step + 20), "steps without a driver")
        mount("rw", small_disk)
        resumed = len(job.events("driver_resumed"))
        job.start("--resume")
        job.until(lambda: len(job.events("driver_resumed")) > resumed, "the next driver")
        assert survivor in job.until_size(2)
        ctl("stop", *where(job))
        assert job.wait() == 143
        job.assert_nothing_left()


def mount(how: str, disk: Path) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)


def test_a_clock_that_jumps_under_a_driver_and_between_two_changes_nothing(tmp_path: Path) -> None:
    jump, day = tmp_path / "jump", 86400
    env = {"STEPS": "100000", **jumping_clock(tmp_path, str(jump))}
    with elasticrun("-np", "1", "--", TRAIN, env=env) as job:

        def trains_on() -> None:
            step = newest_step(job)
            job.until_without_driver(lambda: newest_step(job) > step + 5, "steps")

        pids = set(job.until_size(1))
        for seconds in (day, -day):  # under the running driver
            jump.write_text(str(seconds))
            trains_on()
        job.kill_driver()
        jump.write_text(str(2 * day))  # and between two
        job.start("--resume")
        job.until(lambda: job.events("driver_resumed"), "the next driver")
        trains_on()
        assert {record.pid for record in job.steps()} == pids
        for pid in pids:
            steps = sorted(record.step for record in job.steps() if record.pid == pid)
            assert steps == list(range(1, len(steps) + 1))
        assert job.rounds() == [1]
        assert "driver 1 has ended" in ctl("explain", "rank", "0", *where(job))
        ctl("stop", *where(job))
        assert job.wait() == 143
        job.assert_nothing_left()
