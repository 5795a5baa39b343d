"""The driver of a job on four hosts is killed, hosts change meanwhile, and the next one goes on.

Real sshds and agents; only `elasticrun` is killed, so its ssh clients lose their reader.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from urllib.parse import urlsplit

import psutil
import pytest

from elastic_driver.runtime.run_dir import read_endpoint
from tests.cluster.test_hosts import assert_clean_end
from tests.support.cluster import Cluster
from tests.support.cluster_job import ClusterJob, elasticrun_on, now
from tests.support.job import ROOT, eventually
from tests.support.processes import select

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FOUR = ("-np", "4", "--min-np", "1", "-H", "node[0-3]:1")
SLACK_S = 3.0
EVERYWHERE = "0.0.0.0"  # noqa: S104 - in a network that leads nowhere


def longest_gap(job: ClusterJob, worker: str) -> float:
    """The longest time between two steps of a worker, in seconds."""
    times = [r.t for r in job.steps() if r.worker == worker]
    return max(later - before for before, later in itertools.pairwise(times))


def ssh_clients(job: ClusterJob) -> list[psutil.Process]:
    return select(job.cluster.node("head").processes(), lambda process: process.name() == "ssh")


def test_agents_on_four_hosts_outlive_their_driver_and_the_next_one_adopts_them(
    cluster: Cluster,
) -> None:
    with elasticrun_on(cluster, *FOUR) as job:
        first = job.together(4)
        job.known_to_train()
        for _ in range(3):
            job.kill_driver()
            job.train_on(4)
            job.resume()
            job.train_on(4)
        clients = len(ssh_clients(job))
        assert {r.round for r in job.steps()} == {1}, "the world has never changed"
        gaps = {r.worker: longest_gap(job, r.worker) for r in first}
        print(f"longest time between two steps: {max(gaps.values()):.2f} s; {clients} ssh clients")
        assert max(gaps.values()) < SLACK_S
        assert not job.events("agent_lost", "worker_lost")
        cluster.node("node1").running("launcher.agent --endpoint")[0].kill()
        lost = job.wait_event("agent_lost", "node1")
        assert lost["n"] > job.events("driver_resumed")[-1]["n"]
        job.together(4, above=1)
        job.check_steps({"node1"})
        assert_clean_end(job)


def test_a_driver_whose_port_is_held_calls_the_agents_of_all_hosts(cluster: Cluster) -> None:
    with elasticrun_on(cluster, *FOUR) as job:
        first = job.together(4)
        job.known_to_train()
        job.kill_driver()
        endpoint = read_endpoint(job.run_dir)
        assert endpoint is not None
        place = urlsplit(endpoint.url)
        holder = subprocess.Popen(
            cluster.node("head").inside(
                *(sys.executable, "-m", "tests.support.held_port", EVERYWHERE, str(place.port)),
                cwd=str(ROOT),
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            job.resume()
            assert f"another program holds port {place.port}, so the driver" in job.stderr
            returned = job.until(lambda: len(job.events("agent_returned")) == 4, "all agents")
            assert returned
            job.train_on(4)
            holder.communicate("")
        assert {r.round for r in job.steps()} == {1}, "the world has never changed"
        gaps = {r.worker: longest_gap(job, r.worker) for r in first}
        print(f"longest time between two steps: {max(gaps.values()):.2f} s")
        assert max(gaps.values()) < SLACK_S
        assert not job.events("agent_lost", "worker_lost")
        cluster.node("node1").running("launcher.agent --endpoint")[0].kill()
        job.wait_event("agent_lost", "node1")
        job.together(4, above=1)
        job.check_steps({"node1"})
        assert_clean_end(job)


def test_a_worker_and_a_host_die_while_there_is_no_driver(cluster: Cluster) -> None:
    with elasticrun_on(cluster, *FOUR) as job:
        job.together(4)
        job.kill_driver()
        job.train_on(4)
        cluster.node("node1").running("train.py")[0].kill()
        cluster.node("node2").poweroff()
        resumed = now()
        job.resume()
        job.together(3, above=1)
        print(f"3 workers train {now() - resumed:.1f} s after the start of the next driver")
        cluster.node("node2").heal()
        cluster.node("node2").boot()
        job.together(4, above=job.newest_round())
        job.check_steps({"node1", "node2"})
        assert_clean_end(job)


def test_what_workers_print_while_there_is_no_driver_is_shown_by_the_next_one(
    cluster: Cluster,
) -> None:
    with elasticrun_on(cluster, *FOUR, steps=400) as job:
        job.together(4)
        job.kill_driver()
        done = {"node0.0.1": 400, "node1.0.1": 400, "node2.0.1": 400, "node3.0.1": 400}
        job.until_without_driver(
            lambda: {r.worker: r.step for r in job.steps()} == done, "every worker is done"
        )
        job.resume()
        assert job.wait(60) == 0, job.describe()
        said = [line for line in job.stdout.splitlines() if "done step=400" in line]
        assert sorted(line[:12] for line in said) == [f"[{n}]<stdout>:" for n in range(4)]
        job.until_nothing_is_left()


def test_a_driver_that_never_comes_back_is_waited_for_as_long_as_was_said(
    cluster: Cluster,
) -> None:
    with elasticrun_on(cluster, *FOUR, "--driver-timeout", "5") as job:
        job.together(4)
        job.kill_driver()
        began = now()
        job.train_on(4)
        eventually(
            lambda: not job.left_behind(),
            within=40,
            what="agents and workers have ended",
            context=lambda: f"{job.left_behind()}\n{job.describe()}",
        )
        assert now() - began > 5
