"""The stack of a worker, as its agent sees it from outside.

It serves processes that cannot report their stack themselves: a plain script, a stopped process, a
process that holds the interpreter lock. With py-spy on the path (or beside our Python) it returns
the stack of the main thread, without stopping the process. Otherwise it returns the state that the
kernel reports for the process. Times are seconds.
"""

import asyncio
import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from elastic_driver.words.wire_events import SEEN_ELSEWHERE, SEEN_WAITING, shorten, waits_for_peers
from rendezvous.wire import UNREADABLE

LOOK_S = 5.0  # for py-spy; a big process takes about one


class Seen(Struct, frozen=True):
    """A worker's place in a few words, and its stack, innermost frame last (empty: unknown)."""

    where: str
    stack: str = ""


class _Frame(Struct, frozen=True):
    name: str
    filename: str
    line: int


class _ThreadStack(Struct, frozen=True):
    frames: tuple[_Frame, ...]  # innermost first
    thread_name: str | None = None
    os_thread_id: int | None = None


async def look(pid: int) -> Seen:
    """Look at a process of ours."""
    program = find_py_spy()
    if program is not None and state_of(pid) not in ("stopped", "gone"):
        argv = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            # The agent may reap py-spy first; its output is complete anyway.
            done = await asyncio.to_thread(
                subprocess.run, argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=LOOK_S
            )
            if (seen := seen_in(done.stdout, pid)) is not None:
                return seen
    return Seen(f"no answer; its process is {state_of(pid)}")


def find_py_spy() -> str | None:
    """Return the program's path, if it is installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def state_of(pid: int) -> str:
    """Return the kernel's state of a process: running, sleeping, stopped, disk-sleep … or gone."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def seen_in(output: bytes, pid: int) -> Seen | None:
    """Read the main thread's stack out of py-spy's JSON; None if it has none."""
    try:
        threads = msgspec.json.decode(output, type=tuple[_ThreadStack, ...])
    except UNREADABLE:
        return None
    main = [t for t in threads if t.os_thread_id == pid or t.thread_name == "MainThread"]
    frames = main[0].frames if main else ()
    if not frames:
        return None
    lines = (f'  File "{f.filename}", line {f.line}, in {f.name}\n' for f in reversed(frames))
    waits = waits_for_peers(frames[0].filename)
    return Seen(SEEN_WAITING if waits else SEEN_ELSEWHERE, shorten("".join(lines)))
