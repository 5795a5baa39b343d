"""A program that runs our commands on other hosts: ssh, srun, mpirun.

A `RemoteShell` says which command line to run and what its failures mean. The backend in
`launcher.backends.remote_agents` runs it to start and end agents. `precheck` runs it before the
job, to find hosts where no agent can run: a host needs our Python, our package in the same version,
and the job's folder.

A `Client` is the running program: it gets its input once, its output arrives as whole lines. A
login shell on the host runs the user's login files first, with the same streams. So nothing is
given before our command runs there, and what was printed before is kept apart (`Login`). A login
file that reads stdin gets an empty line after some seconds, and the end of stdin after more of
them. Our command says when it is done: a process that a login file has left may hold the
connection open.

A failure is told in one line: the program's and the login's own words, and what we make of them.
Times are seconds.
"""

import asyncio
import contextlib
import shlex
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.runtime.backend import RefusedReason, UnreachableReason
from elastic_driver.runtime.discovery import check_host
from launcher import version
from launcher.agent.output import LineSplitter
from launcher.agent.processes import kill_child
from launcher.agent.remote import LOOKED, NO_STDOUT, SAY_REACHED, after_login, done_in
from launcher.backends.base import PACKAGE_ROOT, describe_end
from rendezvous.wire import UNREADABLE

# Called with the stream (1 stdout, 2 stderr) and lines without their newline.
OnLines = Callable[[int, list[bytes]], None]


# ---- a running program --------------------------------------------------------------------


DRAIN_S = 1.0  # for output to end after the program: a helper of its own may hold the pipe
EMPTY_AFTER_S = 3.0  # without our command, until an empty line is sent; then one each second
EMPTY_LINES = 5
END_STDIN_S = 10.0  # until stdin ends, where our command needs nothing from it
LINGER_S = 2.0  # for the program to end after our command on the host
_MAX_LOGIN = 4096


@dataclass
class Login:
    """What the login files on the host did with the streams.

    Attributes:
        reached: our command runs, or has run.
        said: the last of what was on stdout before that.
        empty: so many empty lines were sent before that.
        closed: stdin was ended before that.
    """

    reached: bool = False
    said: bytes = b""
    empty: int = 0
    closed: bool = False


