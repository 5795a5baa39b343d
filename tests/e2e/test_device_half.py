"""A job whose gradients travel over the second half of the group: only the device is pretended."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.job import (
    JOBS,
    ROOT,
    Hosts,
    assert_no_step_lost_or_repeated,
    elasticrun,
    eventually,
    is_running,
)

DEVICE = str(JOBS / "device.py")


@pytest.mark.slow
def test_a_job_grows_loses_a_worker_and_one_hangs_and_it_ends_with_equal_weights(
    tmp_path: Path,
) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    args = (
        *("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.2"),
        *("-np", "2", "--min-np", "1", "--max-np", "3", "--heartbeat-timeout", "2"),
        *("--", DEVICE),
    )
    with elasticrun(*args, env={"STEPS": "400", "PYTHONPATH": str(ROOT)}) as job:
        first = set(job.until_size(2))
        hosts.set("localhost:3")
        grown = set(job.until_size(3))
        assert first <= grown, "nobody's process ended for the newcomer"
        killed = max(first)
        job.kill(killed)
        again = set(job.until_size(3))
        assert grown - {killed} <= again
        stopped = min(first)
        job.killed[stopped] = job.kill(stopped, signal.SIGSTOP)
        assert again - {stopped} <= set(job.until_size(3))
        eventually(lambda: not is_running(stopped), within=5, what="the stopped one is killed")
        assert job.wait(60) == 0, job.describe()
        assert_no_step_lost_or_repeated(job, 400)
        said = [line for line in job.stdout.splitlines() if "done step=400" in line]
        assert len(said) == 3
        assert len({line.rpartition("digest=")[2] for line in said}) == 1
        assert "garbage" not in job.stderr
        job.assert_nothing_left()
