"""Agents started by mpirun (Open MPI), an mpirun for each host.

One mpirun for all hosts would end all agents when it loses one host ("We cannot recover from this
failure, and therefore will terminate the job"). If the mpirun of one host fails, only that host's
agent is started again. When mpirun ends, it kills all processes that it has started, so the agent's
keeper runs in a process that mpirun does not know (`launcher.agent.remote apart`).
"""

import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_driver.errors import UsageError
from elastic_driver.runtime.backend import BackendJob
from launcher.agent.remote import OF_A_RANK
from launcher.backends.mpi_ranks import settings_of_mpirun
from launcher.backends.remote import RemoteBackend
from launcher.backends.remote_shell import Login, RemoteShell, explain_by, run_briefly
from launcher.backends.ssh import CONNECTION_FAILED, SSH_MEANINGS, SshShell

LAUNCH_S = 10.0  # for Open MPI's daemon to start on a host, beyond ssh's own time
_VERSION_S = 10.0
_LOST = "lost communication with a remote daemon"
_RULE = "-----"  # a line above and below the messages of mpirun itself

# Text in mpirun's output → what happened, and what to try.
_MEANINGS = (
    ("run as root", "mpirun refuses to run as root; see OMPI_ALLOW_RUN_AS_ROOT in mpirun(1)"),
    ("orted: ", "there is no Open MPI on the PATH of its ssh commands"),
    (_LOST, "mpirun lost it while the agent started"),
)


@dataclass(frozen=True, kw_only=True)
class MpirunShell(RemoteShell):
    """Open MPI's mpirun.

    Attributes:
        ssh: how mpirun's own ssh is to reach the hosts.
        variables: our environment.
        words: more words for mpirun's command line.
    """

    program: str = "mpirun"
    connect_timeout: float = 10.0 + LAUNCH_S
    ssh: SshShell
    variables: Mapping[str, str] = field(repr=False)
    words: tuple[str, ...] = ()

    def argv(self, host: str, *words: str) -> tuple[str, ...]:
        """See `RemoteShell.argv`; the agent is kept out of mpirun's reach."""
        if words[0] == "keep":
            words = ("apart", *words[1:])
        return super().argv(host, *words)

    def command(self, host: str, remote: str) -> tuple[str, ...]:
        """See `RemoteShell.command`."""
        return (
            self.program,
            *("--host", f"{host}:1", "-np", "1"),
            *("--bind-to", "none"),  # workers share the host's cores
            *("--mca", "plm_rsh_args", " ".join(self.ssh.options())),
            *self.words,
            *("/bin/sh", "-c", remote),
        )

    def name_problem(self, host: str) -> str | None:
        """See `RemoteShell.name_problem`."""
        if ":" in host:
            return "mpirun takes no IPv6 addresses; give the host a name"
        return super().name_problem(host)

    def environ(self) -> Mapping[str, str]:
        """See `RemoteShell.environ`: settings of Open MPI stay, variables of a rank are removed."""
        settings = settings_of_mpirun(self.variables)
        return {
            name: value
            for name, value in self.variables.items()
            if not name.startswith(OF_A_RANK) or name in settings
        }

    def check(self) -> None:
        """See `RemoteShell.check`: other MPIs take other options."""
        program = shutil.which(self.program, path=self.variables.get("PATH"))
        if program is None:
            raise UsageError("--backend mpi needs mpirun, which was not found; install Open MPI")
        try:
            done = run_briefly((program, "--version"), _VERSION_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"--backend mpi: {program} --version fails: {error}") from None
        if "Open MPI" not in done.stdout + done.stderr:
            raise UsageError(
                f"--backend mpi needs Open MPI, and {program} is not; use --backend ssh"
            )

    def look_up(self, host: str) -> str:
        """See `RemoteShell.look_up`: mpirun uses ssh too."""
        return self.ssh.look_up(host)

    def probe_address(self, host: str) -> tuple[str, int] | None:
        """See `RemoteShell.probe_address`."""
        return self.ssh.probe_address(host)

    def unreachable(self, exit_code: int, said: str) -> bool:  # noqa: ARG002
        """See `RemoteShell.unreachable`; mpirun has an exit status of its own."""
        return self.ssh.unreachable(CONNECTION_FAILED, said)

    def refused(self, exit_code: int, said: str, login: Login) -> bool:
        """See `RemoteShell.refused`; mpirun ends for many reasons before our command."""
        if login.reached:
            return super().refused(exit_code, said, login)
        known = any(mark in said for mark, _ in _MEANINGS if mark != _LOST)
        return known or self.ssh.refused(CONNECTION_FAILED, said, login)

    def ending(self, host: str, exit_code: int, said: str) -> str | None:
        """See `RemoteShell.ending`."""
        return None if _LOST in said else super().ending(host, exit_code, said)

    def explain(self, host: str, exit_code: int, said: str, login: Login) -> str:
        """See `RemoteShell.explain`."""
        known = explain_by(host, said, (*_MEANINGS, *SSH_MEANINGS))
        own = said.partition(_RULE)[0].strip() or said
        return known or super().explain(host, exit_code, own, login)


def make_backend(job: BackendJob) -> RemoteBackend:
    """Return the backend that is registered as `mpi`."""
    try:
        words = tuple(shlex.split(job.mpi_args or ""))
    except ValueError as error:
        raise UsageError(f"--mpi-args {job.mpi_args!r}: {error}") from None
    return RemoteBackend(job, MpirunShell(ssh=SshShell.of(job), variables=job.environ, words=words))
