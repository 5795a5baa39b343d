"""Processes of this machine that are not our children: agents that an earlier driver has started.

The kernel does not hand us what such an agent leaves behind, as it does for our own agents. So
these functions look at all processes of this user, and take one for the job's only if it was
started with the job's variables (`contract.JOB_MARK` is no other job's). Times are seconds. An
agent is this user's, though root can read all users' variables, and anybody may have these.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import psutil

from launcher.agent.processes import is_of_this_user, readable

_LOOK_AGAIN_S = 0.02
_LOOKS = 10  # at the parents of a process; more only where some are hidden from us


@dataclass(frozen=True)
class AdoptedProcess:
    """An agent's process, known by a descriptor that never names another process."""

    pid: int
    pidfd: int

    @classmethod
    def open(cls, pid: int, marks: Mapping[str, str]) -> "AdoptedProcess | None":
        """Return the live process with this pid; None if there is none with these variables."""
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError):
            return None
        # Looked at after it was opened: if it has these variables, the descriptor is the agent's.
        with contextlib.ExitStack() as unless_kept:
            unless_kept.callback(os.close, pidfd)
            with contextlib.suppress(psutil.Error):
                if _has(process := psutil.Process(pid), marks) and is_of_this_user(process):
                    unless_kept.pop_all()
                    return cls(pid, pidfd)
        return None

    async def ended(self) -> None:
        """Wait for its end."""
        await readable(self.pidfd)

    def kill(self) -> None:
        """Kill it, if it lives; not after `close`."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Free the descriptor."""
        os.close(self.pidfd)


def find_agent(host: str, incarnation: int, marks: Mapping[str, str]) -> int:
    """Return the pid of an agent of the job by its command line; 0 if there is none."""
    for process in marked(marks):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            given = dict(itertools.pairwise(words))
            named = (given.get("--host"), given.get("--incarnation")) == (host, str(incarnation))
            if named and is_of_this_user(process):
                return process.pid
    return 0


def marked(marks: Mapping[str, str]) -> Iterator[psutil.Process]:
    """Return the live processes of this machine that were started with all these variables."""
    return (process for process in psutil.process_iter() if _has(process, marks))


def _has(process: psutil.Process, marks: Mapping[str, str]) -> bool:
    with contextlib.suppress(psutil.Error, OSError):  # of another user, or it has just ended
        return marks.items() <= process.environ().items()
    return False


def _line_of(process: psutil.Process) -> set[int]:
    """Return the pids of a process and its ancestors, as far as we may see them.

    It looks again if one of them ends meanwhile: its children have other parents then.
    """
    line: list[int] = []
    for _ in range(_LOOKS):
        line = [process.pid]
        with contextlib.suppress(psutil.Error):
            while parent := psutil.Process(line[-1]).ppid():
                line.append(parent)
            break
    return set(line)


async def end_marked(
    marks: Mapping[str, str], of_others: Callable[[], set[int]], patience: float
) -> None:
    """Kill the processes with these variables, but for those below a pid that `of_others` returns.

    It looks again until none is left, or for `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while left := [p for p in marked(marks) if not of_others() & _line_of(p)]:
        for process in left:
            with contextlib.suppress(psutil.Error):  # psutil compares the time of its start
                process.kill()
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(_LOOK_AGAIN_S)
