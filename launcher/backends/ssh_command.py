"""What is typed to reach another host: ssh's command line, and what its failures mean. Pure.

The system's ssh does the work, with the user's configuration, keys, agent and jump hosts; only
what a job needs is added: no questions (nobody could answer them), deadlines, no port forwardings
(many connections would fight over them). `launcher.backends.ssh` and `launcher.precheck` run it.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from msgspec import Struct

from elastic_driver.errors import ClusterError
from elastic_driver.runtime.hostlist import check_host

CONNECTION_FAILED = 255  # ssh's own exit status; an agent never has it (ssh(1), EXIT STATUS)
NO_PYTHON = 127
_ALIVE_COUNT = 3
_MAX_SAID = 300


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
    settings = (
        "BatchMode=yes",
        f"ConnectTimeout={options.connect_timeout}",
        f"ServerAliveInterval={options.alive_interval}",
        f"ServerAliveCountMax={_ALIVE_COUNT}",
        "ClearAllForwardings=yes",
        "ControlMaster=no",
    )
    argv = [options.program, "-T"]
    for setting in settings:
        argv += ["-o", setting]
    if options.port is not None:
        argv += ["-p", str(options.port)]
    if options.identity_file is not None:
        argv += ["-i", options.identity_file]
    return (*argv, "--", host, remote)


def remote_command(python: str, home: Path, *words: str) -> str:
    """`python -m launcher.agent.remote WORDS…` for a login shell of any kind.

    It runs in `home`, the folder our packages are in here, where the host has it (a disk that the
    hosts share), and in / otherwise: Python looks there first, and a user's home folder may well
    hold a `launcher.py`.
    """
    say = f"echo {shlex.quote(f'elasticrun: no Python at {python}')} >&2"
    script = (
        f"cd {shlex.quote(str(home))} 2>/dev/null || cd /; "
        f"test -x {shlex.quote(python)} || {{ {say}; exit {NO_PYTHON}; }}; "
        f"exec {shlex.join((python, '-m', 'launcher.agent.remote', *words))}"
    )
    return f"exec /bin/sh -c {shlex.quote(script)}"


# What stands in ssh's last words → what happened, and what to try.
_MEANINGS = (
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


def explain(host: str, exit_code: int, said: str, python: str) -> str:
    """One line on why a command on `host` did not get as far as it should have.

    `exit_code` as subprocess gives it, `said`: what came on stderr.
    """
    last = said.strip().splitlines()[-1][:_MAX_SAID] if said.strip() else ""
    quoted = f" ({last})" if last else ""
    if exit_code == CONNECTION_FAILED:
        for mark, meaning in _MEANINGS:
            if mark in said:
                return f"{host}: {meaning}{quoted}"
        return f"{host}: ssh failed{quoted}; try: ssh {host} true"
    if exit_code == NO_PYTHON:
        return f"{host}: there is no Python at {python}; install the same environment there"
    if "No module named" in said:
        return f"{host}: elastic-driver is not installed in its {python}{quoted}"
    return f"{host}: {python} ended with exit status {exit_code}{quoted}"
