"""Agents started by mpirun (Open MPI), an mpirun for each host.

One mpirun for all hosts would end them all when it loses one ("We cannot recover from this
failure, and therefore will terminate the job"); one for each host can fail, and be started again,
by itself. mpirun ends what it has started when it ends, so the agent's keeper is put into a
process it does not know of (`launcher.agent.remote apart`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic_driver.errors import ClusterError
from elastic_driver.runtime.host_lists import check_host
from launcher.agent.remote import OF_A_RANK
from launcher.backends.base import PACKAGE_ROOT
from launcher.backends.local import describe_end
from launcher.backends.remote_shell import explain_by, explain_command, from_shell, script
from launcher.backends.ssh import MEANINGS as SSH_MEANINGS
from launcher.backends.ssh import SshOptions, SshReach, common_options

LAUNCH_S = 10.0  # for Open MPI's daemon to start on a host, beyond ssh's own time
_LOST = "lost communication with a remote daemon"
_RULE = "-----"  # above and below what mpirun itself has to say
_SETTING, _AS_ROOT, _RANK = "OMPI_MCA_", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_COMM_WORLD_RANK"


@dataclass(frozen=True)
class MpirunReach:
    """Open MPI's mpirun (a `Reach`).

    Attributes:
        ssh: how mpirun's own ssh is to reach the hosts.
        variables: our environment.
        python: the interpreter on the hosts; the same path as here.
        home: the folder our packages are in, tried on the hosts too.
        program: mpirun.
    """

    ssh: SshOptions
    variables: Mapping[str, str] = field(repr=False)
    python: str = sys.executable
    home: Path = PACKAGE_ROOT
    program: str = "mpirun"

    @property
    def connect_timeout(self) -> float:
        """See `Reach.connect_timeout`."""
        return self.ssh.connect_timeout + LAUNCH_S

    def argv(self, host: str, *words: str) -> tuple[str, ...]:
        """See `Reach.argv`."""
        problem = check_host(host)
        if problem is None and ":" in host:
            problem = "mpirun takes no IPv6 addresses; give the host a name"
        if problem:
            raise ClusterError(f"cannot reach {host!r} with mpirun: {problem}")
        if words[0] == "keep":
            words = ("apart", *words[1:])
        return (
            self.program,
            *("--host", f"{host}:1", "-np", "1"),
            *("--bind-to", "none"),  # workers share the host's cores
            *("--mca", "plm_rsh_args", " ".join(common_options(self.ssh))),
            *("/bin/sh", "-c", script(self.python, self.home, *words)),
        )

    def environ(self) -> Mapping[str, str]:
        """See `Reach.environ`: Open MPI's settings stay, those that are a rank's of ours go."""
        is_rank = _RANK in self.variables
        return {
            name: value
            for name, value in self.variables.items()
            if not name.startswith(OF_A_RANK)
            or name.startswith(_AS_ROOT)
            or (name.startswith(_SETTING) and not is_rank)
        }

    def look_up(self, host: str) -> str:
        """See `Reach.look_up`: mpirun uses ssh too."""
        return SshReach(self.ssh).look_up(host)

    def ending(self, host: str, exit_code: int, said: str) -> str | None:
        """See `Reach.ending`."""
        return None if _LOST in said else describe_end(host, from_shell(exit_code))

    def explain(self, host: str, exit_code: int, said: str) -> str:
        """See `Reach.explain`."""
        known = explain_by(host, said, (*_MEANINGS, *SSH_MEANINGS))
        return known or explain_command(host, exit_code, said.partition(_RULE)[0], self.python)


# What stands in mpirun's words → what happened, and what to try.
_MEANINGS = (
    ("run as root", "mpirun refuses to run as root; see OMPI_ALLOW_RUN_AS_ROOT in mpirun(1)"),
    ("orted: ", "there is no Open MPI on the PATH of its ssh commands"),
    (_LOST, "mpirun lost it while the agent started"),
)
