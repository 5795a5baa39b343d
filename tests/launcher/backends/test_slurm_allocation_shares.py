"""What scontrol shows of a job becomes nodes, workers and steps; the texts are Slurm 22.05's."""

from __future__ import annotations

import pytest

from launcher.backends.slurm_allocation import (
    Share,
    SlurmAllocation,
    count_gpus,
    for_each_node,
    read_allocation,
    step_options,
)

# Two nodes of four A100 and eight processors (n1, n2), one of two V100 (n3), one of no GPU (n4).
WHOLE = """\
JobId=1 JobName=cap.sh
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901759 Nice=0 Account=(null) QOS=(null)
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   DerivedExitCode=0:0
   RunTime=00:00:00 TimeLimit=UNLIMITED TimeMin=N/A
   SubmitTime=2026-11-28T03:44:23 EligibleTime=2026-11-28T03:44:23
   AccrueTime=2026-11-28T03:44:23
   StartTime=2026-11-28T03:44:24 EndTime=Unknown Deadline=N/A
   SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-28T03:44:24 Scheduler=Main
   Partition=all AllocNode:Sid=head:0
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n[1-2]
   BatchHost=n1
   NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu=2,mem=1000M,node=2,billing=2
   Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=*
   JOB_GRES=gpu:a100:4
     Nodes=n[1-2] CPU_IDs=0 Mem=500 GRES=gpu:a100:2(IDX:0-1)
   MinCPUsNode=1 MinMemoryCPU=500M MinTmpDiskNode=0
   Features=(null) DelayBoot=00:00:00
   OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null)
   Command=/home/ann/Nodes=n9 CPU_IDs=0 Mem=1 GRES=gpu:9
   WorkDir=/home/ann
   StdErr=/home/ann/slurm-1.out
   StdIn=/dev/null
   StdOut=/home/ann/slurm-1.out
   Power=
   TresPerNode=gres:gpu:2
   

"""  # noqa: W293 - as scontrol prints it

A100 = "CPU_IDs=0 Mem=500 GRES=gpu:a100:"
ALL_OF_A_NODE = "Nodes=n[1-2] CPU_IDs=0-7 Mem=4000 GRES=gpu:a100:4(IDX:0-3)"
TWO_EACH = "Nodes=n[1-2] CPU_IDs=6-7 Mem=1000 GRES=gpu:a100:2(IDX:0-1)"


def shown(tasks: str, *nodes: str, asked: str = "") -> str:
    """The lines that matter of a job whose `NumTasks CPUs/Task` are given."""
    total, cpus = tasks.split()
    lines = [f"NumNodes=2 NumCPUs=2 NumTasks={total} CPUs/Task={cpus} ReqB:S:C:T=0:0:*:*"]
    lines += [f"  {node}" for node in nodes]
    lines += [asked] if asked else []
    return "JobId=17 JobName=x\n" + "".join(f"   {line}\n" for line in lines)


