"""How a worker's process comes to life: what is to run, and who can start it.

The agent builds a `ProcessSpec` and hands it to a `Starter`. `FreshStarter` executes the
command anew; a warm starter forks a process that has imported the heavy modules already.
Either way the result is a *child of the agent*, so that the agent alone waits for it, signals
it and learns its exit status. A starter never reaps or signals what it has started.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from launcher.agent.host.leaving import spare_workers
from launcher.agent.processes.descendants import die_with_parent

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
