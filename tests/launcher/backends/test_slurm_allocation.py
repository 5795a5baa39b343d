"""What Slurm's variables say of an allocation: nodes, and how many workers each is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from elastic_driver.runtime.discovery import DiscoveryError
from launcher.backends.slurm_allocation import (
    Share,
    SlurmAllocation,
    describe_job,
    read_allocation,
    variables_beside_srun,
)

JOB = {"SLURM_JOB_ID": "17"}


def allocation(**more: str) -> SlurmAllocation:
    found = read_allocation({**JOB, "SLURM_JOB_NODELIST": "n[1-2]", **more})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n[01-04,07],x5", ("n01", "n02", "n03", "n04", "n07", "x5")),
        ("r[0-1]n[8-9]", ("r0n8", "r0n9", "r1n8", "r1n9")),
        ("login.site", ("login.site",)),
    ],
)
def test_a_node_list_is_spelled_out(text: str, nodes: tuple[str, ...]) -> None:
    found = read_allocation({**JOB, "SLURM_JOB_NODELIST": text})
    assert found is not None
    assert found.nodes == nodes
    assert found.source == "Slurm job 17"


def test_outside_of_an_allocation_there_is_none() -> None:
    assert read_allocation({}) is None
    assert read_allocation({"SLURM_CONF": "/etc/slurm.conf", **JOB}) is None


def test_variables_of_the_job_are_told_from_those_of_a_task_a_step_and_a_node() -> None:
    of_job = JOB | {
        "SLURM_ARRAY_TASK_ID": "7",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_SUBMIT_DIR": "/home/ann",
        "SLURM_HET_SIZE": "2",
    }
    others = (
        "PROCID LOCALID NODEID TASK_PID GTIDS STEP_ID STEPID STEP_NODELIST CPUS_ON_NODE "
        "SRUN_COMM_PORT GPUS_ON_NODE CPU_BIND CPU_BIND_LIST MEM_BIND TOPOLOGY_ADDR "
        "LAUNCH_NODE_IPADDR JWT CONF"
    )
    of_job |= {"SBATCH_ACCOUNT": "a", "SALLOC_X": "b", "SRUN_CPUS_PER_TASK": "2"}
    of_job["BASH_FUNC_module%%"] = "() {\n echo\n}"
    of_one = {"BASH_FUNC_x%%": "\udcff", "SBATCHES": "1"}
    of_one |= {f"SLURM_{name}": "1" for name in others.split()}
    assert variables_beside_srun(of_job | of_one | {"SLURMD_NODENAME": "n1", "HOME": "/"}) == of_job


def test_older_names_are_read_too() -> None:
    found = read_allocation({"SLURM_JOBID": "3", "SLURM_NODELIST": "a,b"})
    assert found == SlurmAllocation(job_id="3", shares=(Share(node="a"), Share(node="b")))


def test_tasks_are_counted_only_where_somebody_asked_for_them() -> None:
    per_node = "2(x3),1"
    four = {**JOB, "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": per_node}
    found = read_allocation({**four, "SLURM_NTASKS": "7"})
    assert found is not None
    assert found.hosts(None, None) == (("n1", 2), ("n2", 2), ("n3", 2), ("n4", 1))
    unasked = read_allocation(four)
    assert unasked is not None
    assert unasked.counts() == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("said", "slots"),
    [
        ({}, 1),
        ({"SLURM_GPUS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2,v100:1"}, 3),
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),
        # one task a node with GPUs: a script written for torchrun
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}, 8),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}, 8),
    ],
)  # fmt: skip
def test_where_scontrol_says_nothing_the_variables_are_read(
    said: dict[str, str], slots: int
) -> None:
    assert allocation(**said).hosts(None, None) == (("n1", slots), ("n2", slots))


def test_a_number_of_slots_that_was_given_counts_most() -> None:
    found = allocation(SLURM_NTASKS="4", SLURM_TASKS_PER_NODE="2(x2)")
    assert found.hosts(8, None) == (("n1", 8), ("n2", 8))


def test_where_nothing_else_is_said_the_workers_wanted_are_shared_out() -> None:
    assert allocation().hosts(None, 3) == (("n1", 2), ("n2", 2))


def test_each_node_has_processors_of_its_own() -> None:
    assert allocation(SLURM_JOB_CPUS_PER_NODE="8,4").counts("cpu") == (8, 4)


# ---- what scontrol says ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo slurm_load_jobs error: Unable to contact >&2; exit 1", "scontrol exited with"),
        ("kill -9 $$", "scontrol was killed by SIGKILL"),
    ],
)
def test_a_scontrol_that_fails_is_told(tmp_path: Path, script: str, said: str) -> None:
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with pytest.raises(DiscoveryError, match=said):
        describe_job("17", {"PATH": f"{tmp_path}:/usr/bin:/bin"})


def test_a_scontrol_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match="scontrol was not found"):
        describe_job("17", {"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    "wrong",
    [
        {"SLURM_JOB_ID": "1; rm"},
        {"SLURM_JOB_NODELIST": "n[1-"},
        {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x3)"},
        {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "two"},
        {"SLURM_GPUS_ON_NODE": "many"},
        {"SLURM_STEP_NUM_TASKS": "x"},
        {"SLURM_STEP_NUM_TASKS": "9" * 5000},
    ],
)
def test_nonsense_is_a_usage_error(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        allocation(**wrong)
