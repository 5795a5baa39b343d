"""Processes that are ours to end: children, their children, and those they left behind.

The agent and the local backend are *child subreapers*: a process whose parent has died
becomes their child in place of init's, so that nothing a worker leaves behind escapes. The
functions here look at children of the calling process only, and never at the rest of the
machine: a process with our variables that is not our descendant belongs to somebody else.

Linux only; `prctl` is called through ctypes, whose library is loaded at import so that the
call is safe between fork and exec.

How a worker's process comes to life: what is to run, and who can start it.

The agent builds a `ProcessSpec` and hands it to a `Starter`. `FreshStarter` executes the
command anew; a warm starter forks a process that has imported the heavy modules already.
Either way the result is a *child of the agent*, so that the agent alone waits for it, signals
it and learns its exit status. A starter never reaps or signals what it has started.

One worker's process: watched through a pidfd, stopped with a grace period, ended whole.

A worker leads a session and process group of its own. When the leader has ended, whatever it
left behind is killed before its end is reported: the rest of its group, and the descendants that
made themselves independent, which the kernel gives to the agent as their new parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import psutil

from elastic_driver import contract
from launcher.agent.preemption import spare_workers

_LOOK_AGAIN_S = 0.01
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel for this signal when the thread that is our parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def become_subreaper(wanted: bool = True) -> None:
    """Adopt (or no longer adopt) descendants whose parent dies; OSError where refused."""
    if _prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot become a child subreaper: {os.strerror(number)}")


def children() -> list[int]:
    """Pids of the calling process's children at this moment, zombies included."""
    found: list[int] = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except OSError:  # a thread ended meanwhile, or a kernel without these lists: the long way
        return [child.pid for child in psutil.Process().children()]
    return found


