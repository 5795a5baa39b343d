"""The Slurm allocation we run in: its nodes at the start, and those that it still has later.

`sbatch` and `salloc` describe an allocation in SLURM_* variables (sbatch(1), OUTPUT ENVIRONMENT
VARIABLES); `launcher.launch` reads them here. Later only `squeue` knows the nodes: Slurm takes a
node that failed out of a job that goes on without it (`--no-kill`) and does not give it back, and
`scontrol update job` takes nodes away and adds others. `salloc` does not tell its command that the
allocation is over; squeue does. It is asked rarely, because slurmctld serves the whole cluster.
"""

import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from elastic_driver.errors import UsageError
from elastic_driver.runtime.discovery import MAX_TEXT_BYTES, DiscoveryError
from elastic_driver.runtime.host_lists import Hosts, parse_hosts
from elastic_driver.runtime.probe import ProbeError, ScriptProbe

EVERY_S = 10.0  # between two questions
_ANSWER_S = 10.0
_OVER = "CANCELLED COMPLETED COMPLETING DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT"
_UNKNOWN = "Invalid job id"  # the job ended long ago, and Slurm has deleted its record
_NUMBER = re.compile(r"[0-9]{1,18}\Z")
_REPEATED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?\Z")
# What Slurm tells a batch script about one task, step or node (workers have other ones), and a key.
_NOT_OF_THE_JOB = re.compile(
    r"SLURM_(PROCID|LOCALID|NODEID|TASK_PID|GTIDS|STEP.*|SRUN_.*|LAUNCH_NODE_IPADDR|.*_ON_NODE"
    r"|CPU_BIND.*|MEM_BIND.*|TOPOLOGY_.*|PTY_.*|PMI.*|JWT|CONF.*|EXPORT_ENV|PRIO_PROCESS)\Z"
)
_GPUS = re.compile(r"(?:[^:,()]+:)*([0-9]{1,6})(?:\([^)]*\))?\Z")


class SlurmAllocation(Struct, frozen=True, kw_only=True):
    """The nodes of a Slurm job."""

    job_id: str
    nodes: tuple[str, ...]
    tasks: tuple[int, ...] | None = None  # of each node; None: the user gave Slurm no number
    gpus: int = 0  # of each node
    cpus: int | None = None  # of the smallest node
    step_tasks: int = 1  # how often srun has started us; 1 if it has not

    @property
    def source(self) -> str:
        """The name of this source of hosts, for messages."""
        return f"Slurm job {self.job_id}"

    def hosts(self, slots: int | None, wanted: int | None) -> Hosts:
        """Return the nodes with their slots.

        Args:
            slots: `--slots-per-host` or `--nproc-per-node`, if given; it comes first.
            wanted: workers of the whole job, if given.

        Without `slots` a node has a worker for each task that the user requested from Slurm. If no
        tasks were requested, or one on each node as for torchrun, it has a worker for each GPU.
        Without tasks and GPUs the nodes share the `wanted` workers.
        """
        if slots is None and self.tasks is not None and (max(self.tasks) > 1 or not self.gpus):
            return tuple(zip(self.nodes, self.tasks, strict=True))
        share = slots or self.gpus or -(-(wanted or 1) // len(self.nodes))
        return tuple((node, share) for node in self.nodes)


def read_allocation(environ: Mapping[str, str]) -> SlurmAllocation | None:
    """Return the allocation that these variables describe; None if there is none.

    Raises UsageError if they make no sense.
    """
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not job_id or not nodelist:
        return None
    step_tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    for name, text in (("SLURM_JOB_ID", job_id), ("SLURM_STEP_NUM_TASKS", step_tasks)):
        if not _NUMBER.match(text):
            raise UsageError(f"{name} is no number: {text!r}")
    nodes = tuple(name for name, _ in parse_hosts(nodelist, source="SLURM_JOB_NODELIST"))
    cpus = _for_each_node(environ, "SLURM_JOB_CPUS_PER_NODE", nodes)
    asked = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    return SlurmAllocation(
        job_id=job_id,
        nodes=nodes,
        # If no number of tasks was given, Slurm counts one for each CPU, or one for each node.
        tasks=_for_each_node(environ, "SLURM_TASKS_PER_NODE", nodes) if asked else None,
        gpus=_gpus(environ),
        cpus=min(cpus) if cpus else None,
        step_tasks=int(step_tasks),
    )


def variables_of_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the SLURM_* variables that are true for the whole job, from those of its batch script.

    A step that srun starts for an agent gets others under these names, or none.
    """
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("SLURM_") and not _NOT_OF_THE_JOB.match(name)
    }


def _for_each_node(
    environ: Mapping[str, str], name: str, nodes: tuple[str, ...]
) -> tuple[int, ...] | None:
    """Return `2(x3),1` as 2, 2, 2, 1."""
    text = environ.get(name)
    if text is None:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.match(part)
        if match is None or len(counts) > len(nodes):
            raise UsageError(f"{name} makes no sense: {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != len(nodes):
        raise UsageError(f"{name} speaks of {len(counts)} nodes, the node list of {len(nodes)}")
    return tuple(counts)


def _gpus(environ: Mapping[str, str]) -> int:
    """Return the GPUs of a node, from `4`, `a100:4` or `a100:2,v100:1`."""
    text = environ.get("SLURM_GPUS_PER_NODE") or environ.get("SLURM_GPUS_ON_NODE") or "0"
    total = 0
    for part in text.split(","):
        match = _GPUS.match(part)
        if match is None:
            raise UsageError(f"SLURM_GPUS_PER_NODE makes no sense: {text!r}")
        total += int(match[1])
    return total


class AllocationDiscovery:
    """A `HostDiscovery`: the nodes of an allocation that squeue names.

    Args:
        job_id: the allocation.
        hosts: its nodes with their slots at the start; a node that comes later has as many
            slots as the first of them.
        environ: the environment of squeue.
        every: seconds between two questions.

    `find` calls `on_over` once with the reason when the allocation is over.
    """

    def __init__(
        self, job_id: str, hosts: Hosts, environ: Mapping[str, str], *, every: float = EVERY_S
    ) -> None:
        self._job_id, self._every = job_id, every
        self._slots, self._hosts = dict(hosts), hosts
        self.on_over: Callable[[str], None] = lambda _reason: None
        self._over = False
        self._asked = time.monotonic()  # `hosts` was read from fresh variables
        self._program = shutil.which("squeue", path=environ.get("PATH"))
        self._squeue = ScriptProbe(
            Path(self._program or "squeue"),
            *("--noheader", f"--jobs={job_id}", "--states=all", "--format=%T %N"),
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
            usual = next(iter(self._slots.values()))
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
        """Return the allocation's state and its nodes."""
        try:
            state, _, nodes = self._squeue.run().decode(errors="replace").strip().partition(" ")
        except ProbeError as error:
            if _UNKNOWN in str(error):
                return "COMPLETED", ""
            state = nodes = ""
        if not state:
            raise DiscoveryError(f"squeue does not say which nodes Slurm job {self._job_id} has")
        return state, nodes
