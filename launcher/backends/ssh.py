"""The command line of ssh, and what its failures mean.

The system's ssh does the work, with the user's configuration, keys, agent and jump hosts. A job
only adds what it needs: ssh asks no questions, has deadlines, and forwards no ports (many
connections would compete for them).
"""

import shlex
import subprocess
from dataclasses import dataclass

from elastic_driver.runtime.backend import BackendJob
from launcher.backends.remote import RemoteBackend
from launcher.backends.remote_shell import Login, RemoteShell, explain_by, in_its_words, run_briefly

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


def make_backend(job: BackendJob) -> RemoteBackend:
    """Return the backend that is registered as `ssh`."""
    return RemoteBackend(job, SshShell.of(job))
