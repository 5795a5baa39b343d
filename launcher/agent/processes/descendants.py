"""Processes that are ours to end: children, their children, and those they left behind.

The agent and the local backend are *child subreapers*: a process whose parent has died
becomes their child in place of init's, so that nothing a worker leaves behind escapes. The
functions here look at children of the calling process only, and never at the rest of the
machine: a process with our variables that is not our descendant belongs to somebody else.

Linux only; `prctl` is called through ctypes, whose library is loaded at import so that the
call is safe between fork and exec.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

import psutil

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
