"""A program that runs our commands on other hosts (ssh, srun, mpirun), and the pre-check with it.

A `RemoteShell` says which command line to run and what its failures mean. The backend in
`launcher.backends.remote` runs it to start and end agents. `precheck` runs it before the job, to
find hosts where no agent can run: a host needs our Python, our package in the same version, and the
job's folder.
"""

import asyncio
import shlex
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.runtime.backend import RefusedReason, UnreachableReason
from elastic_driver.runtime.discovery import check_host
from launcher import version
from launcher.agent.marks import LOOKED, NO_STDOUT, SAY_REACHED
from launcher.backends.base import PACKAGE_ROOT, describe_end
from launcher.backends.client import END_STDIN_S, Client, Login
from launcher.backends.words import FILES, describe_login, in_its_words, quoted
from rendezvous.wire import UNREADABLE

NO_PYTHON = 127
AT_ONCE = 32  # hosts that are asked at the same time
LOOK_S = 20.0  # beyond the time to connect: Python has to be loaded from a slow disk
LOOK_AGAIN_S = (1.0, 2.0)  # pauses before a host is asked again that broke off the connection
_MAX_SAID = 4096


@dataclass(frozen=True, kw_only=True)
class RemoteShell(ABC):
    """A program of this machine that runs a command of ours on another one.

    It passes its stdin on, brings back stdout and stderr, and ends with the command's exit status.

    Attributes:
        program: the program's name or path.
        connect_timeout: seconds after which it gives up a host that does not answer.
        python: the interpreter on the hosts; the same path as here.
        home: the folder our packages are in, tried on the hosts too.
    """

    program: str
    connect_timeout: float = 10.0
    python: str = sys.executable
    home: Path = PACKAGE_ROOT

    @abstractmethod
    def command(self, host: str, remote: str) -> tuple[str, ...]:
        """Return the command line that runs `remote`, a script for /bin/sh, on a valid host."""

    def argv(self, host: str, *words: str) -> tuple[str, ...]:
        """Return the command line that runs `python -m launcher.agent.remote WORDS…` on a host.

        Raises ClusterError for an invalid name: it must not be taken for an option.
        """
        if problem := self.name_problem(host):
            raise ClusterError(f"cannot reach {host!r} with {Path(self.program).name}: {problem}")
        return self.command(host, script(self.python, self.home, *words))

    def name_problem(self, host: str) -> str | None:
        """Return the problem of a host's name; None if it is valid."""
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

    def probe_address(self, host: str) -> tuple[str, int] | None:  # noqa: ARG002
        """See `Backend.probe_address`."""
        return None

    def unreachable(self, exit_code: int, said: str) -> bool:  # noqa: ARG002
        """Return whether the program failed because it could not reach the host."""
        return False

    def may_pass_soon(self, problem: str) -> bool:  # noqa: ARG002
        """Return whether a host that could not be reached may let us in after a moment."""
        return False

    def refused(self, exit_code: int, said: str, login: Login) -> bool:
        """Return whether it would fail in the same way again until somebody mends the host."""
        if exit_code < 0:  # the program was killed here
            return False
        missing = exit_code in (NO_PYTHON, NO_STDOUT) or "No module named" in said
        return missing or not login.reached or login.closed

    def ending(self, host: str, exit_code: int, said: str) -> str | None:  # noqa: ARG002
        """Return why an agent that was up has ended; None if only the connection has ended.

        `exit_code` is the program's (0 or more), `said` what it wrote to stderr itself.
        """
        # A shell says 128+N for a signal, subprocess says -N.
        return describe_end(host, 128 - exit_code if exit_code > 128 else exit_code)

    def reason(self, host: str, exit_code: int, said: str, login: Login) -> str:
        """Return `explain`'s line as the kind of reason that it is, for `Backend.start`."""
        line = self.explain(host, exit_code, said, login)
        if self.unreachable(exit_code, said):
            return UnreachableReason(line)
        return RefusedReason(line) if self.refused(exit_code, said, login) else line

    def explain(self, host: str, exit_code: int, said: str, login: Login) -> str:
        """Return one line on why a command on a host failed before the agent was up.

        The program's own words come first, then what we make of them. `exit_code` is as subprocess
        gives it, `said` what came on stderr, `login` what login files have done.
        """
        if exit_code == NO_STDOUT or not login.reached or login.closed:
            return describe_login(host, exit_code, said, login)
        if exit_code == NO_PYTHON and "elasticrun: no Python at" in said:
            missing = f"there is no Python at {self.python}"
            return f"{host}: {missing}; install the same environment there"
        if "No module named 'encodings'" in said:
            hint = "is PYTHONHOME set in its login files (or by a module that they load)?"
        elif "No module named" in said:
            hint = "is elastic-driver installed there?"
        else:
            hint = ""
        ended = f"{self.python} ended with exit status {exit_code}{quoted(said)}"
        return f"{host}: {ended}{f'; {hint}' if hint else ''}"


