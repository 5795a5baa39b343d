"""The port of a driver that has died is held by another program: the job goes on at another one."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from elastic_driver.runtime.run_dir import read_endpoint
from tests.e2e.test_control import ctl
from tests.e2e.test_resume import newest_step, steps_beyond, where
from tests.support.held_port import NONSENSE, holding
from tests.support.job import JOBS, RunningJob, assert_no_step_lost_or_repeated, elasticrun
from tests.support.nodes import Nodes
from tests.support.ports import free_port

FAST = ("--heartbeat-timeout", "3")
TRAIN = str(JOBS / "train.py")
SLACK_S = 1.0  # beyond the longest pause between two steps of a driver that finds its port free


def port_of(job: RunningJob) -> int:
    endpoint = read_endpoint(job.run_dir)
    assert endpoint is not None
    return int(urlsplit(endpoint.url).port or 0)


def longest_pause(job: RunningJob, since: float) -> float:
    """The longest time between two steps of one process, from a moment on."""
    times: dict[int, list[float]] = {}
    for record in job.steps():
        if record.t >= since:
            times.setdefault(record.pid, []).append(record.t)
    return max(after - before for each in times.values() for before, after in pairwise(each))


def go_on(job: RunningJob, resumed: int) -> float:
    """Resume the job, see all its workers train on, and return the longest pause since."""
    since = job.steps()[-1].t
    job.start("--resume")
    job.until(lambda: len(job.events("driver_resumed")) == resumed, "the next driver")
    step = newest_step(job)
    job.until(lambda: steps_beyond(job, step + 20), "steps with the next driver")
    return longest_pause(job, since)


@pytest.mark.parametrize("says", [b"", NONSENSE], ids=["silent", "nonsense"])
@pytest.mark.parametrize("given", [False, True], ids=["any-port", "given-port"])
def test_the_next_driver_takes_another_port_and_calls_its_agents(says: bytes, given: bool) -> None:
    at = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}") if given else ()
    args = ("-H", "localhost:1,127.0.0.2:1", "-np", "2", *at, "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
        pids = set(job.until_size(2, steps=20))
        job.kill_driver()
        undisturbed = go_on(job, resumed=1)
        former, rounds = port_of(job), job.rounds()
        job.kill_driver()
        with holding(former, says):
            assert go_on(job, resumed=2) < undisturbed + SLACK_S
            assert port_of(job) != former
            told = f"another program holds port {former}, so the driver of run {job.run_id} listens"
            said = [line for line in job.stderr.splitlines() if told in line]
            assert len(said) == 1
            assert f"at http://127.0.0.1:{port_of(job)} now" in said[0]
            assert job.run_id in ctl("status", *where(job))
            assert set(job.live()) == pids
            assert job.rounds() == rounds
        step = newest_step(job)
        job.until(lambda: steps_beyond(job, step + 20), "steps after the port is free again")
        job.kill_driver()  # the next one may listen where it was told to
        assert go_on(job, resumed=3) < undisturbed + SLACK_S
        if given:
            assert port_of(job) == former
        victim = min(pids)
        job.kill(victim)  # the worker in its place begins with the address of now
        assert set(job.until_size(2)) & pids == pids - {victim}
        ctl("stop", *where(job))
        assert job.wait(120) == 143, job.describe()
        assert_no_step_lost_or_repeated(job, newest_step(job))
        job.assert_nothing_left()


def test_nodes_that_have_joined_follow_a_server_whose_port_is_held(tmp_path: Path) -> None:
    at = f"127.0.0.1:{free_port()}"
    train = ("--nnodes", "1:3", "--nproc-per-node", "1", "--rdzv-endpoint", at, *FAST, TRAIN)
    with Nodes(tmp_path, STEPS="100000") as nodes:
        state = ("--run-id", nodes.mark, "--state-dir", str(tmp_path / "state"))
        job = nodes.serve(*train)  # torchrun's way: the server trains, too
        node = nodes.start("--join", at, "--nproc-per-node", "1", *state)
        pids = set(job.until_size(2, 90))
        job.kill_driver()
        with holding(int(at.rpartition(":")[2]), b""):
            job = nodes.serve(*train)
            job.until(lambda: job.events("driver_resumed"), "the next driver")
            step = newest_step(job)
            job.until(lambda: steps_beyond(job, step + 20), "steps with the next driver")
            assert set(job.live()) == pids
            assert len({record.round for record in job.steps() if record.pid in pids}) <= 2
            moved = f"127.0.0.1:{port_of(job)}"
            assert f"listens at http://{moved} now" in job.stderr
            later = nodes.start("--join", moved, "--nproc-per-node", "1", *state)
            assert set(job.until_size(3, 90)) > pids
        job.process.send_signal(signal.SIGTERM)
        assert [each.wait() for each in (node, later)] == [143, 143], node.context()
        assert_no_step_lost_or_repeated(job, newest_step(job) - 1)
