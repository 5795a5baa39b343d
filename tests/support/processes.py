"""Processes of this machine, each of which may end while a test looks at it.

One that has ended has no words, no children and no name; a zombie has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")
ENDED = (psutil.Error, OSError)  # what a look at a process raises that has ended, or ends now


def is_running(pid: int) -> bool:
    """Whether a process lives (a zombie does not)."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def read_words(pid: int, name: str) -> list[str]:
    """The words of `environ` or `cmdline` of a process; none if it has ended, or is not ours."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").split("\0")
    except OSError:
        return []


def read_each(
    processes: Iterable[psutil.Process], read: Callable[[psutil.Process], T]
) -> list[tuple[psutil.Process, T]]:
    """Each process with what `read` says of it, but for those that have ended by then."""
    found = []
    for process in processes:
        with contextlib.suppress(*ENDED):
            found.append((process, read(process)))
    return found


def select(
    processes: Iterable[psutil.Process], is_wanted: Callable[[psutil.Process], object]
) -> list[psutil.Process]:
    """The processes of which `is_wanted` is true, but for those that have ended by then."""
    return [process for process, wanted in read_each(processes, is_wanted) if wanted]


def session_of(pid: int) -> int:
    """The session of a process; 0 once it has been reaped."""
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return 0


def descendants(pid: int) -> list[psutil.Process]:
    """The processes that a process has started, and that they have; [] once it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def processes_with(*variables: str) -> list[psutil.Process]:
    """Every process on this machine that has one of these variables, written `NAME=VALUE`."""
    marks = set(variables)
    found = []
    for pid in psutil.pids():
        if marks & set(read_words(pid, "environ")) and is_running(pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
    return found


def signal_each(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each process that has not ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def kill_all(find: Callable[[], list[psutil.Process]]) -> None:
    """Kill the processes that `find` returns, until there are none or 10 s are over."""
    deadline = time.monotonic() + 10
    while (left := find()) and time.monotonic() < deadline:
        signal_each(left, signal.SIGKILL)
        time.sleep(0.02)
