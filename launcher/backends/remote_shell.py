"""A program that runs our commands on other hosts (ssh, srun, mpirun).

A `RemoteShell` says what is typed and what its failures mean. `launcher.backends.remote` runs it to
start and end agents, `launcher.backends.precheck` to examine hosts. It starts nothing itself.
"""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.runtime.host_lists import check_host
from launcher.backends.base import PACKAGE_ROOT, describe_end

NO_PYTHON = 127
_MAX_SAID = 300


@dataclass(frozen=True, kw_only=True)
class RemoteShell:
    """A program of this machine that runs a command of ours on another one.

    It passes its stdin on, brings back stdout and stderr, and ends with the command's exit status.

    Attributes:
        program: what is run.
        connect_timeout: seconds after which it gives up a host that does not answer.
        python: the interpreter on the hosts; the same path as here.
        home: the folder our packages are in, tried on the hosts too.
    """

    program: str
    connect_timeout: float = 10.0
    python: str = sys.executable
    home: Path = PACKAGE_ROOT

    def command(self, host: str, remote: str) -> tuple[str, ...]:
        """Return the command line that runs `remote`, a script for /bin/sh, on a valid host."""
        raise NotImplementedError

    def argv(self, host: str, *words: str) -> tuple[str, ...]:
        """Return the command line that runs `python -m launcher.agent.remote WORDS…` on a host.

        Raises ClusterError for an invalid name: it must not be taken for an option.
        """
        problem = self.name_problem(host)
        if problem:
            raise ClusterError(f"cannot reach {host!r} with {Path(self.program).name}: {problem}")
        return self.command(host, script(self.python, self.home, *words))

    def name_problem(self, host: str) -> str | None:
        """Return what is wrong with a host's name; None if nothing is."""
        return check_host(host)

    def environ(self) -> Mapping[str, str] | None:
        """Return the environment the program is run with; None means ours."""
        return None

    def check(self) -> None:
        """Raise UsageError if the program is missing here or cannot be used."""
        variables = self.environ() or {}
        if shutil.which(self.program, path=variables.get("PATH")) is None:
            raise UsageError(
                f"{self.program} was not found, which starts agents on other hosts; check PATH, or "
                "say --standalone for this machine alone"
            )

    def look_up(self, host: str) -> str:
        """Return the name or address by which the network knows a host."""
        return host

    def ending(self, host: str, exit_code: int, said: str) -> str | None:  # noqa: ARG002
        """Return why an agent that was up has ended; None: only the connection to it has.

        `exit_code` is the program's (0 or more), `said` what it wrote to stderr itself.
        """
        # A shell says 128+N for a signal, subprocess says -N.
        return describe_end(host, 128 - exit_code if exit_code > 128 else exit_code)

    def explain(self, host: str, exit_code: int, said: str) -> str:
        """Return one line on why a command on a host failed before it was up.

        `exit_code` is as subprocess gives it, `said` what came on stderr.
        """
        if exit_code == NO_PYTHON:
            return (
                f"{host}: there is no Python at {self.python}; install the same environment there"
            )
        if "No module named" in said:
            return f"{host}: elastic-driver is not installed in its {self.python}{last_line(said)}"
        return f"{host}: {self.python} ended with exit status {exit_code}{last_line(said)}"


def script(python: str, home: Path, *words: str) -> str:
    """Return `python -m launcher.agent.remote WORDS…` as a script for /bin/sh.

    It runs in `home`, the folder our packages are in here, if the host has it (a shared disk), and
    in / otherwise: Python looks there first, and a user's home folder may hold a `launcher.py`.
    """
    say = f"echo {shlex.quote(f'elasticrun: no Python at {python}')} >&2"
    return (
        f"cd {shlex.quote(str(home))} 2>/dev/null || cd /; "
        f"test -x {shlex.quote(python)} || {{ {say}; exit {NO_PYTHON}; }}; "
        f"exec {shlex.join((python, '-m', 'launcher.agent.remote', *words))}"
    )


def last_line(said: str) -> str:
    """Return the last line a program wrote, in parentheses; empty if it wrote nothing."""
    return f" ({said.strip().splitlines()[-1][:_MAX_SAID]})" if said.strip() else ""


def explain_by(host: str, said: str, meanings: Sequence[tuple[str, str]]) -> str | None:
    """Return the meaning of the first of these marks that is in `said`, with its line."""
    for mark, meaning in meanings:
        for line in said.splitlines():
            if mark in line:
                return f"{host}: {meaning}{last_line(line)}"
    return None
