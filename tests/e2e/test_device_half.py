"""A job whose gradients travel over the second half of the group: only the device is pretended."""

from __future__ import annotations

import signal
import time
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


@pytest.mark.slow
def test_who_stands_by_keeps_the_state_when_its_source_dies_on_the_way(tmp_path: Path) -> None:
    """All take part in a transfer to two newcomers. Gloo forgets a broadcast whose source dies."""
    hosts = Hosts(tmp_path, "localhost:2")
    args = (
        *("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.2"),
        *("-np", "2", "--min-np", "1", "--max-np", "4", "--", DEVICE),
    )
    with elasticrun(*args, env={"FROZEN_MB": "512", "PYTHONPATH": str(ROOT)}) as job:
        holders = job.until_size(2, steps=5)
        hosts.set("localhost:4")
        formed = job.until(
            lambda: [e for e in job.events("round_completed") if e["size"] == 4], "four meet"
        )[0]
        time.sleep(max(0.0, formed["t"] + 0.5 - time.time()))  # connecting takes 0.2 s
        source = min(holders, key=lambda pid: holders[pid].rank)
        killed_at = job.kill(source)
        arrived = [e for e in job.events("state_synced") if formed["t"] < e["t"] < killed_at]
        assert not arrived, "the kill came too late"
        assert set(holders) - {source} <= set(job.until_size(4))
        assert_no_step_lost_or_repeated(job, min(r.step for r in job.live().values()))
