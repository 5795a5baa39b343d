"""What was trained does not depend on who died when."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from getpass import getuser
from pathlib import Path

import pytest

from tests.support.job import JOBS, ROOT, RunningJob, elasticrun

pytestmark = pytest.mark.slow

EXACT = str(JOBS / "exact.py")


def result_of(output: str) -> str:
    found = re.search(r"result (.*)", output)
    assert found, output
    return found[1].strip()


@functools.cache
def alone(mode: str, **env: str) -> str:
    """The result of the same script in one process, without elasticrun; run once for all tests."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ELASTIC")}
    done = subprocess.run(
        [sys.executable, EXACT],
        env={**clean, "MODE": mode, "STEP_MS": "0", "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return result_of(done.stdout)


def kill_twice(job: RunningJob) -> None:
    """Once the newest, later the oldest member (rank 0, who has sent the state)."""
    members = job.until_size(3, steps=4)
    job.kill(max(members, key=lambda pid: members[pid].rank))
    members = job.until_size(3, steps=4)
    job.kill(min(members, key=lambda pid: members[pid].rank))


def test_two_kills_change_no_bit_of_model_and_optimizer() -> None:
    with elasticrun("-np", "3", "--min-np", "1", "--", EXACT, env={"MODE": "fixed"}) as job:
        kill_twice(job)
        assert job.wait(100) == 0, job.describe()
        assert len(job.killed) == 2
        assert len(job.rounds()) >= 3
        assert result_of(job.stdout) == alone("fixed")


def test_two_kills_leave_no_sample_out_and_repeat_none_but_the_padding() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder,
        elasticrun(
            *("-np", "3", "--min-np", "1", "--", EXACT), env={"MODE": "sampler", "TMPDIR": folder}
        ) as job,
    ):
        kill_twice(job)
        assert job.wait(100) == 0, job.describe()
        found = re.fullmatch(r"least=2 extra=(\d+) replayed=(\d+)", result_of(job.stdout))
        assert found, result_of(job.stdout)
        assert found[1] == found[2]
        left = {path.name for path in Path(folder).iterdir()} - {f"torchinductor_{getuser()}"}
        assert not left, "nor a file: the killed ones' DataLoaders had sockets there"
