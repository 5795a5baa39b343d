"""The same command on three machines: one leaves and returns, one is lost, the server restarts."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from elastic_driver.contract import host_of_worker
from elastic_driver.token_roles import agent_token, node_token
from launcher.join.driver_search import derive
from rendezvous.auth import read_token_file, write_token_file
from tests.support.capture import captured
from tests.support.cluster import Cluster, Node
from tests.support.cluster_job import HEARTBEAT_S, ClusterJob
from tests.support.etcd import EtcdCluster
from tests.support.etcd import why_not as why_no_etcd
from tests.support.job import ROOT, eventually
from tests.support.processes import select, signal_each

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PORT = 29400
HOSTS = ("node0", "node1", "node2")


class Site:
    """Nodes of a cluster on which the same command is started."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.folder = cluster, Path(cluster.folder, "job")
        (self.folder / "steps").mkdir(parents=True)
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._started:
            process.kill()
            process.wait(10)

    def run(self, host: str) -> subprocess.Popen[bytes]:
        """`elasticrun` on this host, as its own service would start it."""
        at = ("--rdzv-id", "job", "--nnodes", "2:3", "--rdzv-endpoint", f"node0:{PORT}")
        return self.start(host, *at, *self.training(), name="" if host == "node0" else host)

    def training(self) -> tuple[str, ...]:
        """The settings of the job, and its command."""
        return (
            *("--state-dir", str(self.folder / "state")),
            *("--heartbeat-timeout", str(HEARTBEAT_S), "--debug"),
            *("--blacklist-cooldown-range", "1", "4", "--env", "STEPS=100000"),
            *("--env", "STEP_MS=20", "--env", f"STEP_RECORDS={self.folder / 'steps'}"),
            *("--", str(ROOT / "tests" / "e2e" / "jobs" / "train.py")),
        )

    def start(self, host: str, *args: str, name: str) -> subprocess.Popen[bytes]:
        """`elasticrun ARGS…` on a host; `name` of the files with what it says, "" for the job's."""
        argv = [sys.executable, "-m", "launcher.cli", *args]
        name = name and f"{name}-{len(self._started)}-"
        out, err = self.folder / f"{name}stdout", self.folder / f"{name}stderr"
        env = {"HOME": str(self.folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        process = self.cluster.start(host, argv, out=out, err=err, env=env)
        self._started.append(process)
        return process

    def job(self, server: subprocess.Popen[bytes]) -> ClusterJob:
        job = ClusterJob(server, "job", self.folder)
        job.cluster = self.cluster
        return job


def signal_launcher(node: Node, number: signal.Signals) -> None:
    """Signal `elasticrun` itself on a node."""
    launchers = select(node.processes(), lambda process: "launcher.cli" in process.cmdline())
    signal_each(launchers, number)


def test_the_same_command_on_three_hosts_one_of_which_leaves_and_one_is_lost(
    cluster: Cluster,
) -> None:
    _, switch, port = cluster.node("node1").cable()
    seen = cluster.folder / "frames"
    with Site(cluster) as site, captured(switch, port, seen):
        late = {host: site.run(host) for host in HOSTS[1:]}  # before there is a server
        job = site.job(site.run("node0"))
        records = job.together(3)
        token = read_token_file(job.run_dir / "token")
        assert {host_of_worker(r.worker) for r in records} == set(HOSTS)

        before = job.newest_round()
        signal_launcher(cluster.node("node1"), signal.SIGTERM)
        job.together(2, above=before)
        assert late["node1"].wait(60) == 143
        assert not job.events("agent_lost", "worker_lost")
        job.check_steps(set())

        late["node1"] = site.run("node1")
        job.together(3, above=job.newest_round())
        assert_hidden(seen.read_bytes(), token)
        before = job.newest_round()
        cluster.node("node2").poweroff()
        job.together(2, above=before)
        job.check_steps({"node2"})

        signal_launcher(cluster.node("node0"), signal.SIGINT)
        assert job.wait(60) == 130
        assert late["node1"].wait(60) == 130
        job.until_nothing_is_left()


def assert_hidden(frames: bytes, token: str) -> None:
    """Nothing of the rendezvous can be read: no secret, no order, no state, no route."""
    assert frames.count(b"\x17\x03\x03") > 100, "records of TLS, from the node and its workers"
    secrets = (token, agent_token(token, "node1"), node_token(token, "node1"), derive("job"))
    ours = ("agent:node1", "Bearer", "/v1/", "job/spec", "agents/", "workers/", "rounds/", "nodes/")
    for word in (*secrets, *ours):
        assert word.encode() not in frames, word


def test_the_servers_host_restarts_and_the_job_goes_on_with_the_others(cluster: Cluster) -> None:
    with Site(cluster) as site:
        job = site.job(site.run("node0"))
        others = [site.run(host) for host in HOSTS[1:]]
        job.together(3)
        before = job.newest_round()
        old = workers_on(cluster, HOSTS[1:])
        assert old
        cluster.node("node0").poweroff()
        cluster.node("node0").heal()
        cluster.node("node0").boot()
        job = site.job(site.run("node0"))  # the same command resumes the job
        job.together(3, above=before)
        assert all(map(psutil.pid_exists, old)), "the workers of the others have lived on"
        assert job.events("driver_resumed")
        job.check_steps({"node0"})
        signal_launcher(cluster.node("node0"), signal.SIGINT)
        assert job.wait(60) == 130
        assert [other.wait(60) for other in others] == [130, 130]
        job.until_nothing_is_left()


@pytest.mark.skipif(why_no_etcd() is not None, reason=why_no_etcd() or "")
def test_a_standby_takes_over_on_another_host_and_the_nodes_find_it(cluster: Cluster) -> None:
    place = cluster.node("node3").address, tuple(cluster.node("node3").inside())
    data = cluster.folder / "etcd"
    data.mkdir()
    with Site(cluster) as site, EtcdCluster(data, range(2379, 2381), (place,)) as etcd:
        secret = ("--token-file", str(write_token_file(site.folder / "secret", "s" * 32)))
        kept = ("--run-id", "job", "--journal", etcd.url, *secret)
        serve = ("--serve", "--nnodes", "1:2", *kept, *site.training())
        job = site.job(site.start("head", *serve, name=""))
        nodes = [
            site.start(host, "--join", "head", *secret, name=host) for host in ("node0", "node1")
        ]
        job.together(2, within=120)
        state = ("--state-dir", str(site.folder / "other state"))
        standby = site.start("node2", "--standby", *kept[:4], *state, name="standby")
        said = next(site.folder.glob("standby-*stderr"))
        eventually(lambda: "waits beside driver 1" in said.read_text(), within=120, what="it waits")
        workers = workers_on(cluster, HOSTS[:2])

        cluster.node("head").poweroff()
        job.process.wait(10)
        events = site.folder / "other state" / "job" / "events.jsonl"
        eventually(
            lambda: events.exists() and "driver_resumed" in events.read_text(),
            within=60,
            what="the standby goes on with the job",
            context=said.read_text,
        )
        job.process = standby
        before = job.newest_round()
        job.train_on(2)
        assert workers
        assert all(map(psutil.pid_exists, workers)), "training has not paused"
        eventually(
            lambda: events.read_text().count('"agent_returned"') == 2,
            within=60,
            what="both agents have found the new driver",
            context=said.read_text,
        )
        signal_launcher(cluster.node("node1"), signal.SIGTERM)
        job.together(1, above=before)
        assert nodes[1].wait(60) == 143
        signal_launcher(cluster.node("node2"), signal.SIGINT)
        assert standby.wait(60) == 130, said.read_text()
        assert nodes[0].wait(60) == 130, "it has heard from the new driver how the job has ended"
        eventually(lambda: set(job.left_behind()) <= {"node3"}, within=15, what="only etcd is left")


def workers_on(cluster: Cluster, hosts: Sequence[str]) -> set[int]:
    """The pids of the workers that live on these hosts."""
    found = (process for host in hosts for process in cluster.node(host).processes())
    return {p.pid for p in select(found, lambda p: "ELASTIC_WORKER_ID" in p.environ())}
