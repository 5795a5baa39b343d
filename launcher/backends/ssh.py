"""What is typed to reach another host: ssh's command line, and what its failures mean.

The system's ssh does the work, with the user's configuration, keys, agent and jump hosts; only
what a job needs is added: no questions (nobody could answer them), deadlines, no port forwardings
(many connections would fight over them).
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

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

CONNECTION_FAILED = 255  # ssh's own exit status; an agent never has it (ssh(1), EXIT STATUS)
_ALIVE_COUNT = 3
_CONFIG_S = 10.0


class SshOptions(Struct, frozen=True, kw_only=True):
    """How to reach the hosts, beyond what ssh's own configuration says."""

    port: int | None = None  # --ssh-port
    identity_file: str | None = None  # --ssh-identity-file
    connect_timeout: int = 10  # seconds
    alive_interval: int = 10  # seconds; a host silent for three of them is disconnected
    program: str = "ssh"


def alive_interval(heartbeat_timeout: float) -> int:
    """The interval at which a silent connection is given up after the heartbeat timeout."""
    return max(1, round(heartbeat_timeout / _ALIVE_COUNT))


def ssh_argv(options: SshOptions, host: str, remote: str) -> tuple[str, ...]:
    """The command line that runs `remote`, a shell's command line, on `host`.

    Raises ClusterError for a name that is none: it must not be taken for an option of ssh.
    """
    problem = check_host(host)
    if problem:
        raise ClusterError(f"cannot reach {host!r} over ssh: {problem}")
    return (options.program, "-T", *common_options(options), "--", host, remote)


def common_options(options: SshOptions) -> tuple[str, ...]:
    """ssh's options for any host."""
    settings = (
        "BatchMode=yes",
        f"ConnectTimeout={options.connect_timeout}",
        f"ServerAliveInterval={options.alive_interval}",
        f"ServerAliveCountMax={_ALIVE_COUNT}",
        "ClearAllForwardings=yes",
        "ControlMaster=no",
    )
    words = [word for setting in settings for word in ("-o", setting)]
    if options.port is not None:
        words += ["-p", str(options.port)]
    if options.identity_file is not None:
        words += ["-i", options.identity_file]
    return tuple(words)


def remote_command(python: str, home: Path, *words: str) -> str:
    """`python -m launcher.agent.remote WORDS…` for a login shell of any kind."""
    return f"exec /bin/sh -c {shlex.quote(script(python, home, *words))}"


# What stands in ssh's last words → what happened, and what to try.
MEANINGS = (
    ("Could not resolve hostname", "its name has no address; check the name, or ssh's config"),
    ("Permission denied", "ssh was refused (no key it accepts); try ssh-copy-id, or -i"),
    ("Host key verification failed", "its host key is unknown or has changed; ssh there once"),
    ("Too many authentication failures", "ssh was refused; name the right key with -i"),
    ("Connection refused", "it is up, but nothing listens on ssh's port; check sshd, or -p"),
    ("timed out", "it did not answer in time; is it up, and on this network?"),
    ("No route to host", "there is no way to it, or it is down"),
    ("Network is unreachable", "there is no way to its network"),
    ("Connection reset", "it closed the connection; sshd may be overloaded (MaxStartups)"),
    ("Connection closed", "it closed the connection; sshd may be overloaded (MaxStartups)"),
)


@dataclass(frozen=True)
class SshReach:
    """The system's ssh (a `Reach`).

    Attributes:
        options: how to reach the hosts.
        python: the interpreter on the hosts; the same path as here.
        home: the folder our packages are in, tried on the hosts too.
    """

    options: SshOptions
    python: str = sys.executable
    home: Path = PACKAGE_ROOT

    @property
    def program(self) -> str:
        """See `Reach.program`."""
        return self.options.program

    @property
    def connect_timeout(self) -> float:
        """See `Reach.connect_timeout`."""
        return self.options.connect_timeout

    def argv(self, host: str, *words: str) -> tuple[str, ...]:
        """See `Reach.argv`."""
        return ssh_argv(self.options, host, remote_command(self.python, self.home, *words))

    def environ(self) -> None:
        """See `Reach.environ`: ssh itself passes next to nothing on."""
        return

    def look_up(self, host: str) -> str:
        """See `Reach.look_up`: `HostName` of ssh's configuration."""
        try:
            done = subprocess.run(
                [self.options.program, "-G", "--", host],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_CONFIG_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return host
        names = [line[9:] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        return names[0].strip() if names else host

    def ending(self, host: str, exit_code: int, said: str) -> str | None:
        """See `Reach.ending`."""
        if exit_code != CONNECTION_FAILED:
            return describe_end(host, from_shell(exit_code))
        # ssh says why a connection broke, and nothing when what ran there was killed.
        return None if said else f"the agent on {host} was killed"

    def explain(self, host: str, exit_code: int, said: str) -> str:
        """See `Reach.explain`."""
        if exit_code != CONNECTION_FAILED:
            return explain_command(host, exit_code, said, self.python)
        known = explain_by(host, said, MEANINGS)
        return known or f"{host}: ssh failed{last_line(said)}; try: ssh {host} true"
