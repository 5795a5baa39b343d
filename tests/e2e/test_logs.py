"""`elasticctl logs`: what workers write, by rank, also after the rank has moved and at the end."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from tests.e2e.test_control import ctl, follow, here
from tests.support.job import JOBS, elasticrun, eventually

SAYS = """
import os, sys, time
rank = os.environ["RANK"]
print(f"rank {rank} is process {os.getpid()}", flush=True)
print("a warning", file=sys.stderr, flush=True)
while True:
    time.sleep(0.05)
    print("still here", flush=True)
"""
PID = re.compile(r"^\[1\]<stdout>:rank 1 is process (\d+)$", re.MULTILINE)


def test_the_output_of_a_rank_is_found_over_its_workers_while_the_job_runs_and_later(
    tmp_path: Path,
) -> None:
    script, seen = tmp_path / "says.py", tmp_path / "seen"
    script.write_text(SAYS)
    options = ("--warm", "0", "--local-ranks-filter", "0")
    with elasticrun("-np", "2", "--max-restarts", "5", *options, "--", str(script)) as job:
        job.until(lambda: job.events("round_completed"), "the job has begun")
        follower = follow(job, seen, "logs", "-f", "--rank", "1")
        (first,) = eventually(lambda: PID.findall(seen.read_text()), within=60, what="a line")
        job.kill(int(first))
        pids = eventually(
            lambda: [p for p in PID.findall(seen.read_text()) if p != first],
            within=60,
            what="a line of the next worker",
        )
        assert len(pids) == 1, "each line comes once"
        assert "rank 1" not in job.stdout, "the terminal does not have it"
        lines = [json.loads(x) for x in ctl("logs", "--json", *here(job)).splitlines()]
        assert {line["rank"] for line in lines} == {0, 1}
        workers = {line["worker"] for line in lines if line["rank"] == 1}
        assert len(workers) == 2, "the rank has moved"
        assert {line["stream"] for line in lines} == {"stdout", "stderr"}
        assert [line["t"] for line in lines if line["rank"] == 1] == sorted(
            line["t"] for line in lines if line["rank"] == 1
        )
        of_one = ctl("logs", "--worker", min(workers), "--timestamps", *here(job)).splitlines()
        assert all(f" {min(workers)} [1]<std" in line for line in of_one)
        assert ctl("logs", "--host", "elsewhere", *here(job)) == ""
        assert len(ctl("logs", "--tail", "3", *here(job)).splitlines()) == 3
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
        assert follower.wait(60) == 0
        over = ctl("logs", "--rank", "1", *here(job))
        assert over == ctl("logs", "--rank", "1", "--run-id", job.run_id, *here(job))
        assert set(PID.findall(over)) == {first, *pids}
        assert over.startswith(seen.read_text()[:200])
        assert ctl("logs", "--since", "0", *here(job)) == ""
        assert "no job of this user is running" in ctl(
            "logs", "--state-dir", str(tmp_path / "none"), code=75
        )


def test_a_report_is_up_to_date_and_the_events_of_a_run_are_there_when_it_is_over() -> None:
    env = {"STEPS": "200", "STEP_MS": "30"}
    with elasticrun("-np", "1", "--", str(JOBS / "train.py"), env=env) as job:
        job.until_size(1, steps=40)
        job.until(
            lambda: json.loads(ctl("report", "--json", *here(job)))["step"] >= 30,
            "the report of a job that runs has its step",
        )
        assert job.wait() == 0
        assert json.loads(ctl("report", "--json", *here(job)))["step"] == 200
        for which in (here(job), ("--run-id", job.run_id, *here(job))):
            lines = ctl("events", *which).splitlines()
            assert "has succeeded" in lines[-1]
            assert len(lines) == len(job.events())
        last = json.loads(ctl("events", "--json", "--since", "3", *here(job)).splitlines()[-1])
        assert (last["event"], last["step"]) == ("job_succeeded", 200)
