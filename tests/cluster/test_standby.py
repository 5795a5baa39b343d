"""The driver's host loses power, and a standby on another host goes on with its job.

Real sshds, agents, gloo groups and an etcd of three members, which are not on the driver's host.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.cluster import why_not as why_no_cluster
from tests.support.cluster_job import ClusterJob, elasticrun_on, now
from tests.support.etcd import EtcdCluster, why_not
from tests.support.job import eventually
from tests.support.json_lines import JsonLines
from tests.support.processes import select, signal_each

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

LEASE_S = 5.0
SLACK_S = 3.0  # for a busy test machine
FOUR = ("-np", "4", "--min-np", "1", "-H", "node[0-3]:1")
ALL = {"node0", "node1", "node2", "node3"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """head, node0 … node3 that train, node4 and node5 for standbys, and node6 with etcd."""
    if (reason := why_no_cluster()) is not None:
        pytest.skip(reason)
    with Cluster(7) as cluster:
        yield cluster


@pytest.fixture
def etcd(cluster: Cluster) -> Iterator[EtcdCluster]:
    """Three members on node6."""
    node, folder = cluster.node("node6"), cluster.folder / "etcd"
    folder.mkdir()
    place = node.address, tuple(node.inside())
    with EtcdCluster(folder, range(2379, 2385), (place,) * 3) as etcd:
        yield etcd


@dataclass
class Standby:
    """An `elasticrun --standby` on a node."""

    process: subprocess.Popen[bytes]
    host: str
    folder: Path

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def events(self) -> list[dict[str, Any]]:
        """What it has logged as the driver."""
        logs = self.folder.glob("state/*/events.jsonl")
        return [event for log in logs for event in JsonLines(log, dict).read()]

    def resumed(self) -> float | None:
        """When it went on with the job (unix s)."""
        return next((e["t"] for e in self.events() if e["event"] == "driver_resumed"), None)

    def until_said(self, text: str, within: float = 30.0) -> None:
        eventually(
            lambda: text in self.stderr, within=within, what=text, context=lambda: self.stderr
        )


def stand_by(cluster: Cluster, job: ClusterJob, etcd: EtcdCluster, host: str) -> Standby:
    """Start a standby for a job."""
    folder = job.folder / host
    folder.mkdir()
    argv = [sys.executable, "-m", "launcher.cli", "--standby", "--run-id", job.run_id]
    argv += ["--state-dir", str(folder / "state"), "--journal", etcd.url]
    process = cluster.start(
        host,
        argv,
        out=folder / "stdout",
        err=folder / "stderr",
        env={"HOME": str(folder)},
    )
    return Standby(process, host, folder)


def longest_pause(job: ClusterJob, since: float) -> float:
    """The longest time between two steps of one worker after `since` (unix s)."""
    times: dict[str, list[float]] = {}
    for record in job.steps():
        if record.t >= since:
            times.setdefault(record.worker, []).append(record.t)
    return max(b - a for each in times.values() for a, b in pairwise(sorted(each)))


def kill_worker(cluster: Cluster, host: str) -> None:
    workers = select(
        cluster.node(host).running("train.py"), lambda p: "ELASTIC_WORKER_ID" in p.environ()
    )
    signal_each(workers, signal.SIGKILL)


def test_standbys_take_over_one_after_the_other_when_the_drivers_host_loses_power(
    cluster: Cluster, etcd: EtcdCluster
) -> None:
    with elasticrun_on(cluster, *FOUR, "--journal", etcd.url) as job:
        job.together(4)
        standbys = [stand_by(cluster, job, etcd, host) for host in ("node4", "node5")]
        for standby in standbys:
            standby.until_said("waits beside driver 1 (host head, process")
        usual = longest_pause(job, 0.0)

        # The first loss: nothing changes meanwhile, so no worker notices.
        at = now()
        cluster.node("head").poweroff()

        def taken() -> Standby | None:
            return next((s for s in standbys if "goes on after event" in s.stderr), None)

        second = eventually(
            taken,
            within=LEASE_S + 10,
            what="a standby has taken over",
            context=lambda: "\n".join(s.stderr for s in standbys),
        )
        (third,) = (s for s in standbys if s is not second)
        third.until_said(f"waits beside driver 2 (host {second.host}, process")
        job.process.wait(10)
        job.process = second.process
        resumed = eventually(
            second.resumed, within=20, what="resumed", context=lambda: second.stderr
        )
        print(f"resumed after {resumed - at:.2f} s")
        assert resumed - at < LEASE_S + 1.0 + SLACK_S
        job.together(4, above=0)
        pause = longest_pause(job, at)
        print(f"longest pause {pause:.2f} s, usually {usual:.2f} s")
        assert pause < usual + 1.0
        assert job.newest_round() == 1

        # The second one: a worker dies at the same moment.
        before = job.newest_round()
        at = now()
        cluster.node(second.host).poweroff()
        job.process.wait(10)
        job.process = third.process
        kill_worker(cluster, "node1")
        job.together(4, above=before)
        served = next(e["t"] for e in third.events() if e["event"] == "round_completed") - at
        print(f"trained on after {job.first_step_after(before, ALL - {'node1'}) - at:.2f} s")
        print(f"a membership change was served after {served:.2f} s")
        assert served < LEASE_S + 1.0 + SLACK_S
        job.check_steps({"node1"})

        for process in cluster.node(third.host).running("launcher.cli"):
            process.send_signal(signal.SIGINT)
        assert third.process.wait(30) == 130, third.stderr
        eventually(
            lambda: set(job.left_behind()) <= {"node6"},  # with etcd
            within=15,
            what="nothing is left",
            context=lambda: f"{job.left_behind()}\n{third.stderr}",
        )