def script(python: str, home: Path, *words: str) -> str:
    """Return `python -m launcher.agent.remote WORDS…` as a script for /bin/sh.

    It first says that the login files are over. It runs in `home`, the folder our packages are in
    here, if the host has it (a shared disk), and in / otherwise: Python looks there first, and a
    user's home folder may hold a `launcher.py`.
    """
    say = f"echo {shlex.quote(f'elasticrun: no Python at {python}')} >&2"
    return (
        f"{SAY_REACHED}; cd {shlex.quote(str(home))} 2>/dev/null || cd /; "
        f"test -x {shlex.quote(python)} || {{ {say}; exit {NO_PYTHON}; }}; "
        f"exec {shlex.join((python, '-m', 'launcher.agent.remote', *words))}"
    )


def explain_by(host: str, said: str, meanings: Sequence[tuple[str, str]]) -> str | None:
    """Return what was said, with the meaning of the first of these marks that is in it."""
    for mark, meaning in meanings:
        if mark in said:
            return f"{host}: {in_its_words(said, mark)}; {meaning}"
    return None


def run_briefly(
    argv: Sequence[str], timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end without stdin; return its output. Raises as `subprocess.run` does.

    It has a session of its own: Ctrl-C in our terminal reaches us alone.
    """
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        errors="replace",
        timeout=timeout,
        check=False,
        env=env,
        start_new_session=True,
    )


# ---- the check before the start ----------------------------------------------------------


class Found(msgspec.Struct, frozen=True):
    """A host's answer (`launcher.agent.remote.look`)."""

    version: str
    python: str
    folder: bool  # the job's working directory is there
    temporary: bool  # its folder for temporary files can be written
    empty: int = 0  # so many of the empty lines that login files are sent were left to read


def precheck(hosts: Sequence[str], shell: RemoteShell, cwd: str) -> dict[str, str]:
    """Return host → problem for the hosts where no agent can run, in the order given.

    `AT_ONCE` hosts are asked at a time, with a deadline. A host that refuses or breaks off the
    connection is asked again after a moment: a gateway lets in few at a time. Nothing is left on
    the hosts.
    """
    return asyncio.run(_look_at_all(hosts, shell, cwd)) if hosts else {}


async def _look_at_all(hosts: Sequence[str], shell: RemoteShell, cwd: str) -> dict[str, str]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def look(host: str) -> str | None:
        problem = None
        for pause in (0.0, *LOOK_AGAIN_S):
            await asyncio.sleep(pause)
            async with slots:
                problem = await _look(host, shell, cwd)
            if not (isinstance(problem, UnreachableReason) and shell.may_pass_soon(problem)):
                break
        return problem

    problems = await asyncio.gather(*map(look, hosts))
    return {host: problem for host, problem in zip(hosts, problems, strict=True) if problem}


def judge(host: str, found: Found, cwd: str, ours: str) -> str | None:
    """Return the problem of a host that has answered; None if it has none."""
    if found.version != ours:
        return f"{host}: elastic-driver {found.version} is installed there, and {ours} here"
    if not found.folder:
        return f"{host}: the folder {cwd} does not exist there; start the job from one that does"
    if not found.temporary:
        return f"{host}: its folder for temporary files cannot be written; is the disk full?"
    return None


async def _look(host: str, shell: RemoteShell, cwd: str) -> str | None:
    patience = shell.connect_timeout + LOOK_S
    answers, said = list[bytes](), b""

    def heard(stream: int, lines: list[bytes]) -> None:
        nonlocal said
        if stream == 2:
            said = (said + b"\n".join(lines) + b"\n")[-_MAX_SAID:]
            return
        mark = f"{LOOKED} ".encode()
        answers.extend(line.partition(mark)[2] for line in lines if mark in line)

    try:
        argv = shell.argv(host, "look", cwd)
        client = await Client.start(
            argv, heard, shell.environ(), name="look", given=b"", end_stdin=END_STDIN_S
        )
    except ClusterError as error:
        return str(error)
    except OSError as error:
        return f"{host}: cannot run {shell.program}: {error.strerror}"
    try:
        code = await asyncio.wait_for(client.ended(), patience)
    except asyncio.TimeoutError:
        words = quoted(said.decode(errors="replace"))
        if client.login.reached:
            hint = "is it overloaded, or its disk gone?"
            return f"{host}: its Python has not answered within {patience:.0f} s{words}; {hint}"
        hint = f"is it overloaded, or do {FILES} wait for something?"
        return f"{host}: its login was not over within {patience:.0f} s{words}; {hint}"
    if not answers:
        return shell.reason(host, code, said.decode(errors="replace"), client.login)
    try:
        found = msgspec.json.decode(answers[-1], type=Found)
    except UNREADABLE as error:
        return f"{host}: its answer makes no sense ({error}); is elastic-driver the same there?"
    if client.login.closed and client.login.empty > found.empty:
        return RefusedReason(describe_login(host, code, "", client.login))
    problem = judge(host, found, cwd, version())
    return None if problem is None else RefusedReason(problem)
