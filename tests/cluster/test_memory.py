"""A worker that outgrows the memory of its host, for real: the kernel kills it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.brain import elasticbrain_on
from tests.support.cluster import Cluster
from tests.support.cluster_job import elasticrun_on
from tests.support.job import ROOT, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MIB = 2**20
SMALL = 700 * MIB  # an agent and a worker that has begun take less than 500
STEPS, GROWTH = 100, 8  # 800 MiB in the end
GROWS = ("--env", f"GROW_MIB={GROWTH}")


def test_a_worker_that_outgrows_a_small_host_finishes_on_a_large_one_after_one_relaunch(
    cluster: Cluster,
) -> None:
    """The host that stands by is as small, so it is passed over."""
    for name in ("node0", "node2"):
        cluster.node(name).limit_memory(SMALL)
    args = ("-H", "node[0-3]:1", "-np", "2", "--min-np", "2", *GROWS)
    with elasticrun_on(cluster, *args, steps=STEPS) as job:
        assert job.wait(240) == 0, job.describe()
        (told,) = job.events("out_of_memory")
        assert told["host"] == "node0", job.describe()
        assert 0.3 * SMALL < told["peak"] < 1.5 * SMALL
        assert told["room"] == 0
        starts = [event["host"] for event in job.events("worker_started")]
        assert sorted(starts) == ["node0", "node1", "node3"], "one relaunch, on a large host"
        assert job.events("host_blacklisted") == []
        job.check_steps({"node0"})


def test_two_workers_that_outgrow_their_host_together_go_on_as_one(cluster: Cluster) -> None:
    """The kernel kills one of them; or both, before the first one's memory is free.

    With both of them the state is lost: this job has no checkpoint, so it ends and says so.
    """
    cluster.node("node0").limit_memory(2 * SMALL)
    args = ("-H", "node0:2", "-np", "2", "--min-np", "1", *GROWS)
    with elasticrun_on(cluster, *args, steps=STEPS) as job:
        code = job.wait(240)
        rooms = [told["room"] for told in job.events("out_of_memory")]
        assert rooms[0] == 1, job.describe()
        assert len(job.events("worker_started")) == 1 + len(rooms), (
            "started again as one, if at all"
        )
        if len(rooms) == 1:
            assert code == 0, job.describe()
            assert {r.size for r in job.steps() if r.step == STEPS} == {1}
            job.check_steps(set())
        else:
            assert len(rooms) == 2, job.describe()
            assert code == 75, job.describe()
            (lost,) = job.events("state_lost")
            assert f"the state of step {lost['step']} or later is gone" in job.stderr


def test_a_job_that_no_host_is_large_enough_for_ends_with_one_line(cluster: Cluster) -> None:
    for name in ("node0", "node1"):
        cluster.node(name).limit_memory(SMALL)
    args = ("-H", "node[0-1]:1", "-np", "2", "--min-np", "2", *GROWS)
    with elasticrun_on(cluster, *args, steps=STEPS) as job:
        assert job.wait(240) == 128 + 9, job.describe()
        said = [line for line in job.stderr.splitlines() if "ran out of memory at" in line]
        assert said, job.describe()
        assert "no host has" in said[-1]
        assert "use hosts with more memory" in said[-1]
        assert len(job.events("worker_started")) == 2
        assert os.linesep not in said[-1]


# ---- under the Brain -------------------------------------------------------------------------

TWO = ("--min-np", "2", "--max-np", "2", *GROWS)


def test_the_brain_gives_a_job_another_host_for_the_one_that_was_too_small(
    cluster: Cluster,
) -> None:
    """Its other hosts come while the job begins; nobody has measured them, and one is small."""
    pytest.importorskip("scipy")
    for name in ("node0", "node2"):
        cluster.node(name).limit_memory(SMALL)
    hostfile = cluster.folder / "hosts"
    hostfile.write_text("node0 slots=1\nnode1 slots=1\n")
    with (
        elasticbrain_on(cluster, "--hostfile", str(hostfile)) as for_jobs,
        elasticrun_on(cluster, *for_jobs, *TWO, steps=STEPS) as job,
    ):
        job.until(lambda: job.events("hosts_granted"), "slots", 60)
        hostfile.write_text("".join(f"node{n} slots=1\n" for n in range(4)))
        assert job.wait(240) == 0, job.describe()
        (told,) = job.events("out_of_memory")
        assert (told["host"], told["room"]) == ("node0", 0), job.describe()
        starts = [event["host"] for event in job.events("worker_started")]
        assert sorted(starts) == ["node0", "node1", "node3"], "one relaunch, on a large host"
        assert job.events("host_blacklisted") == []
        job.check_steps({"node0"})


def test_a_job_ends_with_one_line_if_the_brain_has_no_host_that_is_large_enough(
    cluster: Cluster,
) -> None:
    pytest.importorskip("scipy")
    for name in cluster.nodes:
        if name != "head":
            cluster.node(name).limit_memory(SMALL)
    with (
        measured(cluster, "node0", "node1", "node2") as database,
        elasticbrain_on(cluster, "-H", "node[0-2]:1", "--stats-db", database) as for_jobs,
        elasticrun_on(cluster, *for_jobs, *TWO, steps=STEPS) as job,
    ):
        assert job.wait(240) == 128 + 9, job.describe()
        said = [line for line in job.stderr.splitlines() if "ran out of memory at" in line]
        assert said, job.describe()
        assert "MiB idle: the largest, node" in said[-1]
        assert len(job.events("worker_started")) == 2, "none was started in vain"


@contextlib.contextmanager
def measured(cluster: Cluster, *names: str) -> Iterator[str]:
    """Have hosts measured by `elasticbrain monitor`; yield the database's address."""
    from elastic_driver.brain.store.address import Address
    from elastic_driver.brain.store.database import Database

    file: Path = cluster.folder / "stats.db"
    monitor = (sys.executable, "-m", "launcher.brain.command", "monitor", "--source", "agents")
    argv = ("env", f"PYTHONPATH={ROOT}", *monitor, "--stats-db", f"sqlite:///{file}")
    out = cluster.folder / "monitor.out"
    # By ssh they belong to the host, and are limited as it is.
    monitors = [
        cluster.start("head", ("ssh", name, *argv), out=out, err=out, env={}) for name in names
    ]
    try:
        eventually(file.exists, within=60, what="a monitor has begun", context=out.read_text)
        database = Database(Address(file=str(file)))
        eventually(
            lambda: len(database.nodes(time.time())) == len(names),
            within=60,
            what="all hosts are measured",
            context=out.read_text,
        )
        database.close()
        yield f"sqlite:///{file}"
    finally:
        for monitor in monitors:
            monitor.kill()
            monitor.wait(10)
