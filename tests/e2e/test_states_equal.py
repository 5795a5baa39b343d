"""Real jobs whose scripts hold everything that a state can keep: no failure changes a bit of it.

The programs are those of `tests/e2e/jobs/program.py`. Alone, without a job, each tells what a rank
has to hold in the end.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.e2e.test_leaving import elasticctl
from tests.support.job import JOBS, PATIENCE_S, ROOT, Hosts, RunningJob, elasticrun

PROGRAM = str(JOBS / "program.py")
PROGRAMS = ("everything", "by hand", "two passes", "many closures")
# Which rank dies in which of its collectives (`program.py`); each program at one place by day.
PLACES = ("0 25 0", "last 27 1", "last 30 2")
DEATHS = [
    pytest.param(program, dies, marks=() if by_day else pytest.mark.night)
    for n, program in enumerate(PROGRAMS)
    for dies in PLACES
    for by_day in [n == 0 or dies == PLACES[n - 1]]
]


@functools.cache
def alone(program: str) -> dict[str, str]:
    """What a process of its own holds at the end."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("ELASTIC")}
        environ |= {"PROGRAM": program, "STEP_RECORDS": folder, "PYTHONPATH": str(ROOT)}
        environ |= {"OMP_NUM_THREADS": "1"}
        ran = subprocess.run(
            [sys.executable, PROGRAM], env=environ, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return json.loads((Path(folder) / "told-0.json").read_text())


def assert_told(job: RunningJob, program: str, size: int) -> None:
    """Each rank of the last world holds what a process alone does."""
    assert job.wait(120) == 0, job.describe()
    assert job.rounds()[-1] == size, job.describe()
    wanted = alone(program)
    for rank in range(size):
        told = json.loads((job.folder / "steps" / f"told-{rank}.json").read_text())
        other = {n: (wanted.get(n), told.get(n)) for n in {**wanted, **told}}
        differ = [n for n, (a, b) in other.items() if a != b]
        assert not differ, f"rank {rank}: {differ[:8]}\n{job.describe()}"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("program", "dies"), DEATHS)
def test_a_worker_is_killed_at_any_collective(program: str, dies: str) -> None:
    args = ("-np", "2", "--", PROGRAM)
    with elasticrun(*args, env={"PROGRAM": program, "DIES": dies}) as job:
        assert_told(job, program, 2)
        assert len(job.rounds()) > 1, job.describe()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_newcomer_is_the_only_one_who_is_left() -> None:
    env = {"PROGRAM": "everything", "DIES": "0 12 1"}
    with elasticrun("-np", "2", "--", PROGRAM, env=env) as job:
        job.until(lambda: len(job.rounds()) > 1 and job.rounds()[-1] == 2, "a newcomer is there")
        old = min(job.until_size(2).values(), key=lambda record: record.rank)
        job.kill(old.pid)
        assert_told(job, "everything", 2)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_worker_stands_still_in_the_middle_of_a_step() -> None:
    env = {"PROGRAM": "everything", "DIES": "0 25 2", "FATE": "SIGSTOP"}
    args = ("-np", "2", "--heartbeat-timeout", "2", "--", PROGRAM)
    with elasticrun(*args, env=env) as job:
        assert_told(job, "everything", 2)
        assert len(job.rounds()) > 1, job.describe()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("program", ["everything", "two passes"])
def test_a_worker_more_joins(program: str, tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    args = (
        *("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.2"),
        *("-np", "2", "--min-np", "1", "--max-np", "3", "--", PROGRAM),
    )
    with elasticrun(*args, env={"PROGRAM": program, "WANT": "3"}) as job:
        job.until_size(2)
        hosts.set("localhost:3")
        assert_told(job, program, 3)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_host_is_drained() -> None:
    args = ("-np", "3", "--min-np", "1", "-H", "localhost:2,127.0.0.2:1", "--", PROGRAM)
    with elasticrun(*args, env={"PROGRAM": "everything"}) as job:
        job.until_size(3, within=PATIENCE_S)
        elasticctl(job, "drain", "127.0.0.2", "--yes")
        assert_told(job, "everything", 2)
