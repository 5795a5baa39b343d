"""The programs that reach other hosts: ssh, srun and mpirun, and what their failures mean.

**ssh.** The system's ssh does the work, with the user's configuration, keys, agent and jump hosts.
A job only adds what it needs: ssh asks no questions, has deadlines, and forwards no ports (many
connections would compete for them).

**srun** starts each agent as a job step of its own inside the allocation we run in. So a node that
dies ends no other step, and can have a new one when it is back. Steps share the node's cores,
memory and GPUs (`--overlap`): the check before the start and the killing of a hanging agent are
steps too. Slurm knows the steps' processes, so `scancel` and the time limit leave nothing behind,
even if elasticrun is gone.

**mpirun** (Open MPI) is started for each host. One for all hosts would end all agents when it loses
one host ("We cannot recover from this failure, and therefore will terminate the job"). When mpirun
ends, it kills all processes that it has started, so the agent's keeper runs in a process that
mpirun does not know (`launcher.agent.remote apart`).
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_driver.errors import UsageError
from elastic_driver.runtime.backend import BackendJob
from launcher.agent.remote import OF_A_RANK
from launcher.backends.mpi_ranks import settings_of_mpirun
from launcher.backends.remote_agents import RemoteBackend
from launcher.backends.remote_shell import Login, RemoteShell, explain_by, in_its_words, run_briefly
from launcher.network import addresses_of

# ---- ssh -----------------------------------------------------------------------------------

CONNECTION_FAILED = 255  # ssh's own exit status; an agent never has it (ssh(1), EXIT STATUS)
_ALIVE_COUNT = 3
_CONFIG_S = 10.0

# Text in ssh's last lines → what it means, and what to try. Those that come first count.
_REFUSED = (
    (
        "Too many authentication failures",
        "it has been offered too many keys; name the right one with -i",
    ),
    (
        "Host key verification failed",
        "its key is not the known one, or not known yet; compare it, and ssh there once",
    ),
    ("Permission denied", "it takes none of your keys, or not this user; try ssh-copy-id, or -i"),
    ("Access denied", "its PAM does not let you in; you may need a job there, or an account"),
    ("pam_", "its PAM does not let you in; ask who runs it"),
    ("account has expired", "its PAM does not let you in; ask who runs it"),
    ("account is locked", "its PAM does not let you in; ask who runs it"),
    ("System is booting up", "nobody may log in yet"),
    ("no matching ", "its sshd and this ssh have no algorithm in common"),
    ("Bad owner or permissions", "ssh does not take its own configuration"),
    ("Bad configuration option", "ssh does not take its own configuration"),
    ("UNPROTECTED PRIVATE KEY FILE", "others can read your key; chmod 600"),
)
_UNREACHABLE = (
    ("Could not resolve hostname", "its name has no address; check the name, or ssh's config"),
    ("Connection refused", "it is up, but nothing listens on ssh's port; check sshd, or -p"),
    ("timed out", "it did not answer in time; is it up, and on this network?"),
    ("No route to host", "there is no way to it, or it is down"),
    ("Network is unreachable", "there is no way to its network"),
    ("Connection reset", "it closed the connection; sshd may be overloaded (MaxStartups)"),
    ("Connection closed", "it closed the connection; sshd may be overloaded (MaxStartups)"),
)
_MAY_PASS_SOON = ("Connection refused", "Connection reset", "Connection closed")
SSH_MEANINGS = (*_REFUSED, *_UNREACHABLE)


@dataclass(frozen=True, kw_only=True)
class SshShell(RemoteShell):
    """The system's ssh.

    Attributes:
        port: --ssh-port; None: as in ssh's configuration.
        identity_file: --ssh-identity-file; None: as in ssh's configuration.
        alive_interval: seconds; a host silent for three of them is disconnected.
    """

    program: str = "ssh"
    port: int | None = None
    identity_file: str | None = None
    alive_interval: int = 10

    @classmethod
    def of(cls, job: BackendJob) -> "SshShell":
        """Return the shell with a job's options."""
        return cls(
            port=job.ssh_port,
            identity_file=job.ssh_identity_file,
            alive_interval=max(1, round(job.heartbeat_timeout / _ALIVE_COUNT)),
        )

    def command(self, host: str, remote: str) -> tuple[str, ...]:
        """See `RemoteShell.command`; the login shell on the host may be of any kind."""
        remote = f"exec /bin/sh -c {shlex.quote(remote)}"
        return (self.program, "-T", *self.options(), "--", host, remote)

    def options(self) -> tuple[str, ...]:
        """Return ssh's options for any host."""
        settings = (
            "BatchMode=yes",
            f"ConnectTimeout={self.connect_timeout:g}",
            f"ServerAliveInterval={self.alive_interval}",
            f"ServerAliveCountMax={_ALIVE_COUNT}",
            "ClearAllForwardings=yes",
            "ControlMaster=no",
        )
        words = [word for setting in settings for word in ("-o", setting)]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity_file is not None:
            words += ["-i", self.identity_file]
        return tuple(words)

    def look_up(self, host: str) -> str:
        """See `RemoteShell.look_up`: `HostName` of ssh's configuration."""
        return self._configuration(host).get("hostname", host)

    def probe_address(self, host: str) -> tuple[str, int] | None:
        """See `RemoteShell.probe_address`: `HostName` and `Port`; None behind a jump host."""
        found = self._configuration(host)
        ways = (found.get("proxyjump", "none"), found.get("proxycommand", "none"))
        port = found.get("port", "")
        if ways != ("none", "none") or not port.isdecimal():
            return None
        return found.get("hostname", host), int(port)

    def unreachable(self, exit_code: int, said: str) -> bool:
        """See `RemoteShell.unreachable`."""
        refused = any(mark in said for mark, _ in _REFUSED)
        gone = any(mark in said for mark, _ in _UNREACHABLE)
        return exit_code == CONNECTION_FAILED and gone and not refused

    def may_pass_soon(self, problem: str) -> bool:
        """See `RemoteShell.may_pass_soon`."""
        return any(mark in problem for mark in _MAY_PASS_SOON)

    def refused(self, exit_code: int, said: str, login: Login) -> bool:
        """See `RemoteShell.refused`."""
        if exit_code == CONNECTION_FAILED and not login.reached:
            return any(mark in said for mark, _ in _REFUSED)
        return super().refused(exit_code, said, login)

    def _configuration(self, host: str) -> dict[str, str]:
        """Return ssh's configuration for a host (`ssh -G`); empty if ssh does not say it."""
        try:
            done = run_briefly((self.program, *self.options(), "-G", "--", host), _CONFIG_S)
        except (OSError, subprocess.TimeoutExpired):
            return {}
        words = (line.partition(" ") for line in done.stdout.splitlines())
        return {name: value.strip() for name, _, value in words}

    def ending(self, host: str, exit_code: int, said: str) -> str | None:
        """See `RemoteShell.ending`."""
        if exit_code != CONNECTION_FAILED:
            return super().ending(host, exit_code, said)
        # ssh says why a connection broke, and nothing when what ran there was killed.
        return None if said else f"the agent on {host} was killed"

    def explain(self, host: str, exit_code: int, said: str, login: Login) -> str:
        """See `RemoteShell.explain`."""
        if exit_code != CONNECTION_FAILED or login.reached:
            return super().explain(host, exit_code, said, login)
        known = explain_by(host, said, SSH_MEANINGS)
        words = in_its_words(said) or "ssh failed and said nothing"
        return known or f"{host}: {words}; try: ssh {host} true"


