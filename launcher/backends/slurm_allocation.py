"""The Slurm allocation we run in: its nodes at the start, and those that it still has later.

`sbatch` and `salloc` name the job in SLURM_* variables (sbatch(1), OUTPUT ENVIRONMENT VARIABLES).
Which of them describe GPUs depends on the options of sbatch and salloc, and none does for some of
them. So `scontrol show job -d` is asked once what the job has of each node, in lines such as

    NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
      Nodes=n1 CPU_IDs=0-1 Mem=500 GRES=gpu:a100:3(IDX:0-2)
      Nodes=n2 CPU_IDs=0 Mem=500 GRES=gpu:a100:1(IDX:0)
    TresPerJob=gres:gpu:4

A heterogeneous job has such a text for each of its components, and if the job is one task of an
array there may be those of other tasks.

Later `squeue` is asked for the nodes: Slurm takes a node that failed out of a job that goes on
without it (`--no-kill`) and does not give it back, and `scontrol update job` takes nodes away and
adds others. `salloc` does not tell its command that the allocation is over; squeue does. It is
asked rarely, because slurmctld serves the whole cluster.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from elastic_driver.errors import UsageError
from elastic_driver.runtime.discovery import MAX_TEXT_BYTES, DiscoveryError, Hosts, parse_hosts
from elastic_driver.runtime.probe import ProbeError, ScriptProbe
from elastic_driver.words import counted

# ---- what the job has of each node; pure --------------------------------------------------


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
            tasks = int(match[1])
            cpus_of_a_task = max(1, int(match[2]))
        elif match := _NODES.match(line):
            cpus = _count(match[2])
            gpus = count_gpus(match[3]) or 0
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
        left = asked["Job"]
        later = sum(1 for has in gpus if has)
        taken = []
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


# ---- the allocation -----------------------------------------------------------------------


EVERY_S = 10.0  # between two questions
_ANSWER_S = 10.0
_MAX_DETAIL_BYTES = 1 << 24  # a line for each node
_OVER = "CANCELLED COMPLETED COMPLETING DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT"
_UNKNOWN = "Invalid job id"  # the job ended long ago, and Slurm has deleted its record
_NUMBER = re.compile(r"[0-9]{1,18}\Z")
_SHOWN = re.compile(r"\S+ \S+ \S+( \S+)?\s*\Z")  # job, name of it, state, nodes
# The job, or the first component of a heterogeneous one, for which salloc sets no other variable.
_JOB_IDS = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_ID_HET_GROUP_0")
# What Slurm tells a batch script about one task, step or node (workers have other ones), and a key.
_NOT_OF_THE_JOB = re.compile(
    r"SLURM_(PROCID|LOCALID|NODEID|TASK_PID|GTIDS|STEP.*|SRUN_.*|LAUNCH_NODE_IPADDR|.*_ON_NODE"
    r"|CPU_BIND.*|MEM_BIND.*|TOPOLOGY_.*|PTY_.*|PMI.*|JWT|CONF.*|EXPORT_ENV|PRIO_PROCESS)\Z"
)

_SETTINGS = ("SBATCH_", "SALLOC_", "SRUN_")  # of commands, which workers may run
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class SlurmAllocation(Struct, frozen=True, kw_only=True):
    """The nodes of a Slurm job."""

    job_id: str
    shares: tuple[Share, ...]
    step_tasks: int = 1  # how often srun has started us; 1 if it has not

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of all nodes."""
        return tuple(share.node for share in self.shares)

    @property
    def source(self) -> str:
        """The name of this source of hosts, for messages."""
        return f"Slurm job {self.job_id}"

    @property
    def gpus(self) -> int:
        """The GPUs of all nodes."""
        return sum(share.gpus for share in self.shares)

    @property
    def gpus_of_a_worker(self) -> int:
        """The GPUs that a worker has for itself, where --gpus-per-task gives it several."""
        return max(share.gpus_of_a_task for share in self.shares)

    def counts(self, kind: str | None = None) -> tuple[int, ...]:
        """Return the workers of each node.

        Without `kind` that is one for each of the job's GPUs there, or for each so many as
        --gpus-per-task says. A job without GPUs has a worker for each task of srun. `kind` is a
        word of --nproc-per-node: "cpu" counts CPUs, all others GPUs, "auto" CPUs if there are none.
        """
        if kind == "cpu" or (kind == "auto" and not self.gpus):
            return tuple(share.cpus or 1 for share in self.shares)
        if kind is not None:
            return tuple(share.gpus for share in self.shares)
        if self.gpus:
            return tuple(share.gpus // share.gpus_of_a_task for share in self.shares)
        return tuple(share.tasks for share in self.shares)

    def hosts(self, slots: int | str | None, needed: int | None, most: int | None = None) -> Hosts:
        """Return the nodes with their slots; a node without a worker has 0.

        Args:
            slots: `--slots-per-host` or `--nproc-per-node`, if given; it comes first.
            needed: workers without which the job does not start (-np, --min-np), if given. If the
                nodes have fewer slots, each has more of them, in proportion.
            most: the workers that the job may start with, if given. It counts like `needed` if
                nobody has asked Slurm for GPUs or for several tasks of a node.
        """
        if isinstance(slots, int):
            return tuple((node, slots) for node in self.nodes)
        counts = self.counts(slots)
        if set(counts) == {1} and not self.gpus:
            needed = most or needed
        total = sum(counts)
        if slots is None and needed and needed > total:
            counts = tuple(-(-count * needed // total) for count in counts)
        return tuple(zip(self.nodes, counts, strict=True))

    def remarks(self, hosts: Hosts) -> list[str]:
        """Return what a user may not expect of these hosts, which `hosts` has returned."""
        if not self.gpus:
            return []
        workers = sum(slots for _, slots in hosts)
        gpus = counted(self.gpus, "GPU")
        without = [share.node for share in self.shares if not share.gpus]
        tasks = sum(share.tasks for share in self.shares)
        found = []
        if workers > self.gpus:
            found.append(f"{workers} workers share the {gpus} of {self.source}")
        elif workers == self.gpus != tasks > len(self.shares):
            found.append(
                f"{self.source} has {gpus} and {counted(tasks, 'task')}: a worker for each GPU; "
                "--nproc-per-node N starts N on each node"
            )
        if without and dict(hosts)[without[0]] == 0:
            more = f" and {len(without) - 1} more" if len(without) > 1 else ""
            found.append(f"{without[0]}{more} of {self.source}: no GPU, so no worker")
        return found


def read_allocation(environ: Mapping[str, str], detail: str = "") -> SlurmAllocation | None:
    """Return the allocation that we run in; None if there is none.

    `detail` is what scontrol shows of it (`describe_job`); without it the variables are read.
    Raises UsageError if they make no sense.
    """
    job_id = job_id_of(environ)
    nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if job_id is None:
        return None
    step_tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if not _NUMBER.match(step_tasks):
        raise UsageError(f"SLURM_STEP_NUM_TASKS is no number: {step_tasks!r}")
    shares = read_shares(detail, job_id, environ)
    if not shares:
        if not nodelist:
            return None
        nodes = tuple(name for name, _ in parse_hosts(nodelist, source="SLURM_JOB_NODELIST"))
        shares = shares_of_variables(environ, nodes)
    return SlurmAllocation(job_id=job_id, shares=shares, step_tasks=int(step_tasks))


def job_id_of(environ: Mapping[str, str]) -> str | None:
    """Return the id of the job we run in; None if it is none. Raises UsageError for nonsense."""
    name = next((name for name in _JOB_IDS if environ.get(name)), None)
    if name is not None and not _NUMBER.match(environ[name]):
        raise UsageError(f"{name} is no number: {environ[name]!r}")
    return None if name is None else environ[name]


def describe_job(job_id: str, environ: Mapping[str, str]) -> str:
    """Return what `scontrol show job -d` says of a job; raises DiscoveryError if it fails."""
    program = shutil.which("scontrol", path=environ.get("PATH"))
    if program is None:
        raise DiscoveryError("scontrol was not found")
    words = ("show", "job", "--details", job_id)
    probe = ScriptProbe(
        Path(program), *words, timeout=_ANSWER_S, max_output=_MAX_DETAIL_BYTES, env=environ
    )
    try:
        return probe.run().decode(errors="replace")
    except ProbeError as error:
        raise DiscoveryError(f"scontrol {error}") from None


def variables_beside_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the batch script's variables that its workers have and srun does not bring them.

    Those are SLURM_* variables that are true for the whole job, under whose names the step of an
    agent has others or none; the user's settings of Slurm's commands, which would change that
    step; and what /bin/sh, which the step runs, drops: functions that bash has exported.
    """
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name.startswith("SLURM_") and not _NOT_OF_THE_JOB.match(name))
        or name.startswith(_SETTINGS)
        or (not _NAME.match(name) and _is_text(name + value))
    }


def _is_text(value: str) -> bool:
    """Return whether a document can carry a value; one of other bytes cannot be had on the way."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class AllocationDiscovery:
    """A `HostDiscovery`: the nodes of an allocation that squeue names.

    Args:
        job_id: the allocation.
        hosts: its nodes with their slots at the start; a node that comes later has as many
            slots as the first of them that has any.
        environ: the environment of squeue.
        every: seconds between two questions.

    `find` calls `on_over` once with the reason when the allocation is over.
    """

    def __init__(
        self, job_id: str, hosts: Hosts, environ: Mapping[str, str], *, every: float = EVERY_S
    ) -> None:
        self._job_id, self._every = job_id, every
        self._slots = dict(hosts)
        self._hosts = hosts
        self.on_over: Callable[[str], None] = lambda _reason: None
        self._over = False
        self._asked = time.monotonic()  # `hosts` was read from fresh variables
        self._program = shutil.which("squeue", path=environ.get("PATH"))
        self._squeue = ScriptProbe(
            Path(self._program or "squeue"),
            *("--noheader", f"--jobs={job_id}", "--states=all", "--format=%A %i %T %N"),
            timeout=_ANSWER_S,
            max_output=MAX_TEXT_BYTES,
            env=environ,
        )

    def find(self) -> Hosts:
        """Return the nodes; raises DiscoveryError if Slurm does not say."""
        if self._program is None or time.monotonic() - self._asked < self._every:
            return self._hosts
        self._asked = time.monotonic()
        state, nodes = self._ask()
        if state not in _OVER.split():
            usual = next(filter(None, self._slots.values()), 1)
            named = parse_hosts(nodes, source="squeue")
            self._hosts = tuple((name, self._slots.get(name, usual)) for name, _ in named)
        elif not self._over:
            self._over = True
            why = f"{state.lower().replace('_', ' ')}, says Slurm"
            self.on_over(f"Slurm job {self._job_id} is over ({why})")
        return self._hosts

    def cancel(self) -> None:
        """See `HostDiscovery.cancel`."""
        self._squeue.cancel()

    def _ask(self) -> tuple[str, str]:
        """Return the allocation's state and its nodes.

        squeue also shows the components of a heterogeneous job, and all tasks of a job array: the
        last one has the id of the array.
        """
        state, nodes = "", []
        try:
            answer = self._squeue.run().decode(errors="replace")
        except ProbeError as error:
            if _UNKNOWN in str(error):
                return "COMPLETED", ""
            answer = ""
        for line in filter(_SHOWN.match, answer.splitlines()):
            job, shown, found, *named = line.split()
            if job == self._job_id:
                state = found
            if job == self._job_id or shown.startswith(f"{self._job_id}+"):
                nodes += named
        if not state:
            raise DiscoveryError(f"squeue does not say which nodes Slurm job {self._job_id} has")
        return state, ",".join(nodes)