def allocation(text: str, job_id: str = "17", **environ: str) -> SlurmAllocation:
    found = read_allocation({"SLURM_JOB_ID": job_id, **environ}, text)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("words", "text", "tasks_per_node", "workers"),
    [
        ("-N2 --gres=gpu:2", shown("2 1", f"Nodes=n[1-2] {A100}2(IDX:0-1)",
         asked="TresPerNode=gres:gpu:2"), "1(x2)", {"n1": 2, "n2": 2}),
        ("-N2 --gres=gpu:a100:2", shown("2 1", f"Nodes=n[1-2] {A100}2(IDX:0-1)",
         asked="TresPerNode=gres:gpu:a100:2"), "1(x2)", {"n1": 2, "n2": 2}),
        ("-N2 --gpus=4", shown("2 1", f"Nodes=n1 {A100}3(IDX:0-2)", f"Nodes=n2 {A100}1(IDX:0)",
         asked="TresPerJob=gres:gpu:4"), "1(x2)", {"n1": 3, "n2": 1}),
        ("-w n1,n3 --gpus=5", shown("2 1", f"Nodes=n1 {A100}4(IDX:0-3)",
         "Nodes=n3 CPU_IDs=0 Mem=500 GRES=gpu:v100:1(IDX:0)", asked="TresPerJob=gres:gpu:5"),
         "1(x2)", {"n1": 4, "n3": 1}),
        ("-N2 --gpus-per-node=3", shown("2 1", f"Nodes=n[1-2] {A100}3(IDX:0-2)",
         asked="TresPerNode=gres:gpu:3"), "1(x2)", {"n1": 3, "n2": 3}),
        ("-N2 --ntasks-per-node=2 --gpus-per-task=1",
         shown("4 1", TWO_EACH, asked="TresPerTask=gres:gpu:1"), "2(x2)", {"n1": 2, "n2": 2}),
        ("-N2 -n3 --gpus-per-task=1", shown("3 1",
         "Nodes=n1 CPU_IDs=4-5 Mem=1000 GRES=gpu:a100:2(IDX:0-1)",
         "Nodes=n2 CPU_IDs=4 Mem=500 GRES=gpu:a100:1(IDX:0)", asked="TresPerTask=gres:gpu:1"),
         "2,1", {"n1": 2, "n2": 1}),
        ("-N2 --ntasks-per-node=2 --gpus-per-task=2",
         shown("4 1", "Nodes=n[1-2] CPU_IDs=6-7 Mem=1000 GRES=gpu:a100:4(IDX:0-3)",
         asked="TresPerTask=gres:gpu:2"), "2(x2)", {"n1": 2, "n2": 2}),
        ("-N2 --gpus=4 --ntasks-per-gpu=1", shown("4 1",
         "Nodes=n[1-2] CPU_IDs=4-5 Mem=1000 GRES=gpu:a100:2(IDX:0-1)",
         asked="TresPerJob=gres:gpu:4"), "2(x2)", {"n1": 2, "n2": 2}),
        ("-N2 --gpus-per-socket=1 --sockets-per-node=2", shown("4 1",
         "Nodes=n1 CPU_IDs=0-2 Mem=1500 GRES=gpu:a100:3(IDX:0-2)", f"Nodes=n2 {A100}1(IDX:0)",
         asked="TresPerSocket=gres:gpu:1"), "3,1", {"n1": 3, "n2": 1}),
        # one task a node, as for torchrun; then two and four of them beside two GPUs
        ("-N2 --ntasks-per-node=1 --gres=gpu:2 -c4", shown("2 4",
         "Nodes=n[1-2] CPU_IDs=4-7 Mem=2000 GRES=gpu:a100:2(IDX:0-1)",
         asked="TresPerNode=gres:gpu:2"), "1(x2)", {"n1": 2, "n2": 2}),
        ("-N2 --ntasks-per-node=2 --gres=gpu:2",
         shown("4 1", TWO_EACH, asked="TresPerNode=gres:gpu:2"), "2(x2)", {"n1": 2, "n2": 2}),
        ("-N2 --ntasks-per-node=4 --gres=gpu:2", shown("8 1",
         "Nodes=n[1-2] CPU_IDs=4-7 Mem=2000 GRES=gpu:a100:2(IDX:0-1)",
         asked="TresPerNode=gres:gpu:2"), "4(x2)", {"n1": 2, "n2": 2}),
        # a node that is ours alone: what was asked for, and all of it where nothing was
        ("-N2 --exclusive", shown("2 1", ALL_OF_A_NODE), "8(x2)", {"n1": 4, "n2": 4}),
        ("-N2 --exclusive --gres=gpu:2",
         shown("2 1", ALL_OF_A_NODE, asked="TresPerNode=gres:gpu:2"), "8(x2)", {"n1": 2, "n2": 2}),
        ("-N2 --exclusive --gpus=4",
         shown("2 1", ALL_OF_A_NODE, asked="TresPerJob=gres:gpu:4"), "8(x2)", {"n1": 3, "n2": 1}),
        ("-N2 --exclusive --gpus-per-task=1 --ntasks-per-node=2",
         shown("4 1", ALL_OF_A_NODE, asked="TresPerTask=gres:gpu:1"), "2(x2)",
         {"n1": 2, "n2": 2}),
        ("-w n1,n4 --exclusive", shown("2 1",
         "Nodes=n1 CPU_IDs=0-7 Mem=4000 GRES=gpu:a100:4(IDX:0-3)",
         "Nodes=n4 CPU_IDs=0-7 Mem=4000 GRES=(null)"), "8(x2)", {"n1": 1, "n4": 1}),
        # no GPU: the tasks of srun
        ("-N2 -n3", shown("3 1", "Nodes=n1 CPU_IDs=0-1 Mem=1000 GRES=",
         "Nodes=n2 CPU_IDs=0 Mem=500 GRES="), "2,1", {"n1": 2, "n2": 1}),
        ("-N2 -n3 -c2", shown("3 2", "Nodes=n1 CPU_IDs=0-3 Mem=2000 GRES=",
         "Nodes=n2 CPU_IDs=0-1 Mem=1000 GRES="), "2,1", {"n1": 2, "n2": 1}),
        ("-N2 -c2", shown("2 2", "Nodes=n[1-2] CPU_IDs=0-1 Mem=1000 GRES="), "1(x2)",
         {"n1": 1, "n2": 1}),
    ],
)  # fmt: skip
def test_a_job_has_a_worker_for_each_gpu_or_each_task(
    words: str, text: str, tasks_per_node: str, workers: dict[str, int]
) -> None:
    found = allocation(text, SLURM_TASKS_PER_NODE=tasks_per_node)
    assert dict(found.hosts(None, None)) == workers, words
    # elasticrun started by `srun -n1 -N1` has the variables of its step
    in_a_step = allocation(text, SLURM_TASKS_PER_NODE="1", SLURM_NTASKS="1")
    assert dict(in_a_step.hosts(None, None)) == workers, words


