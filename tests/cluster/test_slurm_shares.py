"""A real Slurm with GPUs in name: the workers of a job are the tasks that srun would start."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import slurm as real
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ELASTICRUN = f"{Path(sys.executable).parent}/elasticrun"
TASK = 'echo "$SLURMD_NODENAME $SLURM_PROCID $SLURM_LOCALID ${CUDA_VISIBLE_DEVICES:-none}"'
WORKER = f'{TASK} >"$0.$RANK"'


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Slurm on head, node0 and node1, each node with four GPUs."""
    with real.running(2) as slurm:
        yield slurm


def run(slurm: Slurm, name: str, start: str, ask: str, inside: str) -> None:
    """Run a script in a job that salloc or sbatch has started."""
    script = slurm.folder / f"{name}.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --output={slurm.folder}/{name}.out\n{inside}\n")
    script.chmod(0o755)
    words = (start, "--quiet", *(["--wait"] if start == "sbatch" else []), *ask.split())
    slurm.run("head", "env", "--chdir=/", *words, str(script), timeout=120)


def tasks_and_workers(slurm: Slurm, name: str, start: str, ask: str, srun: str, ours: str = ""):
    """What the tasks of srun see, and what our workers see, in the same job, both by rank."""
    folder = slurm.folder
    state = f"--state-dir {folder}/state --no-progress"
    run(
        slurm,
        name,
        start,
        ask,
        f"srun --mpi=none {srun} sh -c '{TASK}' >{folder}/{name}.tasks || exit\n"
        f"exec {ELASTICRUN} {state} {ours} sh -c '{WORKER}' {folder}/{name}",
    )
    tasks = (folder / f"{name}.tasks").read_text().splitlines()
    workers = [path.read_text().strip() for path in folder.glob(f"{name}.[0-9]*")]
    by_rank = [sorted(lines, key=lambda line: int(line.split()[1])) for lines in (tasks, workers)]
    assert by_rank[1], (folder / f"{name}.out").read_text()
    return by_rank


# What sbatch is asked for, and srun for one task a GPU where it would start others by itself.
WAYS = {
    "gres": ("-N2 --gres=gpu:2", "--ntasks-per-node=2 --overcommit"),
    "exclusive": ("-N2 --exclusive --gpus-per-node=4", "-n8"),
    "tasks": ("-N2 --ntasks-per-node=2 --gres=gpu:2 -c2", ""),
    "bound": ("-N2 --ntasks-per-node=2 --gpus-per-task=2", ""),
    "processors": ("-N2 -n3", ""),
}


@pytest.mark.parametrize(("way", "start"), [("gres", "salloc"), *((way, "sbatch") for way in WAYS)])
def test_workers_are_what_srun_would_start(slurm: Slurm, way: str, start: str) -> None:
    ask, srun = WAYS[way]
    tasks, workers = tasks_and_workers(slurm, f"{way}-{start}", start, ask, srun)
    assert workers == tasks


@pytest.mark.parametrize(
    ("ask", "start"),
    [
        ("-N2 --gpus=4", "sbatch"),
        ("-N2 --gpus=fake:4", "salloc"),
        ("-N2 -n3 --gpus-per-task=1", "salloc"),
    ],
)
def test_nodes_of_one_job_may_have_different_numbers(slurm: Slurm, ask: str, start: str) -> None:
    name = f"uneven{len(ask)}-{start}"
    tasks, workers = tasks_and_workers(slurm, name, start, ask, "-n2" if "gpus=" in ask else "")
    gpus = {node: devices for node, _, _, devices in map(str.split, tasks)}
    if "task" in ask:  # srun binds: all of a node are those of its tasks together
        gpus = {"node0": "0,1", "node1": "0"}
    assert len(set(gpus.values())) == 2, "the nodes differ"
    own = [(node, local) for node, _, local, _ in map(str.split, workers)]
    assert own == [
        (node, str(local)) for node, seen in gpus.items() for local in range(len(seen.split(",")))
    ]
    assert all(gpus[node] == seen for node, _, _, seen in map(str.split, workers))


def test_options_of_ours_count_more_than_slurms(slurm: Slurm) -> None:
    ask, srun = "-N2 --gpus=4", "-n2"
    _, few = tasks_and_workers(slurm, "few", "salloc", ask, srun, "-np 2")
    assert len(few) == 2
    _, each = tasks_and_workers(slurm, "each", "salloc", ask, srun, "--nproc-per-node 1")
    assert [line.split()[0] for line in each] == ["node0", "node1"]


def test_a_heterogeneous_job_is_one_job(slurm: Slurm) -> None:
    ask = "-N1 -n1 : -N1 --gres=gpu:2"
    srun = "--het-group=1 -n2 --overcommit"
    tasks, workers = tasks_and_workers(slurm, "het", "salloc", ask, srun)
    assert workers == tasks, "the first node has no GPU of the job, and no worker"
