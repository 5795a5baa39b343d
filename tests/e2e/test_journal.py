"""The journal of a real job, replayed and explained while it runs, is over, or was killed."""

from __future__ import annotations

import json
import signal
import stat

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
        assert f"worker_exited {victim.worker}: " in text
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
