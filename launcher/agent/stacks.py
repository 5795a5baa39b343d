"""The stack of a worker, as its agent sees it from outside.

For processes that cannot say it themselves: a plain script, one that is stopped, one that holds
the interpreter lock. With py-spy on the path (or beside our Python) it is the stack of the main
thread, taken without stopping the process; without it, or where it may not look, the state in which
the kernel has the process. Times are seconds.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from elastic_driver.core.stack_location import SEEN_ELSEWHERE, SEEN_WAITING, waits_for_peers
from launcher.agent.processes import wait_for_end

LOOK_S = 5.0  # for py-spy; a big process takes about one


class Seen(Struct, frozen=True):
    """`where` in some words; `stack` with the innermost frame last, empty where unknown."""

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


async def look(pid: int, helpers: set[int]) -> Seen:
    """Look at a process of ours. `helpers` holds the pid of py-spy while it runs."""
    program = find_py_spy()
    if program is not None and state_of(pid) not in ("stopped", "gone"):
        with contextlib.suppress(OSError):
            argv = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
            seen = seen_in(await _run(argv, helpers), pid)
            if seen is not None:
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
    except msgspec.DecodeError:
        return None
    main = [t for t in threads if t.os_thread_id == pid or t.thread_name == "MainThread"]
    frames = main[0].frames if main else ()
    if not frames:
        return None
    lines = (f'  File "{f.filename}", line {f.line}, in {f.name}\n' for f in reversed(frames))
    waits = waits_for_peers(frames[0].filename)
    return Seen(SEEN_WAITING if waits else SEEN_ELSEWHERE, "".join(lines))


async def _run(argv: list[str], helpers: set[int]) -> bytes:
    """Return what a program has printed when it ends or its time is over; raises OSError."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL
        )
        helpers.add(process.pid)
        try:
            await wait_for_end(process.pid, LOOK_S)
        finally:
            process.kill()  # nothing, where it has ended
            process.wait()
            helpers.discard(process.pid)
        output.seek(0)
        return output.read()