class Client(asyncio.SubprocessProtocol):
    """A program that `start` has started; `ended` waits for its end."""

    _transport: asyncio.SubprocessTransport

    def __init__(self, on_lines: OnLines, name: str, given: bytes | None) -> None:
        self.login = Login()
        self._on_lines = on_lines
        self._name = name
        self._given = given
        self._splitters = {1: LineSplitter(), 2: LineSplitter()}
        self._exited = asyncio.Event()
        self._drained = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._status: int | None = None  # of our command on the host, as it has said

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        on_lines: OnLines,
        environ: Mapping[str, str] | None,
        *,
        name: str,
        given: bytes | None = None,
        end_stdin: float | None = None,
    ) -> "Client":
        """Start a program that runs our command `name` on a host; raises OSError.

        `given` is written to its stdin once our command runs there. With None, stdin stays open
        until this process ends: so it sees our end. `end_stdin`: seconds after which stdin ends
        without that; None: never. `environ` is its environment; None: ours.
        """
        loop = asyncio.get_running_loop()
        # In a session of its own: Ctrl-C in our terminal is for us alone.
        _, client = await loop.subprocess_exec(
            lambda: cls(on_lines, name, given), *argv, env=environ, start_new_session=True
        )
        until = None if end_stdin is None else loop.time() + end_stdin
        client._timer = loop.call_later(EMPTY_AFTER_S, client._answer, until)
        return client

    def _answer(self, until: float | None) -> None:
        """Answer a login file that may read stdin: an empty line, or the end at `until`."""
        loop = asyncio.get_running_loop()
        stdin = self._pipe(0)
        if self.login.reached or self._exited.is_set() or stdin is None or stdin.is_closing():
            return
        if until is not None and loop.time() >= until:
            self.login.closed = True
            stdin.close()
            return
        if self.login.empty < EMPTY_LINES:
            stdin.write(b"\n")
            self.login.empty += 1
        self._timer = loop.call_later(1.0, self._answer, until)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport; output may come before `start` has returned."""
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Pass the lines on that `data` completes."""
        if fd == 1 and not self.login.reached:
            data = self._without_login(data)
        if fd in self._splitters and (lines := self._splitters[fd].feed(data)):
            self._hear(fd, lines)

    def _without_login(self, data: bytes) -> bytes:
        """Return what our command has printed; give it its input when it begins."""
        found = after_login(self.login.said + data)
        if found is None:
            self.login.said = (self.login.said + data)[-_MAX_LOGIN:]
            return b""
        self.login.said, data = found[0], found[1]
        self.login.reached = True
        if self._given is not None and not self.login.closed:
            stdin = self._pipe(0)
            stdin.write(self._given)
            stdin.close()
        return data

    def _hear(self, fd: int, lines: list[bytes]) -> None:
        """Pass lines on, but not the mark of our command's end."""
        if fd == 1 and self._status is None:
            for number, line in enumerate(lines):
                if (done := done_in(line, self._name)) is not None:
                    before, self._status = done
                    lines[number : number + 1] = [before] if before else []
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(LINGER_S, self.kill)
                    break
        if lines:
            self._on_lines(fd, lines)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        """Pass on the last line of a stream, which may lack its newline."""
        splitter = self._splitters.pop(fd, None)
        if splitter is not None and (lines := splitter.finish()):
            self._hear(fd, lines)

    def process_exited(self) -> None:
        """Note the end of the program; its output may go on."""
        self._exited.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Note the end of the program and of its output."""
        self._drained.set()

    def flow(self, going: bool) -> None:
        """Pause reading (False), which slows the host down in turn, or resume it (True)."""
        for fd in self._splitters:
            pipe = self._pipe(fd)
            pipe.resume_reading() if going else pipe.pause_reading()

    def kill(self) -> None:
        """Kill the program; what runs on the host goes on."""
        if self._transport.get_returncode() is None:
            kill_child(self._transport.get_pid())  # asyncio may have reaped it just now

    async def ended(self) -> int:
        """Wait for its end and its last lines; return the exit status as subprocess does.

        If our command on the host has said its own, it is that.
        """
        try:
            await self._exited.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self.kill()  # does something only if the caller was cancelled
            self._pipe(0).close()
            self.flow(True)
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._drained.wait(), DRAIN_S)
            finally:  # also when the caller is cancelled once more
                for fd in tuple(self._splitters):
                    self.pipe_connection_lost(fd, None)
                self._transport.close()
        return self._transport.get_returncode() or 0 if self._status is None else self._status

    def _pipe(self, fd: int) -> Any:
        return self._transport.get_pipe_transport(fd)


_MAX_LINES, _MAX_CHARS = 3, 300


# ---- failures in words --------------------------------------------------------------------


_FRAME = " @*=-#"  # lines of nothing else frame a message
# What ssh says beside the point, and what a login file says when it takes us for a terminal.
_ASIDE = (
    *("Warning: Permanently added", "Pseudo-terminal will not be allocated", "stdin: is not a tty"),
    *("mesg: ", "stty: ", "tput: ", "elasticrun: "),
)
FILES = "its login files (such as ~/.bashrc)"
ONLY_INTERACTIVE = "let only interactive shells do that ([[ $- == *i* ]]; see docs/hosts.md)"


def in_its_words(said: str, mark: str = "") -> str:
    """Return the last lines of what a program wrote as one, without frames; empty: it said nothing.

    Lines beside the point are left out if there are others. If the line with the `mark` is not one
    of the last, it is that line.
    """
    lines = [line.strip().strip("@").strip() for line in said.splitlines() if line.strip(_FRAME)]
    shown = [line for line in lines if not line.startswith(_ASIDE)] or lines
    last = shown[-_MAX_LINES:]
    marked = [line for line in shown if mark and mark in line]
    if marked and not any(mark in line for line in last):
        last = marked[:1]
    return " / ".join(dict.fromkeys(last))[:_MAX_CHARS]


def quoted(said: str) -> str:
    """Return ` and said "…"`; empty if nothing was said."""
    words = in_its_words(said)
    return f' and said "{words}"' if words else ""


def describe_login(host: str, exit_code: int, said: str, login: Login) -> str:
    """Return one line on a login in which our command did not run, or did not get its input.

    `exit_code` is the login's, `said` what came on stderr.
    """
    if exit_code == NO_STDOUT:
        return f"{host}: {FILES} send stdout elsewhere (exec >…); {ONLY_INTERACTIVE}"
    if login.reached:
        return f"{host}: {FILES} read stdin to its end; {ONLY_INTERACTIVE}"
    words = quoted(f"{login.said.decode(errors='replace')}\n{said}")
    ended = f"ended with exit status {exit_code} before our command{words}"
    if login.closed:
        hint = f"if {FILES} exec another shell or program, {ONLY_INTERACTIVE}"
        replaced = "was replaced by a program that read stdin"
        return f"{host}: its login shell {replaced}, and {ended}; {hint}"
    hint = f"if {FILES} call exit or exec, {ONLY_INTERACTIVE}"
    if "account is currently not available" in words:
        hint = "this account has no login shell there (nologin)"
    return f"{host}: its login shell {ended}; {hint}"


# ---- the program --------------------------------------------------------------------------


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
    answers = list[bytes]()
    said = b""

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