def variables(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty where it is gone or not ours to read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            items = file.read().split(b"\0")
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in items if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def carries(pid: int, wanted: dict[str, str]) -> bool:
    """Whether a process was born with all these variables."""
    born_with = variables(pid)
    return bool(born_with) and all(born_with.get(k) == v for k, v in wanted.items())


def activity(pid: int) -> tuple[str, float] | None:
    """A process's state letter (proc(5): R runs or wants to) and its CPU seconds so far."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    ticks = int(fields[11]) + int(fields[12])
    return fields[0].decode(), ticks / os.sysconf("SC_CLK_TCK")


def kill_trees(roots: Iterable[int]) -> list[int]:
    """SIGKILL these children of ours and all their descendants; returns the pids hit.

    Descendants are listed while their parents still live, children before grandchildren, so
    that a process forked meanwhile is adopted by us and found by the next call.
    """
    hit: list[int] = []
    for root in roots:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(root)
            for victim in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    victim.kill()
                    hit.append(victim.pid)
    return hit


def reap(pid: int) -> int | None:
    """Collect an ended child's status (as subprocess gives it); None while it lives.

    A child that somebody else has collected counts as ended with 0.
    """
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return None if found == 0 else os.waitstatus_to_exitcode(status)


def end_children(patience: float) -> None:
    """Kill and reap every child of the calling process; gives up after `patience` seconds."""
    deadline = time.monotonic() + patience
    while left := children():
        kill_trees(left)
        for pid in left:
            reap(pid)
        if time.monotonic() > deadline:
            return
        time.sleep(_LOOK_AGAIN_S)


EXIT_NOT_EXECUTABLE = 126  # as the shells say it
EXIT_NOT_FOUND = 127


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start.

    `argv[0]` is looked up in the PATH of `env`, which is the whole environment of the process.
    The caller owns both descriptors, and closes its copies once `Starter.start` has returned.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    stdout_fd: int
    stderr_fd: int


class StartError(Exception):
    """The process could not be started; `exit_code` is what a shell would answer (126, 127)."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Starter(Protocol):
    """Starts processes for the agent."""

    async def ready(self) -> None:
        """Wait while waiting makes `start` quicker (a fork server warms up); has a deadline."""
        ...

    def start(self, spec: ProcessSpec) -> int:
        """Start `spec`; return the pid of a child of this process.

        The child leads a session and process group of its own (its pid names both), reads
        /dev/null, and is killed by the kernel when the agent dies (a process that is reparented
        on its way must ask for that after its parent has become the agent). Takes
        milliseconds; raises `StartError` where nothing was started.
        """
        ...

    def own_pids(self) -> frozenset[int]:
        """Children of the agent that belong to the starter itself (a fork server).

        The agent neither kills nor reaps them.
        """
        ...

    def close(self) -> None:
        """Free what the starter holds, its own processes included; started workers stay."""
        ...


class FreshStarter:
    """Executes the command in a new process."""

    async def ready(self) -> None:
        """See `Starter.ready`: it always is."""

    def start(self, spec: ProcessSpec) -> int:
        """See `Starter.start`."""
        _check_directory(spec.cwd)
        try:
            process = subprocess.Popen(
                spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=spec.stdout_fd,
                stderr=spec.stderr_fd,
                cwd=spec.cwd,
                env=spec.env,
                start_new_session=True,
                preexec_fn=_before_exec(os.getpid()),  # noqa: PLW1509 - one system call, see there
            )
        except FileNotFoundError as error:
            raise StartError(_not_found(spec), EXIT_NOT_FOUND) from error
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise StartError(
                f"cannot execute {spec.argv[0]!r}: {_reason(error)}", EXIT_NOT_EXECUTABLE
            ) from error
        pid = process.pid
        # The agent reaps its children; a Popen that believes to be done leaves them alone.
        process.returncode = 0
        return pid

    def own_pids(self) -> frozenset[int]:
        """See `Starter.own_pids`: it has none."""
        return frozenset()

    def close(self) -> None:
        """See `Starter.close`: it holds nothing."""


def _before_exec(agent: int) -> Callable[[], None]:
    """What the child does between fork and exec: bind its life to the agent's."""

    def bind() -> None:
        die_with_parent()
        spare_workers()
        if os.getppid() != agent:  # the agent died in between: nobody would ever stop us
            os._exit(EXIT_NOT_EXECUTABLE)

    return bind


def _check_directory(cwd: str) -> None:
    if not os.path.isdir(cwd):
        raise StartError(
            f"the working directory {cwd!r} does not exist on this host; "
            "create it, or start the job from a shared file system",
            EXIT_NOT_EXECUTABLE,
        )
    if not os.access(cwd, os.X_OK):
        raise StartError(
            f"the working directory {cwd!r} may not be entered on this host; check its permissions",
            EXIT_NOT_EXECUTABLE,
        )


def _not_found(spec: ProcessSpec) -> str:
    command = spec.argv[0]
    if os.path.exists(os.path.join(spec.cwd, command)) and os.sep in command:
        return f"cannot execute {command!r}: the interpreter its first line names does not exist"
    where = f"in {spec.cwd!r}" if os.sep in command else "in PATH"
    return f"command not found: {command!r} {where}; check the spelling and the host's software"


def _reason(error: Exception) -> str:
    if isinstance(error, PermissionError):
        return "permission denied; is it a directory, or does it lack `chmod +x`?"
    return getattr(error, "strerror", None) or str(error)


LEFTOVERS_S = 2.0  # for the kernel to end what was killed
_LOOK_AGAIN_S = 0.005
_STOP_MARK = signal.Signals[contract.STOP_MARK]


class Family:
    """The agent's children: leaders of workers, helpers of a starter, and strays.

    A stray is a process that lost its parent and came to us. All of them descend from workers,
    because nothing else below the agent starts processes.
    """

    def __init__(self, helpers: Callable[[], frozenset[int]]) -> None:
        self.leaders: set[int] = set()
        self.onlookers: set[int] = set()  # programs that look at workers (`looking`)
        self._helpers = helpers

    def strays(self) -> list[int]:
        """Pids of the strays that live; those that have ended are reaped on the way."""
        known = self.leaders | self.onlookers | self._helpers()
        return [pid for pid in children() if pid not in known and reap(pid) is None]

    async def end_strays(self, wanted: Callable[[int], bool], within: float = LEFTOVERS_S) -> None:
        """Kill the strays for which `wanted(pid)` holds, and all their descendants.

        Returns when none is left, or after `within` seconds (a process that hangs in the
        kernel cannot be killed).
        """
        deadline = asyncio.get_running_loop().time() + within
        while found := [pid for pid in self.strays() if wanted(pid)]:
            kill_trees(found)
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(_LOOK_AGAIN_S)


class WorkerProcess:
    """A started worker.

    Args:
        pid: a child of ours that leads its own session.
        marks: variables it was born with that no other worker has; they name its strays.
    """

    def __init__(self, pid: int, family: Family, marks: dict[str, str]) -> None:
        self.pid = pid
        self._loop = asyncio.get_running_loop()
        self._family, self._marks = family, marks
        self._leader_ended = asyncio.Event()
        self._kill_at: asyncio.TimerHandle | None = None
        family.leaders.add(pid)
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._on_ended)

    def stop(self, grace: float) -> None:
        """SIGTERM to the group, SIGKILL after `grace` seconds (0: at once); may be repeated.

        Of several calls the one that ends soonest counts.
        """
        if self._leader_ended.is_set():
            return
        if grace <= 0:
            self._signal(signal.SIGKILL)
            return
        when = self._loop.time() + grace
        if self._kill_at is None:
            self._signal(_STOP_MARK)  # so that nobody takes it for a notice and trains on
            self._signal(signal.SIGTERM)
        elif when >= self._kill_at.when():
            return
        else:
            self._kill_at.cancel()
        self._kill_at = self._loop.call_at(when, self._signal, signal.SIGKILL)

    async def ended(self) -> int:
        """Wait for the end of the leader and of all it left; its code as subprocess gives it."""
        await self._leader_ended.wait()
        # The leader is still a zombie, so its number cannot have become somebody else's.
        self._signal(signal.SIGKILL)
        await self._family.end_strays(self._is_left_over)
        code = reap(self.pid)
        self._family.leaders.discard(self.pid)
        return 0 if code is None else code

    def _is_left_over(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            if os.getsid(pid) == self.pid:
                return True
        return carries(pid, self._marks)

    def _on_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._kill_at is not None:
            self._kill_at.cancel()
        self._leader_ended.set()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