def test_the_whole_text_is_read_and_no_path_in_it() -> None:
    found = allocation(WHOLE, "1")
    shares = (Share(node="n1", cpus=1, gpus=2), Share(node="n2", cpus=1, gpus=2))
    assert (found.shares, found.source) == (shares, "Slurm job 1")
    other = WHOLE.replace("JobId=1 JobName", "JobId=2 ArrayJobId=1 ArrayTaskId=7 JobName")
    other = other.replace("Nodes=n[1-2] ", "Nodes=n3 ")
    assert allocation(other + WHOLE, "1").shares == shares, "a task of the same array is no part"


def test_components_of_a_heterogeneous_job_are_one_job() -> None:
    cpus, gpus, bound = (
        shown("1 1", "Nodes=n4 CPU_IDs=0 Mem=500 GRES="),
        shown("2 1", f"Nodes=n1 {A100}2(IDX:0-1)", f"Nodes=n2 {A100}1(IDX:0)",
              asked="TresPerJob=gres:gpu:3"),
        shown("2 1", "Nodes=n3 CPU_IDs=2-3 Mem=1000 GRES=gpu:v100:2(IDX:0-1)",
              asked="TresPerTask=gres:gpu:1"),
    )  # fmt: skip
    parts = enumerate((cpus, gpus, bound))
    text = "".join(
        part.replace("JobId=17 ", f"JobId={82 + n} HetJobId=82 HetJobOffset={n} ")
        for n, part in parts
    )
    found = read_allocation({"SLURM_JOB_ID_HET_GROUP_0": "82"}, text)
    assert found is not None, "salloc sets no other variable"
    hosts = found.hosts(None, None)
    assert hosts == (("n4", 0), ("n1", 2), ("n2", 1), ("n3", 2))
    assert found.remarks(hosts) == ["n4 of Slurm job 82: no GPU, so no worker"]
    assert step_options(found.shares) == {
        "n4": ("--het-group=0",),
        "n1": ("--het-group=1", "--gpus=2"),
        "n2": ("--het-group=1", "--gpus=1"),
        "n3": ("--het-group=2", "--gpus=2"),
    }


