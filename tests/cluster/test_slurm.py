"""A real Slurm on three hosts: agents are its job steps, and it has the last word."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import slurm as real
from tests.support.cluster_job import ClusterJob, elasticrun_on
from tests.support.job import eventually
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# As in a script for sbatch: if the driver is killed, the next one goes on with its job.
AND_AGAIN = '"$@"; exec "$1" -m launcher.cli --resume --run-id "$5" --state-dir "$7"'
ALLOCATION = ("salloc", "--quiet", "--no-kill", "--nodes=2", "--ntasks-per-node=1")


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    """Slurm on head, node0 and node1."""
    with real.running(2) as slurm:
        yield slurm


def find(slurm: Slurm, node: str, words: str) -> psutil.Process:
    """The process on a node whose command line has these words in it."""
    return slurm.cluster.node(node).running(words)[0]


def assert_nothing_left(slurm: Slurm, job: ClusterJob) -> None:
    eventually(
        lambda: not real.left_behind(slurm.cluster),
        within=15,
        what="nothing is left on any node",
        context=lambda: f"{real.left_behind(slurm.cluster)}\n{job.describe()}",
    )


def test_a_killed_agent_is_started_again_and_scancel_leaves_nothing(slurm: Slurm) -> None:
    with elasticrun_on(slurm.cluster, inside=ALLOCATION, env=slurm.environ) as job:
        first = job.together(2)
        assert {r.worker for r in first} == {"node0.0.1", "node1.0.1"}
        find(slurm, "node1", "launcher.agent --endpoint").kill()
        job.together(2, above=first[0].round)
        reason = job.wait_event("agent_lost", "node1")[
            "reason"
        ]  # srun's, or its peer's and a probe's
        assert reason.endswith("was killed by SIGKILL") or "that the agent is gone" in reason
        job.check_steps({"node1"})
        slurm.run("head", "scancel", "1")
        assert job.wait(90) == 143, job.describe()
        # Slurm's SIGTERM to the agents and squeue's answer reach the driver in any order.
        reasons = "every host goes away (its agent got SIGTERM)", "Slurm job 1 is over ("
        assert any(reason in job.stderr.splitlines()[-1] for reason in reasons)
        assert_nothing_left(slurm, job)


def test_nodes_whose_names_have_no_address_are_found_by_slurm_s() -> None:
    names = {"node0": "gpu001", "node1": "gpu002"}
    with (
        real.running(2, names) as slurm,  # its nodes have no default route
        elasticrun_on(slurm.cluster, inside=ALLOCATION, env=slurm.environ) as job,
    ):
        first = job.together(2)
        assert {r.worker for r in first} == {"gpu001.0.1", "gpu002.0.1"}


def test_a_notice_to_all_steps_is_left_with_at_a_step_boundary(slurm: Slurm) -> None:
    args = ("--backend", "slurm", "--grace-period", "20")
    with elasticrun_on(slurm.cluster, *args, inside=ALLOCATION, env=slurm.environ) as job:
        job.together(2)
        slurm.run("head", "scancel", "--signal=USR1", "1")
        assert job.wait(90) == 143, job.describe()
        assert "every host goes away (its agent got SIGUSR1)" in job.stderr.splitlines()[-1]
        job.check_steps(set())
        assert not job.events("worker_lost", "agent_lost")
        last = {r.worker: r.step for r in job.steps()}
        assert len(set(last.values())) == 1, "both have left after the same step"
        assert_nothing_left(slurm, job)


def test_steps_outlive_the_driver_and_the_next_one_in_the_allocation_adopts_them(
    slurm: Slurm,
) -> None:
    inside = (*ALLOCATION, "sh", "-c", AND_AGAIN, "sh")
    with elasticrun_on(slurm.cluster, inside=inside, env=slurm.environ) as job:
        before = job.together(2)[0].round
        job.known_to_train()
        job.kill_driver()
        job.until(lambda: job.events("driver_resumed"), "the next driver begins")
        job.train_on(2)
        assert job.newest_round() == before, "the world has not changed"
        assert not job.events("agent_lost", "worker_lost")
        find(slurm, "node1", "launcher.agent --endpoint").kill()
        job.wait_event("agent_lost", "node1")
        job.together(2, above=before)
        job.check_steps({"node1"})
        job.signal(signal.SIGINT)
        assert job.wait(90) == 130, job.describe()
        assert_nothing_left(slurm, job)


def test_workers_have_the_variables_of_their_array_task(slurm: Slurm) -> None:
    folder = slurm.folder
    names = "ARRAY_TASK_ID CPUS_PER_TASK JOB_NAME SUBMIT_DIR PROCID LOCALID NODEID NTASKS STEP_ID"
    shown = " ".join(f"{name}=$SLURM_{name}" for name in names.split())
    shown += " $SBATCH_ACCOUNT $PWD $(mine)"
    elasticrun = f"{Path(sys.executable).parent}/elasticrun"
    batch = folder / "array.sh"
    batch.write_text(
        "#!/bin/bash\n"
        "mine() { echo a function; }\nexport -f mine\nexport SBATCH_ACCOUNT=acc\n"
        f"{elasticrun} --state-dir {folder}/state --no-progress -np 2 "
        f"bash -c 'echo \"at $RANK {shown}\" >>{folder}/seen; sleep 2'\n"
    )
    options = ("--array=7", "--cpus-per-task=1", "--job-name=mine", "--nodes=2")
    words = ("sbatch", "--quiet", *options, f"--output={folder}/out", "--chdir=/")
    slurm.run("head", *words, str(batch))

    def both() -> list[str]:
        seen = folder / "seen"
        lines = sorted(seen.read_text().splitlines()) if seen.exists() else []
        return lines if len(lines) == 2 else []

    seen = eventually(both, within=60, what="both workers have said it")
    common = "ARRAY_TASK_ID=7 CPUS_PER_TASK=1 JOB_NAME=mine SUBMIT_DIR=/"
    assert all(line.endswith(" acc / a function") for line in seen)
    assert [line.split(" STEP_ID=")[0] for line in seen] == [
        f"at 0 {common} PROCID=0 LOCALID=0 NODEID=0 NTASKS=2",
        f"at 1 {common} PROCID=1 LOCALID=0 NODEID=1 NTASKS=2",
    ], (folder / "out").read_text()
