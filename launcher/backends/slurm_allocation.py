"""The Slurm allocation we run in: its nodes, and the workers of each. Pure.

`sbatch` and `salloc` describe an allocation in SLURM_* variables (sbatch(1), OUTPUT ENVIRONMENT
VARIABLES). `launcher.plan` reads them here.
"""

import re
from collections.abc import Mapping

from msgspec import Struct

from elastic_driver.errors import UsageError
from elastic_driver.runtime.host_lists import Hosts, parse_hosts

_REPEATED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?\Z")
_GPUS = re.compile(r"(?:[^:,()]+:)*([0-9]{1,6})(?:\([^)]*\))?\Z")


class SlurmAllocation(Struct, frozen=True, kw_only=True):
    """The nodes of a Slurm job."""

    job_id: str
    nodes: tuple[str, ...]
    tasks: tuple[int, ...] | None = None  # of each node; None: no number was asked for
    gpus: int = 0  # of a node
    cpus: int | None = None  # of the smallest node
    step_tasks: int = 1  # how often we ourselves were started, where srun did that

    @property
    def source(self) -> str:
        """The source of hosts taken from here, in words."""
        return f"Slurm job {self.job_id}"

    def hosts(self, slots: int | None, wanted: int | None) -> Hosts:
        """Return the nodes with their slots.

        Args:
            slots: `--slots-per-host` or `--nproc-per-node`, where given; it counts most.
            wanted: workers of the whole job, where given.

        Otherwise a worker for each task that was asked for; a worker for each GPU where every node
        has one task, as in scripts written for torchrun, or none was asked for; and where there
        are no GPUs either, as many as it takes to have `wanted` workers.
        """
        if slots is not None:
            return tuple((node, slots) for node in self.nodes)
        if self.tasks is not None and (max(self.tasks) > 1 or not self.gpus):
            return tuple(zip(self.nodes, self.tasks, strict=True))
        if self.gpus:
            return tuple((node, self.gpus) for node in self.nodes)
        share = -(-(wanted or 1) // len(self.nodes))
        return tuple((node, share) for node in self.nodes)


def read_allocation(environ: Mapping[str, str]) -> SlurmAllocation | None:
    """Return the allocation these variables describe; None if there is none.

    Raises UsageError where they make no sense.
    """
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not job_id or not nodelist:
        return None
    step_tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    for name, text in (("SLURM_JOB_ID", job_id), ("SLURM_STEP_NUM_TASKS", step_tasks)):
        if not text.isdecimal():
            raise UsageError(f"{name} is no number: {text!r}")
    nodes = tuple(name for name, _ in parse_hosts(nodelist, source="SLURM_JOB_NODELIST"))
    cpus = _for_each_node(environ, "SLURM_JOB_CPUS_PER_NODE", nodes)
    asked = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    return SlurmAllocation(
        job_id=job_id,
        nodes=nodes,
        # Without a wish for tasks Slurm counts one for each CPU, or one for each node.
        tasks=_for_each_node(environ, "SLURM_TASKS_PER_NODE", nodes) if asked else None,
        gpus=_gpus(environ),
        cpus=min(cpus) if cpus else None,
        step_tasks=int(step_tasks),
    )


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
