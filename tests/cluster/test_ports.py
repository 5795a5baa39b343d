"""Hosts behind a firewall that lets through ssh and the ports of --ports, and nothing else."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import slurm as real_slurm
from tests.support.cluster import Cluster
from tests.support.job import ROOT
from tests.support.slurm import Slurm
from tests.support.tensorflow import tensorflow_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PORTS = "29400-29463"
OPEN = PORTS.replace("-", ":")
JOBS = ROOT / "tests" / "e2e" / "jobs"


@contextlib.contextmanager
def site(count: int, ports: str = OPEN) -> Iterator[Cluster]:
    """head and node0 … behind their firewalls."""
    with Cluster(count) as cluster:
        for node in cluster.nodes.values():
            node.firewall("22", ports)
        (cluster.folder / "steps").mkdir()
        yield cluster


def run(
    cluster: Cluster, *args: str, host: str = "head", timeout: float = 150.0
) -> subprocess.CompletedProcess[str]:
    """`elasticrun ARGS…` on a host, to its end."""
    argv = (*launcher(cluster), "--state-dir", str(cluster.folder / "state"), *args)
    return cluster.run(host, *argv, timeout=timeout)


def launcher(cluster: Cluster) -> tuple[str, ...]:
    home = f"HOME={cluster.folder}"
    return ("env", home, f"PYTHONPATH={ROOT}", sys.executable, "-m", "launcher.cli")


def plain(cluster: Cluster, steps: int = 5) -> tuple[str, ...]:
    """A script of torch alone."""
    env = ("--env", f"STEPS={steps}", "--env", f"STEP_RECORDS={cluster.folder / 'steps'}")
    return (*env, "--", str(JOBS / "plain.py"))


def elastic(cluster: Cluster, steps: int = 5) -> tuple[str, ...]:
    """A script of our API."""
    env = ("--env", f"STEPS={steps}", "--env", f"STEP_RECORDS={cluster.folder / 'steps'}")
    return (*env, "--", str(JOBS / "train.py"))


SUMS_OF_HOROVOD = """
import torch, horovod.torch as hvd
hvd.init()
print(f"sum {int(hvd.allreduce(torch.ones(1), op=hvd.Sum))}", flush=True)
hvd.shutdown()
"""
TWO = ("-np", "4", "-H", "node[0-1]:2")


@pytest.mark.parametrize("warm", ["1", pytest.param("0", marks=pytest.mark.night)])
def test_plain_scripts_meet_over_ssh(warm: str) -> None:
    with site(2) as cluster:
        done = run(cluster, "--ports", PORTS, "--warm", warm, *TWO, *plain(cluster))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("plain done restarts=0 size=4") == 4, done.stdout


def test_elastic_scripts_meet_after_a_node_check() -> None:
    with site(2) as cluster:
        done = run(cluster, "--ports", PORTS, "--network-check", *TWO, *elastic(cluster))
        assert done.returncode == 0, done.stderr
        assert "node check: 2 good" in done.stderr + done.stdout
        assert "excluded" not in done.stderr


@pytest.mark.night
def test_a_node_check_listens_at_the_ports_of_the_job() -> None:
    with Cluster(2) as cluster:
        (cluster.folder / "steps").mkdir()
        for one, other in (("node0", "node1"), ("node1", "node0")):
            cluster.node(one).refuse_from(cluster.node(other), OPEN)
        check = (
            "--ports",
            PORTS,
            "--network-check",
            "--check-timeout",
            "15",
            "--start-timeout",
            "15",
        )
        done = run(cluster, *check, *TWO, *elastic(cluster))
        assert done.returncode == 75, done.stderr
        assert "node check: 2 good" not in done.stderr + done.stdout


def test_nodes_join_at_the_last_port_of_a_range_without_the_usual_one() -> None:
    with site(2, "30000:30063") as cluster:
        args = (*("--ports", "30000-30063", "--run-id", "j", "--nnodes", "2"), *plain(cluster))
        out, err = cluster.folder / "out", cluster.folder / "err"
        serve = [*launcher(cluster), "--serve", "--state-dir", str(cluster.folder / "s"), *args]
        server = cluster.start("head", serve, out=out, err=err, env={})
        try:
            nodes = [
                cluster.start(
                    f"node{n}",
                    [*launcher(cluster), "--join", "head:30063", "--run-id", "j"],
                    out=out,
                    err=err,
                    env={},
                )
                for n in range(2)
            ]
            assert server.wait(120) == 0, err.read_text()
            assert [node.wait(60) for node in nodes] == [0, 0]
        finally:
            for process in (server, *nodes):
                process.kill()
        assert out.read_text().count("plain done restarts=0 size=2") == 2


def test_scripts_of_horovod_meet() -> None:
    with site(2) as cluster:
        script = cluster.folder / "sums.py"
        script.write_text(SUMS_OF_HOROVOD)
        done = run(cluster, "--ports", PORTS, "--horovod", *TWO, "--", str(script))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("sum 4") == 4


def test_servers_of_tensorflow_meet() -> None:
    python = tensorflow_python()
    with site(2) as cluster:
        args = (*("--ports", PORTS, "-np", "2", "-H", "node[0-1]:1"), "--tf-config")
        script = (python, str(JOBS / "tf_collective.py"))
        done = run(cluster, *args, "--env", "START=0", "--", *script, timeout=280)
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stdout.count("total 2") == 2


def test_agents_that_slurm_starts_meet() -> None:
    if reason := real_slurm.why_not():
        pytest.skip(reason)
    with site(2) as cluster:
        for node in cluster.nodes.values():
            node.heal()
            node.firewall("22", OPEN, *real_slurm.PORTS)
        slurm = Slurm(cluster)
        slurm.start()
        env = (f"HOME={cluster.folder}", f"PYTHONPATH={ROOT}")
        line = (*("env", *env, "salloc", "-Q", "-N2", "--ntasks-per-node=1"), sys.executable)
        args = ("-m", "launcher.cli", "--ports", PORTS, *plain(cluster))
        out = slurm.run("head", *line, *args, timeout=120)
        assert out.count("plain done restarts=0 size=2") == 2


def test_two_hosts_that_do_not_reach_each_other_are_named_with_port_and_direction() -> None:
    with Cluster(3) as cluster:
        (cluster.folder / "steps").mkdir()
        for one, other in (("node0", "node1"), ("node1", "node0")):
            cluster.node(one).refuse_from(cluster.node(other), OPEN)
        three = ("--ports", PORTS, "-np", "3", "-H", "node[0-2]:1", "--start-timeout", "40")
        done = run(cluster, *three, *elastic(cluster))
        assert done.returncode == 75, done.stderr
        last = done.stderr.splitlines()[-1]
        found = re.search(r"(node[01]) gets no answer from (node[01]) \(.*TCP port (\d+)", last)
        assert found is not None, done.stderr
        assert {found[1], found[2]} == {"node0", "node1"}
        assert int(found[3]) in range(29400, 29464)
        assert "docs/firewalls.md" in last


def test_interfaces_are_chosen_on_the_hosts() -> None:
    with Cluster(2) as cluster:
        (cluster.folder / "steps").mkdir()
        for node, name in (("node0", "ib0"), ("node1", "ib1")):
            cluster.node(node).rename_interface(name)
        two = ("-np", "2", "-H", "node[0-1]:1", "--start-timeout", "40")
        done = run(cluster, "--network-interfaces", "ib0,ib1", *two, *elastic(cluster))
        assert done.returncode == 0, done.stderr
        done = run(cluster, "--network-interfaces", "ib0", *two, *plain(cluster))
        assert "node1 has no interface ib0 with an address" in done.stderr
        assert "it has ib1, lo" in done.stderr


def test_a_range_that_is_too_small_is_named() -> None:
    with Cluster(2) as cluster:
        (cluster.folder / "steps").mkdir()
        # A host needs one for probes, one for a store, and one for gloo of each of two workers.
        done = run(cluster, "--ports", "29400-29403", *TWO, *plain(cluster))
        assert done.returncode == 0, done.stderr
        done = run(cluster, "--ports", "29400-29402", *TWO, *plain(cluster))
        assert done.returncode != 0
        assert "no port of --ports 29400-29402 is free on node" in done.stderr
        assert "for gloo of rank" in done.stderr
