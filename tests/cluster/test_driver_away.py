"""The driver's host is cut off: most of the hosts together train on, a host that is alone ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.support.cluster import Cluster, Node
from tests.support.cluster_job import ClusterJob, elasticrun_on, now
from tests.support.job import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
FOUR = ("-np", "4", "--min-np", "1", "-H", "node[0-3]:1")
AWAY_S = 10.0
ENDS_S = 2.5  # within which a host that is cut off ends its workers
BUSY_S = 1.5  # more, as several machines share this one's processors
CONTINUED = 40  # steps; several a second
BEGINS_S = 150.0  # for four machines on one processor to import torch


CTL = ("env", f"--chdir={ROOT}", sys.executable, "-m", "launcher.ctl")


def state_dir(job: ClusterJob) -> str:
    return str(job.run_dir.parent)


def last_step(job: ClusterJob) -> int:
    return max(r.step for r in job.steps())


def seconds_to_end(node: Node, within: float) -> float:
    """Seconds until no agent is left there."""
    began = time.monotonic()
    while time.monotonic() < began + within and node.running("launcher.agent"):
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.parametrize("driver_timeout", ["0", pytest.param("300", marks=pytest.mark.night)])
def test_the_driver_s_cable_is_out_for_ten_seconds_and_nobody_is_lost(
    cluster: Cluster, driver_timeout: str
) -> None:
    options = (*FOUR, "--driver-timeout", driver_timeout)
    with elasticrun_on(cluster, *options, defaults=True) as job:
        job.together(4, within=BEGINS_S)
        begun, began = last_step(job), time.monotonic()
        cluster.node("head").cut()
        job.until(lambda: last_step(job) > begun + CONTINUED, "steps while it is out")
        job.until(lambda: time.monotonic() > began + AWAY_S, "ten seconds", within=AWAY_S + 5)
        before = last_step(job)
        cluster.node("head").heal()
        job.until(lambda: last_step(job) > before + CONTINUED, "steps after it")
        done = cluster.run(
            "head", *CTL, "scale", "3", "--run-id", job.run_id, "--state-dir", state_dir(job)
        )
        assert done.returncode == 0, done.stderr
        job.together(3, above=1)
        assert job.events("agent_lost") == [], job.describe()
        assert job.events("worker_lost") == [], job.describe()
        job.check_steps(set())


def test_a_host_that_is_cut_off_alone_ends_and_the_others_train_on(cluster: Cluster) -> None:
    with elasticrun_on(cluster, *FOUR, "--driver-timeout", "300", defaults=True) as job:
        job.together(4, within=BEGINS_S)
        node = cluster.node("node2")
        node.cut()
        took = seconds_to_end(node, 20.0)
        print(f"ended after {took:.2f} s")
        assert took < ENDS_S + BUSY_S, job.describe()
        job.together(3, above=1)
        job.check_steps({"node2"})


def test_of_two_halves_the_one_without_the_driver_ends(cluster: Cluster) -> None:
    with elasticrun_on(cluster, *FOUR, "--driver-timeout", "300", defaults=True) as job:
        job.together(4, within=BEGINS_S)
        apart = [cluster.node("node2"), cluster.node("node3")]
        _, switch, _ = apart[0].cable()
        _ip(switch, "link", "add", "br1", "type", "bridge", "forward_delay", "0")
        _ip(switch, "link", "set", "br1", "up")
        for node in apart:
            _ip(switch, "link", "set", node.cable()[2], "master", "br1")
        began = now()
        for node in apart:
            seconds_to_end(node, 20.0)
        print(f"ended after {now() - began:.2f} s")
        assert now() - began < ENDS_S + BUSY_S, job.describe()
        job.together(2, above=1)
        job.check_steps({"node2", "node3"})


def test_hosts_train_on_without_a_driver_and_end_together_when_none_comes(
    cluster: Cluster,
) -> None:
    options = (*FOUR, "--driver-timeout", "12")
    with elasticrun_on(cluster, *options, defaults=True) as job:
        job.together(4, within=BEGINS_S)
        job.signal(signal.SIGKILL)
        begun = last_step(job)
        job.until_without_driver(lambda: last_step(job) > begun + CONTINUED, "steps without it")
        job.until_nothing_is_left(60.0)
        job.check_steps(set())
        ends = {max(r.step for r in job.steps() if r.worker == w) for w in workers(job)}
        assert len(ends) == 1, f"they left after different steps: {ends}"


def workers(job: ClusterJob) -> set[str]:
    return {r.worker for r in job.steps()}


def _ip(netns: str, *argv: str) -> None:
    subprocess.run(["ip", "-n", netns, *argv], check=True)