THREE_AND_ONE = shown("2 1", f"Nodes=n1 {A100}3(IDX:0-2)", f"Nodes=n2 {A100}1(IDX:0)",
                      asked="TresPerJob=gres:gpu:4")  # fmt: skip
TWO_TASKS_AND_ONE = shown("3 2", "Nodes=n1 CPU_IDs=0-3 Mem=2000 GRES=",
                          "Nodes=n2 CPU_IDs=0-1 Mem=1000 GRES=")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "slots", "needed", "most", "counts"),
    [
        (THREE_AND_ONE, 2, None, None, (2, 2)),
        (THREE_AND_ONE, "gpu", None, None, (3, 1)),
        (THREE_AND_ONE, "auto", None, None, (3, 1)),
        (THREE_AND_ONE, "cpu", None, None, (1, 1)),
        (THREE_AND_ONE, None, 2, None, (3, 1)),
        (THREE_AND_ONE, None, 8, None, (6, 2)),
        (THREE_AND_ONE, None, None, 8, (3, 1)),
        (TWO_TASKS_AND_ONE, "auto", None, None, (4, 2)),
        (TWO_TASKS_AND_ONE, None, 5, None, (4, 2)),
        (TWO_TASKS_AND_ONE, None, None, 5, (2, 1)),
        (shown("2 1", "Nodes=n[1-2] CPU_IDs=0 Mem=500 GRES="), None, None, 5, (3, 3)),
    ],
)
def test_numbers_of_the_command_line_count_more_than_slurms(
    text: str,
    slots: int | str | None,
    needed: int | None,
    most: int | None,
    counts: tuple[int, int],
) -> None:
    hosts = allocation(text).hosts(slots, needed, most)
    assert hosts == (("n1", counts[0]), ("n2", counts[1]))


def test_what_may_surprise_is_said() -> None:
    found = allocation(THREE_AND_ONE)
    assert found.remarks(found.hosts(None, None)) == []
    assert found.remarks(found.hosts(None, 8)) == ["8 workers share the 4 GPUs of Slurm job 17"]
    two = shown("8 1", "Nodes=n[1-2] CPU_IDs=4-7 Mem=2000 GRES=gpu:a100:2(IDX:0-1)",
                asked="TresPerNode=gres:gpu:2")  # fmt: skip
    found = allocation(two)
    assert found.remarks(found.hosts(None, None)) == [
        "Slurm job 17 has 4 GPUs and 8 tasks: a worker for each GPU; --nproc-per-node N starts N "
        "on each node"
    ]
    assert found.remarks(found.hosts(4, None)) == ["8 workers share the 4 GPUs of Slurm job 17"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("gpu:2(IDX:0-1)", 2),
        ("gpu:a100:2(S:0),gpu:v100:1(IDX:0,3-4)", 3),
        ("nic:1(IDX:0),gpu:1(CNT:1)", 1),
        ("gres:gpu", 1),
        ("gres/gpu:a100=2", 2),
        ("cpu=4,gres/gpu=1,gres/gpu:a100=1", 2),
        ("gpuid:3,shard:2", None),
        ("(null)", None),
        ("", None),
    ],
)
def test_gpus_are_counted_whatever_their_type(text: str, count: int | None) -> None:
    assert count_gpus(text) == count


@pytest.mark.parametrize("text", ["", "two", "2(x3)", "1,1,1", "2(x999999),1", "-1,1"])
def test_a_text_for_other_nodes_is_not_taken(text: str) -> None:
    assert for_each_node(text, 2) is None
