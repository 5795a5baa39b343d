"""Agents started by srun, each as a job step of its own inside the allocation we run in.

Each node has a step of its own, so a node that dies ends no other step, and can have a new
one when it is back. Steps share the node's cores, memory and GPUs (`--overlap`): the check before
the start and the killing of a hanging agent are steps too. Slurm knows the steps' processes, so
`scancel` and the time limit leave nothing behind, even if elasticrun is gone.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_driver.errors import UsageError
from elastic_driver.runtime.backend import BackendJob
from launcher.backends.remote import RemoteBackend
from launcher.backends.remote_shell import Login, RemoteShell, explain_by, in_its_words, run_briefly
from launcher.network import addresses_of

_NODE_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")
IMMEDIATE_S = 10  # for Slurm to find room for a step
# Variables that srun itself needs; the others that sbatch sets would change the step's resources.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_EXPORT_ENV"})
_SLURMS = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_")

# Text in srun's last lines → what happened, and what to try.
_MEANINGS = (
    ("Requested node configuration is not available", "it is not a node of this allocation"),
    ("Requested nodes are busy", "Slurm has no room for a step there; is the node down?"),
    ("Unable to confirm allocation", "Slurm does not know this allocation; is its time over?"),
    ("Invalid job id", "Slurm does not know this allocation; is its time over?"),
    ("Job/step already completing", "the allocation is ending"),
    ("Unable to contact slurm controller", "slurmctld does not answer; ask the operators"),
    ("Communication connection failure", "its slurmd does not answer; is the node down?"),
    ("Node failure", "Slurm says that the node failed"),
)


@dataclass(frozen=True, kw_only=True)
class SrunShell(RemoteShell):
    """srun inside an allocation.

    Attributes:
        job_id: the allocation.
        variables: our environment.
        options: more options for the step of an agent, by host: what it has of its node.
    """

    program: str = "srun"
    connect_timeout: float = IMMEDIATE_S
    job_id: str
    variables: Mapping[str, str] = field(repr=False)
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def argv(self, host: str, *words: str) -> tuple[str, ...]:
        """See `RemoteShell.argv`; only agents have GPUs, and other steps start without any."""
        program, *others = super().argv(host, *words)
        options = self.options.get(host, ())
        if words[0] != "keep":
            options = (*(word for word in options if not word.startswith("--gpus")), "--gres=none")
        return (program, *options, *others)

    def command(self, host: str, remote: str) -> tuple[str, ...]:
        """See `RemoteShell.command`."""
        return (
            self.program,
            f"--jobid={self.job_id}",
            *("--nodes=1", "--ntasks=1", f"--nodelist={host}"),
            *("--overlap", f"--immediate={IMMEDIATE_S}"),  # beside other steps, or fail soon
            *("--no-kill", "--kill-on-bad-exit=0"),  # no other step ends with it
            *("--mpi=none", "--cpu-bind=none"),  # workers are no MPI ranks, and share the cores
            *("--chdir=/", "--quiet", "--job-name=elastic-agent"),
            *("/bin/sh", "-c", remote),
        )

    def environ(self) -> Mapping[str, str]:
        """See `RemoteShell.environ`; sbatch's own options are not passed to our steps."""
        return {
            name: value
            for name, value in self.variables.items()
            if name in _KEPT or not name.startswith(_SLURMS)
        }

    def refused(self, exit_code: int, said: str, login: Login) -> bool:
        """See `RemoteShell.refused`; what Slurm itself refuses may pass."""
        return login.reached and super().refused(exit_code, said, login)

    def look_up(self, host: str) -> str:
        """See `RemoteShell.look_up`: Slurm's NodeAddr, where a node's name has no address here."""
        if addresses_of(host):
            return host
        variables = self.environ()
        ask = ("--oneliner", "show", "node", host)
        program = shutil.which("scontrol", path=variables.get("PATH"))
        try:
            asked = run_briefly((program or "", *ask), IMMEDIATE_S, variables) if program else None
        except (OSError, subprocess.TimeoutExpired):  # as if Slurm did not know the node
            asked = None
        known = _NODE_ADDRESS.search("" if asked is None else asked.stdout)
        return known[1] if known else host

    def ending(self, host: str, exit_code: int, said: str) -> str | None:
        """See `RemoteShell.ending`: srun ends with the step, never before it."""
        if "Node failure" in said:
            return f"the agent on {host} has ended: Slurm says that the node failed"
        return super().ending(host, exit_code, said)

    def explain(self, host: str, exit_code: int, said: str, login: Login) -> str:
        """See `RemoteShell.explain`."""
        known = explain_by(host, said, _MEANINGS)
        if known is None and "srun: error: Unable to" in said:
            return f"{host}: {in_its_words(said)}; try: scontrol show node {host}"
        return known or super().explain(host, exit_code, said, login)


def make_backend(job: BackendJob) -> RemoteBackend:
    """Return the backend that is registered as `slurm`; raises UsageError outside an allocation."""
    if job.allocation is None:
        raise UsageError(
            "--backend slurm works inside an allocation only: start it with sbatch or salloc"
        )
    shell = SrunShell(job_id=job.allocation, variables=job.environ, options=job.step_options)
    return RemoteBackend(job, shell)
