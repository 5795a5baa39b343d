"""Agents started by srun, each as a job step of its own inside the allocation we run in.

A step for each node, so that a node that dies ends its own step and no other, and can have a new
one when it is back. Steps share the node's cores, memory and GPUs (`--overlap`): the look before
the start and the end of a hanging agent are steps too. Slurm knows the steps' processes, so that
`scancel` and the time limit leave nothing, whatever becomes of us.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic_driver.errors import ClusterError
from elastic_driver.runtime.host_lists import check_host
from launcher.backends.base import PACKAGE_ROOT
from launcher.backends.local import describe_end
from launcher.backends.remote_shell import (
    explain_by,
    explain_command,
    from_shell,
    last_line,
    script,
)

IMMEDIATE_S = 10  # for Slurm to find room for a step
# What srun reads for itself; everything else that sbatch set would change what the step gets.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_EXPORT_ENV"})
_SLURMS = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_")


@dataclass(frozen=True)
class SrunReach:
    """srun inside an allocation (a `Reach`).

    Attributes:
        job_id: the allocation.
        variables: our environment.
        python: the interpreter on the nodes; the same path as here.
        home: the folder our packages are in, tried on the nodes too.
        program: srun.
    """

    job_id: str
    variables: Mapping[str, str] = field(repr=False)
    python: str = sys.executable
    home: Path = PACKAGE_ROOT
    program: str = "srun"
    connect_timeout: float = IMMEDIATE_S

    def argv(self, host: str, *words: str) -> tuple[str, ...]:
        """See `Reach.argv`."""
        problem = check_host(host)
        if problem:
            raise ClusterError(f"cannot reach {host!r} with srun: {problem}")
        return (
            self.program,
            f"--jobid={self.job_id}",
            *("--nodes=1", "--ntasks=1", f"--nodelist={host}"),
            *("--overlap", f"--immediate={IMMEDIATE_S}"),  # beside other steps, now or never
            *("--no-kill", "--kill-on-bad-exit=0"),  # nothing else has to end with it
            *("--mpi=none", "--cpu-bind=none"),  # workers are no MPI ranks, and share the cores
            *("--chdir=/", "--quiet", "--job-name=elastic-agent"),
            *("/bin/sh", "-c", script(self.python, self.home, *words)),
        )

    def environ(self) -> Mapping[str, str]:
        """See `Reach.environ`: what sbatch was asked for is not meant for our steps."""
        return {
            name: value
            for name, value in self.variables.items()
            if name in _KEPT or not name.startswith(_SLURMS)
        }

    def look_up(self, host: str) -> str:
        """See `Reach.look_up`."""
        return host

    def ending(self, host: str, exit_code: int, said: str) -> str | None:
        """See `Reach.ending`: srun ends with the step, never before it."""
        if "Node failure" in said:
            return f"the agent on {host} has ended: Slurm says that the node failed"
        return describe_end(host, from_shell(exit_code))

    def explain(self, host: str, exit_code: int, said: str) -> str:
        """See `Reach.explain`."""
        known = explain_by(host, said, _MEANINGS)
        if known is not None:
            return known
        if "srun: error: Unable to" in said:
            return f"{host}: srun failed{last_line(said)}; try: scontrol show node {host}"
        return explain_command(host, exit_code, said, self.python)


# What stands in srun's last words → what happened, and what to try.
_MEANINGS = (
    ("Requested node configuration is not available", "it is not a node of this allocation"),
    ("Requested nodes are busy", "Slurm has no room for a step there; is the node down?"),
    ("Unable to confirm allocation", "Slurm knows this allocation no more; is its time over?"),
    ("Invalid job id", "Slurm knows this allocation no more; is its time over?"),
    ("Job/step already completing", "the allocation is ending"),
    ("Unable to contact slurm controller", "slurmctld does not answer; ask whoever runs it"),
    ("Communication connection failure", "its slurmd does not answer; is the node down?"),
    ("Node failure", "Slurm says that the node failed"),
)