def make_ssh(job: BackendJob) -> RemoteBackend:
    """Return the backend that is registered as `ssh`."""
    return RemoteBackend(job, SshShell.of(job))


# ---- srun ----------------------------------------------------------------------------------

_NODE_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")
IMMEDIATE_S = 10  # for Slurm to find room for a step
# Variables that srun itself needs; the others that sbatch sets would change the step's resources.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_EXPORT_ENV"})
_SLURMS = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_")

# Text in srun's last lines → what happened, and what to try.
_SRUN_MEANINGS = (
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
        known = explain_by(host, said, _SRUN_MEANINGS)
        if known is None and "srun: error: Unable to" in said:
            return f"{host}: {in_its_words(said)}; try: scontrol show node {host}"
        return known or super().explain(host, exit_code, said, login)


def make_srun(job: BackendJob) -> RemoteBackend:
    """Return the backend that is registered as `slurm`; raises UsageError outside an allocation."""
    if job.allocation is None:
        raise UsageError(
            "--backend slurm works inside an allocation only: start it with sbatch or salloc"
        )
    shell = SrunShell(job_id=job.allocation, variables=job.environ, options=job.step_options)
    return RemoteBackend(job, shell)


# ---- mpirun --------------------------------------------------------------------------------

LAUNCH_S = 10.0  # for Open MPI's daemon to start on a host, beyond ssh's own time
_VERSION_S = 10.0
_LOST = "lost communication with a remote daemon"
_RULE = "-----"  # a line above and below the messages of mpirun itself

# Text in mpirun's output → what happened, and what to try.
_MPIRUN_MEANINGS = (
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
        known = any(mark in said for mark, _ in _MPIRUN_MEANINGS if mark != _LOST)
        return known or self.ssh.refused(CONNECTION_FAILED, said, login)

    def ending(self, host: str, exit_code: int, said: str) -> str | None:
        """See `RemoteShell.ending`."""
        return None if _LOST in said else super().ending(host, exit_code, said)

    def explain(self, host: str, exit_code: int, said: str, login: Login) -> str:
        """See `RemoteShell.explain`."""
        known = explain_by(host, said, (*_MPIRUN_MEANINGS, *SSH_MEANINGS))
        own = said.partition(_RULE)[0].strip() or said
        return known or super().explain(host, exit_code, own, login)


def make_mpi(job: BackendJob) -> RemoteBackend:
    """Return the backend that is registered as `mpi`."""
    try:
        words = tuple(shlex.split(job.mpi_args or ""))
    except ValueError as error:
        raise UsageError(f"--mpi-args {job.mpi_args!r}: {error}") from None
    return RemoteBackend(job, MpirunShell(ssh=SshShell.of(job), variables=job.environ, words=words))
