"""A node check names the host that is slow for real: its processor, or its link."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from elastic_driver.contract import host_of_worker
from tests.support.cluster import Cluster
from tests.support.cluster_job import elasticrun_on
from tests.support.job import ROOT
from tests.support.shaping import narrow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HOSTS = ("node0", "node1", "node2")


def check(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Return what `elasticctl check` on the head says of each host."""
    own = {"PYTHONPATH": ROOT, "PATH": os.environ["PATH"], "HOME": cluster.folder}
    env = ("env", f"--chdir={ROOT}", *(f"{name}={value}" for name, value in own.items()))
    argv = (sys.executable, "-m", "launcher.ctl", "check", "--straggler-detection")
    done = cluster.run("head", *env, *argv, "--log-format", "json", *HOSTS, timeout=240)
    assert done.stdout, done.stderr
    print(done.stdout)
    return {node["node"]: node for node in json.loads(done.stdout)["nodes"]}


def test_a_job_starts_without_the_host_that_has_a_quarter_of_a_processor(cluster: Cluster) -> None:
    args = ("--network-check", "--exclude-straggler", "-H", "node[0-2]:1", "-np", "3")
    with (
        cluster.node("node2").slow_cpu(0.25),
        elasticrun_on(cluster, *args, "--min-np", "2", steps=10) as job,
    ):
        assert job.wait(240) == 0, job.describe()
        report = json.loads((job.run_dir / "node_check.json").read_text())
        verdicts = {node["node"]: node["verdict"] for node in report["nodes"]}
        assert verdicts == {**dict.fromkeys(HOSTS, "good"), "node2": "straggler"}, job.describe()
        trained_on = {host_of_worker(record.worker) for record in job.steps()}
        assert trained_on == {"node0", "node1"}


def test_the_host_behind_a_narrow_link_is_named(cluster: Cluster) -> None:
    with narrow(cluster.node("node1"), "100mbit"):
        found = check(cluster)
    assert {host: node["verdict"] for host, node in found.items()} == {
        **dict.fromkeys(HOSTS, "good"),
        "node1": "straggler",
    }
    times = {host: node["network"] for host, node in found.items()}
    assert times["node1"] > 2 * max(times[host] for host in HOSTS if host != "node1")
