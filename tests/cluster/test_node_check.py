"""A node check names the host that is slow for real: its processor, or its link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.contract import host_of_worker
from tests.support.cluster import Cluster
from tests.support.cluster_job import HEARTBEAT_S, elasticrun_on
from tests.support.job import ROOT
from tests.support.shaping import narrow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HOSTS = ("node0", "node1", "node2")


def check(cluster: Cluster, *flags: str) -> dict[str, dict[str, Any]]:
    """Return what `elasticctl check` on the head says of each host."""
    own = {"PYTHONPATH": ROOT, "PATH": os.environ["PATH"], "HOME": cluster.folder}
    env = ("env", f"--chdir={ROOT}", *(f"{name}={value}" for name, value in own.items()))
    argv = (sys.executable, "-m", "launcher.ctl", "check", *flags)
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


@pytest.mark.night
def test_the_host_behind_a_narrow_link_is_named(cluster: Cluster) -> None:
    with narrow(cluster.node("node1"), "100mbit"):
        found = check(cluster, "--straggler-detection")
    assert {host: node["verdict"] for host, node in found.items()} == {
        **dict.fromkeys(HOSTS, "good"),
        "node1": "straggler",
    }
    times = {host: node["network"] for host, node in found.items()}
    assert times["node1"] > 2 * max(times[host] for host in HOSTS if host != "node1")


def test_a_slow_host_is_named_although_no_flag_asks_for_slow_hosts(cluster: Cluster) -> None:
    with narrow(cluster.node("node1"), "100mbit"):
        found = check(cluster)
    # On a busy machine a host may also compute slowly for real; links are not shared.
    assert {host for host, node in found.items() if "network takes" in node["reason"]} == {"node1"}
    assert found["node1"]["verdict"] == "straggler"


def test_four_nodes_that_run_one_command_name_the_slow_and_the_broken_one(cluster: Cluster) -> None:
    folder = Path(cluster.folder, "job")
    (folder / "broken" / "torch").mkdir(parents=True)
    (folder / "steps").mkdir()
    (folder / "broken" / "torch" / "__init__.py").write_text("raise OSError('no libcudart.so.12')")

    def start(host: str) -> subprocess.Popen[bytes]:
        job_env = {"STEPS": "20", "STEP_MS": "20", "STEP_RECORDS": str(folder / "steps")}
        argv = [
            *(sys.executable, "-m", "launcher.cli", "--rdzv-id", "job", "--nnodes", "3:4"),
            *("--state-dir", str(folder / "state"), "--rdzv-endpoint", "node0:29400"),
            *("--network-check", "--debug", "--heartbeat-timeout", str(HEARTBEAT_S)),
            *(word for item in job_env.items() for word in ("--env", "=".join(item))),
            *("--", str(ROOT / "tests" / "e2e" / "jobs" / "train.py")),
        ]
        path = f"{folder / 'broken'}:{ROOT}" if host == "node3" else str(ROOT)
        env = {"HOME": str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        out, err = folder / f"{host}-stdout", folder / f"{host}-stderr"
        return cluster.start(host, argv, out=out, err=err, env=env)

    with narrow(cluster.node("node2"), "100mbit"):
        nodes = [start(f"node{number}") for number in (3, 2, 1, 0)]
        codes = [node.wait(240) for node in nodes]
    said = (folder / "node0-stderr").read_text()
    assert codes == [0] * 4, said
    report = json.loads((folder / "state" / "job" / "node_check.json").read_text())
    found = {node["node"]: node for node in report["nodes"]}
    assert {host for host, node in found.items() if "network takes" in node["reason"]} == {"node2"}
    assert [found[host]["verdict"] for host in ("node2", "node3")] == ["straggler", "faulty"], said
    assert "1 faulty (node3)" in said
    assert "no libcudart.so.12" in said
    assert "node check: measured node" in said
    trained_on = {host_of_worker(path.stem) for path in (folder / "steps").iterdir()}
    assert trained_on == {"node0", "node1", "node2"}
