"""What a way to reach other hosts (ssh, srun, mpirun) has to offer, and what all of them share.

A `Reach` says what is typed and what its failures mean; `launcher.backends.remote` runs it to start
and end agents, `launcher.submit.precheck` to look at hosts. It starts nothing itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

NO_PYTHON = 127
_MAX_SAID = 300


class Reach(Protocol):
    """A program of this machine that runs a command of ours on another one.

    It hands its stdin on, brings back stdout and stderr, and ends with the command's exit status.
    """

    @property
    def program(self) -> str:
        """What is run."""

    @property
    def connect_timeout(self) -> float:
        """Seconds after which it gives up a host that does not answer."""

    def argv(self, host: str, *words: str) -> tuple[str, ...]:
        """The command line that runs `python -m launcher.agent.remote WORDS…` on a host.

        Raises ClusterError for a name that is none: it must not be taken for an option.
        """

    def environ(self) -> Mapping[str, str] | None:
        """The environment the program is run with; None: ours."""

    def look_up(self, host: str) -> str:
        """The name or address under which the network knows a host."""

    def ending(self, host: str, exit_code: int, said: str) -> str | None:
        """Why an agent that was up has ended, None: only the connection to it has.

        `exit_code` is the program's (0 or more), `said` what it has written to stderr itself.
        """

    def explain(self, host: str, exit_code: int, said: str) -> str:
        """One line on why a command on a host did not get as far as it should have.

        `exit_code` as subprocess gives it, `said`: what came on stderr.
        """


def script(python: str, home: Path, *words: str) -> str:
    """`python -m launcher.agent.remote WORDS…` as a script for /bin/sh.

    It runs in `home`, the folder our packages are in here, where the host has it (a disk that the
    hosts share), and in / otherwise: Python looks there first, and a user's home folder may well
    hold a `launcher.py`.
    """
    say = f"echo {shlex.quote(f'elasticrun: no Python at {python}')} >&2"
    return (
        f"cd {shlex.quote(str(home))} 2>/dev/null || cd /; "
        f"test -x {shlex.quote(python)} || {{ {say}; exit {NO_PYTHON}; }}; "
        f"exec {shlex.join((python, '-m', 'launcher.agent.remote', *words))}"
    )


def last_line(said: str) -> str:
    """The last thing a program said, in parentheses; empty where it said nothing."""
    return f" ({said.strip().splitlines()[-1][:_MAX_SAID]})" if said.strip() else ""


def explain_command(host: str, exit_code: int, said: str, python: str) -> str:
    """Why our own command on a host failed, which was reached."""
    if exit_code == NO_PYTHON:
        return f"{host}: there is no Python at {python}; install the same environment there"
    if "No module named" in said:
        return f"{host}: elastic-driver is not installed in its {python}{last_line(said)}"
    return f"{host}: {python} ended with exit status {exit_code}{last_line(said)}"


def explain_by(host: str, said: str, meanings: Sequence[tuple[str, str]]) -> str | None:
    """What the first of these marks that stands in `said` means, with the line it stands in."""
    for mark, meaning in meanings:
        for line in said.splitlines():
            if mark in line:
                return f"{host}: {meaning}{last_line(line)}"
    return None


def from_shell(exit_code: int) -> int:
    """An exit status with a shell's way of telling a signal, as subprocess would give it."""
    return 128 - exit_code if exit_code > 128 else exit_code
