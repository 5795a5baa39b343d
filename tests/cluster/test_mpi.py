"""A real mpirun brings agents to two hosts, or starts us on both."""

from __future__ import annotations

import signal
from importlib.util import find_spec

import pytest

from tests.support import mpi
from tests.support.cluster import Cluster
from tests.support.cluster_job import elasticrun_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

AGENT = "launcher.agent"
_REASON = mpi.why_not()


@pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
def test_agents_outlive_mpirun_and_are_started_again_by_another_one() -> None:
    args = ("--backend", "mpi", "-H", "node0:1,node1:1", "--min-np", "1")
    with Cluster(2) as cluster, elasticrun_on(cluster, *args, env=mpi.ENVIRON) as job:
        before = job.together(2)
        node = cluster.node("node1")
        (run,) = (p for p in cluster.node("head").running(" node1:1 ") if p.name() == "mpirun")
        run.kill()
        job.until(lambda: "lost the mpirun connection to node1" in job.stderr, "it is said")
        assert job.together(2)[0].round == before[0].round
        ranks = [process.environ() for process in node.running("train.py")]
        assert ranks
        theirs = {name for env in ranks for name in env if name.startswith(("OMPI_", "PMIX_"))}
        assert theirs <= mpi.ENVIRON.keys(), "the user's settings, and nothing of a rank"
        node.running(" --endpoint ")[0].kill()
        job.wait_event("agent_lost", "node1")
        job.together(2, above=before[0].round)
        job.check_steps({"node1"})
        job.signal(signal.SIGINT)
        assert job.wait(90) == 130, job.describe()
        job.until_nothing_is_left()


@pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
def test_agents_outlive_the_driver_and_the_next_one_adopts_them() -> None:
    args = ("--backend", "mpi", "-H", "node0:1,node1:1", "--min-np", "1")
    with Cluster(2) as cluster, elasticrun_on(cluster, *args, env=mpi.ENVIRON) as job:
        before = job.together(2)[0].round
        job.known_to_train()
        job.kill_driver()
        job.train_on(2)
        job.resume()
        job.train_on(2)
        assert job.newest_round() == before, f"the world has changed: {job.describe()}"
        cluster.node("node1").running(f"-m {AGENT} ")[0].kill()
        job.wait_event("agent_lost", "node1")
        job.together(2, above=before)
        job.check_steps({"node1"})
        job.signal(signal.SIGINT)
        assert job.wait(90) == 130, job.describe()
        job.until_nothing_is_left()


@pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed (extra `mpi`)")
def test_ranks_of_an_outer_mpirun_find_each_other_and_rank_0_runs_the_job() -> None:
    outer = ("mpirun", "-np", "2", "-H", "node0:1,node1:1", "--mca", "btl", "tcp,self")
    args = ("--backend", "mpi", "--min-np", "1")
    with (
        Cluster(2) as cluster,
        elasticrun_on(cluster, *args, inside=outer, env=mpi.ENVIRON, steps=30) as job,
    ):
        assert job.wait(120) == 0, job.describe()
        assert job.stdout.count("done step=30") == 2, job.describe()
        assert {r.worker for r in job.steps()} == {"node0.0.1", "node1.0.1"}
        job.until_nothing_is_left()
