"""The whole job is told to go: a last checkpoint of a common step, and a new start from there."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

from tests.support.job import JOBS, Hosts, RunningJob, elasticrun

JOB = str(JOBS / "durable.py")
NEVER = "1000000"  # steps from one checkpoint to the next: only the last one is written


def environment(folder: Path, steps: int) -> dict[str, str]:
    return {"CHECKPOINTS": str(folder), "STEPS": str(steps), "EVERY": NEVER}


def told_to_go(job: RunningJob, *pids: int) -> int:
    """Give notice to these processes; the step of the last checkpoint, once the job has ended."""
    reached = max(record.step for record in job.steps())
    further = reached + random.randint(1, 30)  # seeded by nothing: any moment must do
    job.until(lambda: max(r.step for r in job.steps()) >= further, "training goes on")
    for pid in pids:
        job.kill(pid, signal.SIGUSR1)
    assert job.wait(90) == 143, job.describe()
    job.assert_nothing_left()
    last = job.stderr.splitlines()[-1]
    found = re.search(r"the state of step (\d+) is in .*started again, the job goes on", last)
    assert found, job.describe()
    ends = {record.pid: record.step for record in job.steps()}
    assert set(ends.values()) == {int(found[1])}, "all ranks have left after the same step"
    return int(found[1])


def assert_goes_on(checkpoints: Path, after: int, *args: str) -> None:
    """A new run begins at exactly that step."""
    with elasticrun(*args, "--", JOB, env=environment(checkpoints, after + 5)) as job:
        assert job.wait(60) == 0, job.describe()
        assert f"enters step={after} " in job.stdout
        assert {r.step for r in job.steps()} == set(range(after + 1, after + 6))


def test_a_notice_to_elasticrun_loses_no_step(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    args = ("-np", "3", "--debug")
    with elasticrun(*args, "--", JOB, env=environment(checkpoints, 100000)) as job:
        job.until_size(3)
        step = told_to_go(job, job.process.pid)
        assert "told by SIGUSR1 that its time is over" in job.stderr
    assert_goes_on(checkpoints, step, "-np", "2")


def test_a_notice_to_every_agent_ends_the_job_at_once_and_loses_no_step(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    args = ("-H", "localhost:1,127.0.0.2:1", "-np", "2", "--min-np", "1", "--debug")
    with elasticrun(*args, "--", JOB, env=environment(checkpoints, 100000)) as job:
        job.until_size(2)
        step = told_to_go(job, *job.agents())
        assert "every host goes away (its agent got SIGUSR1)" in job.stderr
    assert_goes_on(checkpoints, step, *args)


def test_where_other_hosts_may_come_they_go_on_at_exactly_that_step(tmp_path: Path) -> None:
    checkpoints, hosts = tmp_path / "checkpoints", Hosts(tmp_path, "localhost:1", "127.0.0.2:1")
    find = ("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.1")
    args = (*find, "-np", "2", "--min-np", "1", "--debug")
    with elasticrun(*args, "--", JOB, env=environment(checkpoints, 100000)) as job:
        job.until_size(2)
        for agent in job.agents():
            job.kill(agent, signal.SIGUSR1)
        job.until(lambda: len(job.events("host_drained")) == 2, "both hosts are left")
        step = int(job.events("state_saved")[0]["reason"].split()[4])
        assert max(record.step for record in job.steps()) == step
        hosts.set("127.0.0.3:1")
        later = job.until_size(1)
        assert min(r.step for r in job.steps() if r.pid in later) == step + 1
        assert job.process.poll() is None


def test_a_plain_script_gets_sigterm(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    with elasticrun("-np", "1", "--", str(script)) as job:
        job.until(lambda: "up" in job.stdout, "the script runs")
        job.process.send_signal(signal.SIGUSR1)
        assert job.wait(90) == 143, job.describe()
        assert "saved" in job.stdout
        told = "elasticrun: job stopped: told by SIGUSR1 that its time is over"
        assert job.stderr.splitlines()[-1] == told
        job.assert_nothing_left()


def test_without_a_checkpoint_dir_the_end_says_what_is_lost() -> None:
    with elasticrun("-np", "1", "--", str(JOBS / "train.py"), env={"STEPS": "100000"}) as job:
        job.until_size(1)
        job.process.send_signal(signal.SIGUSR2)
        assert job.wait(90) == 143, job.describe()
        assert "is not on disk: it has no checkpoint_dir" in job.stderr.splitlines()[-1]
        job.assert_nothing_left()
