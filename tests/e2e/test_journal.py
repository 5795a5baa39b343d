"""The journal of a real job, replayed and explained while it runs, is over, or was killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from tests.e2e.test_control import ctl
from tests.support.job import JOBS, RunningJob, elasticrun

TRAIN = str(JOBS / "train.py")


def where(job: RunningJob) -> tuple[str, ...]:
    return "--state-dir", str(job.run_dir.parent), "--run-id", job.run_id


def test_a_kill_is_explained_while_the_job_runs_and_the_replay_is_what_the_user_saw() -> None:
    with elasticrun("-np", "2", "--min-np", "1", "--", TRAIN, env={"STEPS": "100000"}) as job:
        pids = job.until_size(2)
        pid, victim = next((pid, r) for pid, r in pids.items() if r.rank == 1)
        job.kill(pid)
        job.until(lambda: job.rounds().count(2) >= 2, "the world has grown back")
        text = ctl("explain", "rank", "1", *where(job))
        assert f"{victim.worker} has ended with status -9" in text
        assert f"worker {victim.worker} (rank 1) exited: " in text
        assert "round 1 begins with 2 workers" in text
        assert f"rank 1 is {victim.worker}" in text
        assert "the agent localhost.1 is up (after event " in ctl(
            "explain", "host", "localhost", *where(job)
        )
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(20) == 143
        lines = ctl("replay", "--json", *where(job)).splitlines()
        *steps, last = [json.loads(line) for line in lines]
        replayed = [
            (decision["event"], decision["worker"])
            for step in steps
            for decision in step["decisions"]
            if decision["type"] == "announce" and decision["event"] != "job_failed"
        ]
        logged = [(event["event"], event.get("worker")) for event in job.events()]
        assert [each for each in logged if each in set(replayed)] == replayed
        assert last["status"]["state"] == "failed"
        early = ctl("replay", "--at", str(steps[2]["n"]), *where(job))
        assert "round 1 begins" not in early
        assert f"run {job.run_id} at " in early


def test_the_journal_of_a_killed_driver_tells_everything_up_to_its_end() -> None:
    with elasticrun("-np", "2", "--", TRAIN, env={"STEPS": "100000"}) as job:
        job.until_size(2)
        token = (job.run_dir / "token").read_bytes().strip()
        job.process.kill()
        job.process.wait(10)
        for name in ("journal.db", "journal.db-wal"):
            assert token not in (job.run_dir / name).read_bytes()
            assert stat.S_IMODE((job.run_dir / name).stat().st_mode) == 0o600
        text = ctl("replay", str(job.run_dir))
        assert "round 1 begins with 2 workers" in text
        assert "running for " in text


DISK = """
truncate -s 16M "$0/disk" && mkfs.ext4 -q "$0/disk" && mkdir "$0/state" &&
mount -o loop,errors=remount-ro "$0/disk" "$0/state" && exec "$@"
"""


def why_no_disk() -> str | None:
    """Why no disk can be made for one job; None where it can."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        return "a disk in a file needs root and loop devices"
    missing = [tool for tool in ("unshare", "mkfs.ext4", "nsenter") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@pytest.mark.skipif(why_no_disk() is not None, reason=why_no_disk() or "")
def test_a_disk_that_becomes_read_only_costs_the_journal_and_not_the_job(tmp_path: Path) -> None:
    """The disk of the run's folder is a real one in a file, in a mount namespace of the job."""
    inside = ("unshare", "--mount", "sh", "-c", DISK, str(tmp_path))
    command = ("-np", "2", "--min-np", "1", "--", TRAIN)
    env = {"STEPS": "100000"}
    with elasticrun(*command, env=env, state_dir=tmp_path / "state", inside=inside) as job:
        job.state_dir = Path(f"/proc/{job.process.pid}/root{tmp_path}/state")  # as the job sees it
        pids = job.until_size(2, 90)
        to_disk = ("nsenter", f"--target={job.process.pid}", "--mount")
        # As ext4 does by itself upon the first error of its disk; other mounts would be busy.
        subprocess.run([*to_disk, "mount", "-o", "remount,abort", tmp_path / "state"], check=True)
        job.kill(next(iter(pids)))
        failed = "Read-only file system; the job goes on without a journal"
        job.until(lambda: failed in job.stderr, "the user is told of the journal")
        log_failed = "Read-only file system; the job goes on, and events wait in memory"
        job.until(lambda: log_failed in job.stderr, "the user is told of the event log")
        grown = " complete: 2 workers"
        job.until(lambda: job.stderr.count(grown) == 2, "the job serves changes", 90)
        assert job.stderr.count("the journal has failed") == 1
        newest = max(record.step for record in job.steps())
        job.until(lambda: max(r.step for r in job.steps()) > newest + 20, "training goes on")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
        assert "Traceback" not in job.stderr
