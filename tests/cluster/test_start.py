"""What is wrong with hosts is said before anything starts, and the others are enough or not."""

from __future__ import annotations

import psutil
import pytest

from tests.support.cluster import Cluster, why_not
from tests.support.cluster_job import elasticrun_on
from tests.support.processes import read_each

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_too_few_fit_hosts_are_told_one_line_each_and_end_with_75(cluster: Cluster) -> None:
    cluster.node("node1").kill()
    with elasticrun_on(cluster, "-np", "3", "-H", "node[0-1]:1,nosuch:1") as job:
        assert job.wait(60) == 75
        lines = job.stderr.splitlines()
        assert sum(line.startswith("elasticrun: node1: ") for line in lines) == 1
        assert sum(line.startswith("elasticrun: nosuch: ") for line in lines) == 1
        assert "1 slot is left and 3 needed" in lines[-1]
        assert not job.events()


def test_a_job_begins_without_a_host_that_failed_the_check_when_it_may(cluster: Cluster) -> None:
    cluster.node("node2").kill()
    args = ("-np", "4", "--min-np", "3", "-H", "node[0-3]:1")
    with elasticrun_on(cluster, *args, steps=30) as job:
        assert job.wait(90) == 0, job.describe()
        assert job.rounds()[0] == 3
        assert "elasticrun: node2: " in job.stderr


def test_workers_talk_over_the_interface_that_leads_to_the_rendezvous(cluster: Cluster) -> None:
    with elasticrun_on(cluster, "-np", "2", "-H", "node0:1,node1:1") as job:
        job.together(2)
        born_with = read_each(cluster.node("node1").processes(), psutil.Process.environ)
        variables = next(env for _, env in born_with if "ELASTIC_WORKER_ID" in env)
        assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == "eth0"
        assert variables["MASTER_ADDR"] == cluster.node("node0").address
        assert variables["ELASTIC_RENDEZVOUS"].startswith("https://10.99.0.1:")


def test_hosts_that_have_ipv6_alone_train_together() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    hosts = ("-np", "2", "-H", "node[0-1]:1")
    with Cluster(2, ipv6=True) as cluster, elasticrun_on(cluster, *hosts, steps=30) as job:
        assert job.wait(110) == 0, job.describe()
        assert [e["reason"][:8] for e in job.events("agent_started")] == ["at fd99:", "at fd99:"]
        assert job.stdout.count("done step=30") == 2
        assert job.left_behind() == {}


def test_two_names_of_a_machine_are_one_host_and_machines_that_share_a_kernel_are_not(
    cluster: Cluster,
) -> None:
    hosts = f"node0:1,NODE0:1,{cluster.node('node0').address}:1,node1:1"
    with elasticrun_on(cluster, "-np", "4", "-H", hosts, steps=30) as job:
        assert job.wait(90) == 0, job.describe()
        assert job.stdout.count("done step=30") == 4
        removed = {event["host"]: event["reason"] for event in job.events("host_removed")}
        assert sorted(removed) == sorted({"NODE0", cluster.node("node0").address})
        # The agent of NODE0 may be up before that of node0: then it is the first name, for a while.
        assert all("is the same machine as " in reason for reason in removed.values())
        (round_,) = job.events("round_completed")
        assert (round_["size"], round_["hosts"]) == (4, 2)
        assert "host NODE0 removed (it is the same machine as node0" in job.stderr
