"""Each line of "What happens when …" in the README, in a job whose driver has been replaced.

Losses of power and of links need hosts of their own: `tests/cluster/test_resume_hosts.py`; a driver
on another host: `tests/cluster/test_standby.py`.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.test_checkpoints import complete, entered
from tests.e2e.test_control import ctl
from tests.support.job import (
    JOBS,
    Hosts,
    RunningJob,
    StepRecord,
    assert_no_step_lost_or_repeated,
    elasticrun,
    eventually,
    is_running,
)
from tests.support.processes import select, signal_each

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = str(JOBS / "train.py")
HANG = str(JOBS / "hang.py")
DURABLE = str(JOBS / "durable.py")
HEARTBEAT = ("--heartbeat-timeout", "4")


def where(job: RunningJob) -> tuple[str, ...]:
    return "--state-dir", str(job.run_dir.parent), "--run-id", job.run_id


def take_over(job: RunningJob) -> None:
    """Kill the driver, and wait until another one goes on with the job."""
    resumed = len(job.events("driver_resumed"))
    job.kill_driver()
    job.start("--resume")
    job.until(lambda: len(job.events("driver_resumed")) > resumed, "the next driver", 60.0)


def together(entries: list[tuple[int, str]]) -> bool:
    """Return whether two workers have entered one world; before, one may have trained alone."""
    return len(entries) > 1 and entries[-1] == entries[-2]


def of_host(live: dict[int, StepRecord], host: str) -> set[int]:
    return {pid for pid, record in live.items() if record.worker.rsplit(".", 2)[0] == host}


def lose(job: RunningJob, number: signal.Signals) -> None:
    """Lose one worker by a signal: the others keep their processes, another one takes its place."""
    before = set(job.until_size(3))
    victim = min(before)
    job.killed[victim] = job.kill(victim, number)
    job.until(lambda: not is_running(victim), "the lost worker is gone")
    job.until(lambda: job.live() and victim not in job.live(), "the others go on")
    assert before - {victim} <= set(job.until_size(3, within=90.0))


def test_workers_and_hosts_come_and_go_after_a_resume(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:2", "127.0.0.2:1")
    script = ("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.2")
    args = (*script, *HEARTBEAT, "-np", "3", "--min-np", "1", "--max-np", "4", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000", "STEP_MS": "20"}) as job:
        job.until_size(3, within=90.0)
        take_over(job)
        lose(job, signal.SIGKILL)  # it crashes
        lose(job, signal.SIGSTOP)  # it is cut off
        assert job.events("worker_hung"), "it is found by its missing heartbeat"

        before = job.until_size(3)
        hosts.set("localhost:2", "127.0.0.2:1", "127.0.0.3:1")
        grown = job.until_size(4, within=90.0)
        assert set(before) <= set(grown)
        hosts.set("localhost:2", "127.0.0.2:1")
        assert set(job.until_size(3)) == set(before)

        leaving = of_host(before, "127.0.0.2")
        ctl("drain", "127.0.0.2", *where(job))
        assert set(job.until_size(2)) == set(before) - leaving
        job.until(lambda: job.events("host_drained"), "the drained host is empty")
        ctl("drain", "127.0.0.2", "--cancel", *where(job))
        job.until_size(3, within=90.0)

        take_over(job)  # `elasticrun` is killed, once more
        told = max(job.live())
        job.kill(told, signal.SIGTERM)
        job.until(lambda: not is_running(told), "a worker with a notice has left")
        reached = max(record.step for record in job.steps())
        job.until(lambda: max(r.step for r in job.steps()) > reached + 20, "the others go on")
        last = min(record.step for record in job.live().values())
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.describe()
        job.assert_nothing_left()
        assert_no_step_lost_or_repeated(job, last)


def test_a_deadlock_is_found_after_a_resume() -> None:
    env = {"HANG": "lock", "HANG_STEP": "400", "STEPS": "100000"}
    with elasticrun("-np", "3", "--hang-timeout", "3", "--", HANG, env=env) as job:
        before = set(job.until_size(3))
        take_over(job)
        (hung,) = job.until(lambda: job.events("worker_hung"), "the deadlock is found", 90.0)
        job.killed[hung["pid"]] = hung["t"]
        assert hung["rank"] == 1
        assert "stop_for_ever_in_a_lock" in hung["stack"]
        again = job.until_size(3)
        assert before - {hung["pid"]} <= set(again)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143, job.describe()


def test_all_workers_at_once_and_the_whole_job_s_notice_after_a_resume(tmp_path: Path) -> None:
    env = {"CHECKPOINTS": str(tmp_path), "STEPS": "100000", "EVERY": "20"}
    with elasticrun("-np", "2", "--", DURABLE, env=env) as job:
        job.until(lambda: complete(tmp_path), "a checkpoint")
        take_over(job)
        before, newest = len(entered(job)), max(complete(tmp_path))
        workers = select(job.processes(), lambda process: DURABLE in process.cmdline())
        signal_each(workers, signal.SIGKILL)
        job.until(lambda: together(entered(job)[before:]), "both train again", 90.0)
        assert all(step >= newest for step, _weights in entered(job)[before:])
        job.until_size(2)
        job.process.send_signal(signal.SIGUSR1)
        assert job.wait() == 143, job.describe()
        last = job.steps()[-1].round  # earlier ones went beyond the checkpoint
        steps = [record.step for record in job.steps() if record.round == last]
        assert max(complete(tmp_path)) == max(steps)
        job.assert_nothing_left()


def test_a_failure_before_the_first_step_ends_the_job_after_a_resume() -> None:
    script = "import time; time.sleep(8); raise ValueError('no such data')"
    with elasticrun("-np", "2", "--", "python", "-c", script) as job:
        job.until(lambda: job.events("worker_started"), "workers")
        take_over(job)
        assert job.wait(60.0) == 1, job.describe()
        assert "ValueError: no such data" in job.stderr, job.describe()
        job.assert_nothing_left()


def test_a_host_that_keeps_failing_is_put_in_cool_down_after_a_resume() -> None:
    hosts = ("-H", "localhost:1,127.0.0.2:1", "-np", "2", "--min-np", "1")
    # All failures count, whether or not a worker had finished a step before.
    args = (*hosts, "--host-failures", "3", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000", "STEP_MS": "20"}) as job:
        job.until_size(2, within=90.0)
        take_over(job)

        def kill_there() -> bool:
            for pid in of_host(job.live(), "127.0.0.2"):
                job.killed[pid] = job.kill(pid)
            return bool(job.events("host_blacklisted"))

        job.until(kill_there, "the host is put in cool-down", 120.0)
        assert {e["host"] for e in job.events("host_blacklisted")} == {"127.0.0.2"}
        eventually(lambda: of_host(job.live(), "localhost"), within=10, what="the other trains on")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.describe()
