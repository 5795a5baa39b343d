"""What a Slurm job has of each of its nodes, from the text of `scontrol show job -d`. Pure.

Which SLURM_* variables describe GPUs depends on the options of sbatch and salloc, and none does for
some of them. `scontrol` shows what Slurm has allocated, in lines such as

    NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
      Nodes=n1 CPU_IDs=0-1 Mem=500 GRES=gpu:a100:3(IDX:0-2)
      Nodes=n2 CPU_IDs=0 Mem=500 GRES=gpu:a100:1(IDX:0)
    TresPerJob=gres:gpu:4

A heterogeneous job has such a text for each of its components, and if the job is one task of an
array there may be those of other tasks.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from elastic_driver.errors import UsageError
from elastic_driver.runtime.discovery import parse_hosts

_NODES = re.compile(r"\s+Nodes=(\S+) CPU_IDs=(\S*) Mem=\S+ GRES=(\S*)\s*\Z")
_TASKS = re.compile(r"\s+NumNodes=\S+ .*\bNumTasks=([0-9]{1,9}) CPUs/Task=([0-9]{1,6})\b")
_ASKED = re.compile(r"\s+TresPer(Job|Node|Task)=(\S+)\s*\Z")
_JOB = re.compile(r"JobId=([0-9]{1,18}) (?:HetJobId=([0-9]{1,18}) HetJobOffset=([0-9]{1,6}) )?")
# `gpu`, `gpu:2`, `gpu:a100:2`; `TresPer…` has `gres:` before it, newer versions `gres/gpu:a100=2`.
_GPUS = re.compile(r"(?:gres[:/])?gpu((?:[:=][^:=]+)*)\Z")
_REPEATED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?\Z")
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?\Z")


class Share(Struct, frozen=True, kw_only=True):
    """What the job has of one node."""

    node: str
    tasks: int = 1  # that srun would start there
    cpus: int | None = None  # None: Slurm has not said it
    gpus: int = 0
    component: int | None = None  # of a heterogeneous job
    gpus_of_a_task: int = 1  # as --gpus-per-task binds them


def read_shares(text: str, job_id: str, environ: Mapping[str, str]) -> tuple[Share, ...]:
    """Return the nodes of this job, in Slurm's order; empty if the text shows none.

    `environ` has the tasks of each node, where sbatch and salloc have counted them. Raises
    UsageError for nodes that cannot be read.
    """
    found: list[Share] = []
    for component in re.split(r"^(?=JobId=)", text, flags=re.MULTILINE):
        match = _JOB.match(component)
        if match is not None and job_id in (match[1], match[2]):
            offset = None if match[3] is None else int(match[3])
            found += _read_component(component.splitlines(), offset, environ)
    return tuple(found)


def for_each_node(text: str, nodes: int) -> tuple[int, ...] | None:
    """Return `2(x3),1` as 2, 2, 2, 1; None if it does not speak of so many nodes."""
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.match(part)
        if match is None or len(counts) + int(match[2] or 1) > nodes:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts) if len(counts) == nodes else None


def count_gpus(text: str) -> int | None:
    """Return the GPUs in a list of resources, of any type; None if there are none in it."""
    found = None
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        if match := _GPUS.match(part):
            last = re.split("[:=]", match[1])[-1]
            found = (found or 0) + (int(last) if last.isdecimal() and len(last) < 7 else 1)
    return found


def _read_component(
    lines: Sequence[str], component: int | None, environ: Mapping[str, str]
) -> list[Share]:
    tasks, cpus_of_a_task = 0, 1
    asked: dict[str, int] = {}
    nodes: list[tuple[str, int, int]] = []  # (name, CPUs, GPUs)
    for line in lines:
        if match := _TASKS.match(line):
            tasks, cpus_of_a_task = int(match[1]), max(1, int(match[2]))
        elif match := _NODES.match(line):
            cpus, gpus = _count(match[2]), count_gpus(match[3]) or 0
            named = parse_hosts(match[1], source="scontrol show job")
            nodes += [(name, cpus, gpus) for name, _ in named]
        elif (match := _ASKED.match(line)) and (count := count_gpus(match[2])) is not None:
            asked[match[1]] = count
    if not nodes:
        return []
    suffix = "" if component is None else f"_HET_GROUP_{component}"
    said = environ.get(f"SLURM_TASKS_PER_NODE{suffix}", "")
    cpus_of = [cpus for _, cpus, _ in nodes]
    tasks_of = _tasks(tasks or len(nodes), said, [cpus // cpus_of_a_task for cpus in cpus_of])
    gpus_of = _asked_for([gpus for _, _, gpus in nodes], tasks_of, asked)
    return [
        Share(
            node=name,
            tasks=tasks,
            cpus=cpus,
            gpus=gpus,
            component=component,
            gpus_of_a_task=max(1, asked.get("Task", 1)),
        )
        for (name, cpus, _), tasks, gpus in zip(nodes, tasks_of, gpus_of, strict=True)
    ]


def _tasks(total: int, said: str, fitting: Sequence[int]) -> Sequence[int]:
    """Return the tasks of each node, from the variable or from what fits its CPUs, else evenly.

    The variable may be that of a step, and with --exclusive nobody has asked for all that fit.
    """
    nodes = len(fitting)
    for counts in (for_each_node(said, nodes), fitting):
        if counts is not None and sum(counts) == total and min(counts) > 0:
            return counts
    share, more = divmod(total, nodes)
    return [max(1, share + (number < more)) for number in range(nodes)]


def _asked_for(
    gpus: Sequence[int], tasks: Sequence[int], asked: Mapping[str, int]
) -> Sequence[int]:
    """Return those of the GPUs of each node that were asked for, as srun gives them to its tasks.

    With --exclusive a job has all GPUs of its nodes. Where it has asked for none, they count if
    every node has some; if one has none, srun cannot give any.
    """
    if not asked:
        return gpus if all(gpus) else [0] * len(gpus)
    if "Node" in asked:
        gpus = [min(has, asked["Node"]) for has in gpus]
    if "Task" in asked:
        gpus = [min(has, asked["Task"] * n) for has, n in zip(gpus, tasks, strict=True)]
    if "Job" in asked and sum(gpus) > asked["Job"]:  # the first nodes get most, the others one
        left, later, taken = asked["Job"], sum(1 for has in gpus if has), []
        for has in gpus:
            later -= bool(has)
            taken.append(min(has, max(0, left - later)))
            left -= taken[-1]
        gpus = taken
    return gpus


def _count(ids: str) -> int:
    """Return how many there are in `0-3,8`; 0 if the text is nothing like that."""
    matches = [_RANGE.match(part) for part in ids.split(",")]
    return sum(int(m[2] or m[1]) - int(m[1]) + 1 for m in matches if m)


def step_options(shares: Iterable[Share]) -> dict[str, tuple[str, ...]]:
    """Return srun's options with which a step has all of a node that the job has there.

    A step has all CPUs and the memory unasked. Its GPUs are named as those of the step (`--gpus`):
    for a step on one of several nodes, Slurm compares `--gres` with all nodes of the job.
    """
    options = {}
    for share in shares:
        component = () if share.component is None else (f"--het-group={share.component}",)
        gpus = (f"--gpus={share.gpus}",) if share.gpus else ()
        options[share.node] = (*component, *gpus)
    return options


def shares_of_variables(environ: Mapping[str, str], nodes: Sequence[str]) -> tuple[Share, ...]:
    """Return what the variables of sbatch and salloc say, where scontrol does not answer.

    They have no numbers for single nodes but those of tasks and CPUs. Raises UsageError for
    nonsense.
    """
    gpus_text = environ.get("SLURM_GPUS_PER_NODE") or environ.get("SLURM_GPUS_ON_NODE") or "0"
    gpus = sum(_number_at_end(part, gpus_text) for part in gpus_text.split(","))
    cpus = _of_variable(environ, "SLURM_JOB_CPUS_PER_NODE", nodes)
    # If no number of tasks was given, Slurm counts one for each CPU, or one for each node.
    asked = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    tasks = _of_variable(environ, "SLURM_TASKS_PER_NODE", nodes) if asked else None
    return tuple(
        Share(
            node=node,
            tasks=1 if tasks is None else tasks[number],
            cpus=None if cpus is None else cpus[number],
            gpus=gpus,
        )
        for number, node in enumerate(nodes)
    )


def _number_at_end(part: str, text: str) -> int:
    last = part.partition("(")[0].rpartition(":")[2]
    if not (last.isascii() and last.isdecimal()) or len(last) > 6:
        raise UsageError(f"SLURM_GPUS_PER_NODE makes no sense: {text!r}")
    return int(last)


def _of_variable(
    environ: Mapping[str, str], name: str, nodes: Sequence[str]
) -> tuple[int, ...] | None:
    text = environ.get(name)
    if text is None:
        return None
    counts = for_each_node(text, len(nodes))
    if counts is None:
        raise UsageError(f"{name} says {text!r}, and does not fit the {len(nodes)} nodes")
    return counts
