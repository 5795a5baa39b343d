"""Starts, watches and ends processes of this host, with their descendants.

The agent, the local backend and a node that joins are *child subreapers*: a process whose parent
has died becomes their child in place of init's, so that nothing a worker leaves behind escapes. The
functions look only at descendants of the calling process: another process is not ours, even if it
has our variables.

A worker leads a session and process group of its own. When it has ended, the agent first kills the
processes it left behind, and then reports the end: the rest of the group, and descendants that left
the group, whose parent is now the agent.

The workers on the machine of `elasticrun` read its stdin, as torchrun's do. The agent's own stdin
is a pipe to its parent, so it inherits the workers' stdin as another descriptor, whose number is in
a variable (`STDIN_VARIABLE`). A terminal does not control the workers, as they lead sessions of
their own, and no read of it stops them. Agents on other machines get none, and their workers read
nothing.

`stack_of` returns the stack of a worker that cannot report it itself: a plain script, a stopped
process, a process that holds the interpreter lock. With py-spy on the path (or beside our Python)
it is that of the main thread, and the process is not stopped; otherwise it is the state that the
kernel reports for the process.

Linux only. `prctl` is called through ctypes, whose library is loaded at import so that the call is
safe between fork and exec. Times are seconds.
"""

import asyncio
import contextlib
import ctypes
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from elastic_driver import contract
from elastic_driver.words.wire_events import SEEN_ELSEWHERE, SEEN_WAITING, shorten, waits_for_peers
from rendezvous.wire import UNREADABLE

EXIT_NOT_EXECUTABLE = 126  # as the shells say it
EXIT_NOT_FOUND = 127
LEFTOVERS_S = 2.0  # for the kernel to end killed processes
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # Slurm sends them before it takes a machine away
_LOOK_AGAIN_S = 0.005
_STOP_MARK = signal.Signals[contract.STOP_MARK]
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_core_limit: tuple[int, int] | None = None
_prctl = ctypes.CDLL(None, use_errno=True).prctl


# ---- core dumps --------------------------------------------------------------------------


def forbid_core_dumps() -> None:
    """Forbid core dumps of this process, which knows a token; see `allow_core_dumps`."""
    global _core_limit  # noqa: PLW0603 - of the process
    _core_limit = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, _core_limit[1]))


def allow_core_dumps() -> None:
    """Undo `forbid_core_dumps` in a child that becomes a worker."""
    if _core_limit is not None:
        resource.setrlimit(resource.RLIMIT_CORE, _core_limit)


# ---- our descendants ---------------------------------------------------------------------


def become_subreaper(wanted: bool = True) -> None:
    """Adopt (or no longer adopt) descendants whose parent dies; raises OSError if refused."""
    if _prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot become a child subreaper: {os.strerror(number)}")


def children() -> list[int]:
    """Return the pids of the calling process's children at this moment, zombies included."""
    found: list[int] = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except OSError:  # a thread ended meanwhile, or a kernel without these lists: the slow way
        return [child.pid for child in psutil.Process().children()]
    return found


def stems_from(pid: int, session: int, marks: dict[str, str]) -> bool:
    """Return whether a process is in this session, or was started with all these variables.

    The session of an ended process is known until it is reaped; its variables are not.
    """
    with contextlib.suppress(OSError, psutil.Error):
        if os.getsid(pid) == session:
            return True
        return marks.items() <= psutil.Process(pid).environ().items()
    return False


def kill_trees(roots: Iterable[int]) -> None:
    """Kill these children of ours and all their descendants.

    Descendants are listed while their parents still live, children before grandchildren, so that a
    process forked meanwhile is adopted by us and found by the next call.
    """
    for root in roots:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(root)
            for victim in [process, *process.children(recursive=True)]:
                send_signal(victim, signal.SIGKILL)


def send_signal(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to this process, and to no later one that has got its number."""
    with contextlib.suppress(OSError, psutil.Error):
        pidfd = os.pidfd_open(process.pid)
        try:
            if process.is_running():  # the same start: then the descriptor means it, too
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def kill_child(pid: int) -> None:
    """Kill a child of ours; do nothing if it is no child of ours (any more)."""
    with contextlib.suppress(psutil.Error):
        child = psutil.Process(pid)
        if child.ppid() == os.getpid():
            send_signal(child, signal.SIGKILL)


def reap(pid: int) -> int | None:
    """Collect an ended child's status (as subprocess gives it); None while it lives.

    A child whose status was collected elsewhere counts as ended with 0.
    """
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return None if found == 0 else os.waitstatus_to_exitcode(status)


def reap_strangers() -> None:
    """Reap the children that have ended and that this process has not started.

    They came to it when their parent died. A child of its own is in its session, or leads one.
    """
    ours = os.getsid(0)
    for pid in children():
        with contextlib.suppress(OSError):
            if os.getsid(pid) not in (ours, pid):
                reap(pid)


async def end_all(look: Callable[[], Iterable[int]], patience: float = LEFTOVERS_S) -> None:
    """Kill and reap the children that `look()` returns, and all their descendants.

    It looks again until none is left, or for `patience` seconds: a process that hangs in the
    kernel cannot be killed.
    """
    deadline = time.monotonic() + patience
    while left := [pid for pid in look() if reap(pid) is None]:
        kill_trees(left)
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(_LOOK_AGAIN_S)


async def readable(fd: int, timeout: float | None = None) -> bool:
    """Wait until `fd` can be read or has ended; return False after `timeout` seconds."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await asyncio.wait_for(ready.wait(), timeout)
    except asyncio.TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True


async def wait_for_end(pid: int) -> None:
    """Wait until a child has ended; it is not reaped."""
    pidfd = os.pidfd_open(pid)
    try:
        await readable(pidfd)
    finally:
        os.close(pidfd)


# ---- starting ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start.

    `argv[0]` is looked up in the PATH of `env`, which is the whole environment of the process.
    The caller owns the descriptors, and closes its copies once the process was started.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    stdout_fd: int
    stderr_fd: int
    # An agent's own stdin: a pipe that shows it our end. None for a worker, which is killed by the
    # kernel when we die.
    lifeline: int | None = None
    # What the worker reads, or the workers of the agent; None: nothing (/dev/null).
    stdin_fd: int | None = None
    cpus: frozenset[int] = frozenset()  # the only processors that it may use; empty: ours


class StartError(Exception):
    """The process could not be started; `exit_code` is the exit status of a shell (126, 127)."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def start_fresh(spec: ProcessSpec) -> int:
    """Execute a command in a new process; return the pid. Raises `StartError`.

    The child leads a session and process group of its own (its pid names both). The caller reaps
    it.
    """
    _check_folder(spec.cwd)
    parent = os.getpid()
    worker = spec.lifeline is None
    env = spec.env
    own = spec.stdin_fd if worker else spec.lifeline
    if not worker and spec.stdin_fd is not None:
        env = {**env, STDIN_VARIABLE: str(spec.stdin_fd)}

    def bind_to_parent() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        ignore_notices()
        allow_core_dumps()
        if os.getppid() != parent:  # it died in between, and would never stop us
            os._exit(EXIT_NOT_EXECUTABLE)

    own_cpus = os.sched_getaffinity(0)
    try:
        if spec.cpus:  # the child inherits those of this thread
            os.sched_setaffinity(0, spec.cpus)
        process = subprocess.Popen(
            spec.argv,
            stdin=subprocess.DEVNULL if own is None else own,
            stdout=spec.stdout_fd,
            stderr=spec.stderr_fd,
            cwd=spec.cwd,
            env=env,
            pass_fds=() if worker or spec.stdin_fd is None else (spec.stdin_fd,),
            start_new_session=True,
            preexec_fn=bind_to_parent if worker else None,  # noqa: PLW1509 - system calls only
        )
    except FileNotFoundError as error:
        raise StartError(_not_found(spec), EXIT_NOT_FOUND) from error
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, PermissionError):
            reason = "permission denied; is it a directory, or does it lack `chmod +x`?"
        sentence = f"cannot execute {spec.argv[0]!r}: {reason}"
        raise StartError(sentence, EXIT_NOT_EXECUTABLE) from error
    finally:
        if spec.cpus:
            os.sched_setaffinity(0, own_cpus)
    process.returncode = 0  # so that Popen does not reap it; the caller does
    return process.pid


def ignore_notices() -> None:
    """Make this process, which becomes a worker, ignore the signals that are for the agent.

    Slurm sends a step's signals to all its processes, and by default a worker would die of them.
    A script that handles these signals itself still does so.
    """
    if "SLURM_STEP_ID" in os.environ:
        for number in NOTICES:
            signal.signal(number, signal.SIG_IGN)


def _check_folder(cwd: str) -> None:
    if not os.path.isdir(cwd):
        problem = "does not exist on this host; create it, or use a folder of a shared disk"
    elif not os.access(cwd, os.X_OK):
        problem = "may not be entered on this host; check its permissions"
    else:
        return
    raise StartError(f"the working directory {cwd!r} {problem}", EXIT_NOT_EXECUTABLE)


def _not_found(spec: ProcessSpec) -> str:
    command = spec.argv[0]
    if os.path.exists(os.path.join(spec.cwd, command)) and os.sep in command:
        return f"cannot execute {command!r}: the interpreter its first line names does not exist"
    where = f"in {spec.cwd!r}" if os.sep in command else "in PATH"
    return f"command not found: {command!r} {where}; check the spelling and the host's software"


# ---- a worker's process ------------------------------------------------------------------


class WorkerProcess:
    """A started worker.

    Args:
        pid: a child of ours that leads its own session.
        strays: returns our living children that lost their parent and came to us.
        marks: variables it was started with that no other worker has; they name its strays.
    """

    def __init__(self, pid: int, strays: Callable[[], list[int]], marks: dict[str, str]) -> None:
        self.pid = pid
        self._strays, self._marks = strays, marks
        self.peak: int | None = None  # bytes of memory at most, known at its end
        self._ended = False
        self._end_at: asyncio.TimerHandle | None = None
        self._kill_at: asyncio.TimerHandle | None = None

    def stop(self, grace: float, *, interrupt: bool = False) -> None:
        """Send SIGTERM to the group, and SIGKILL after `grace` seconds (0: at once).

        It may be called again: the earliest SIGKILL counts. `interrupt`: SIGINT now, which Python
        raises as KeyboardInterrupt, and SIGTERM after half of the time.
        """
        if self._ended:
            return
        if grace <= 0:
            self._signal(signal.SIGKILL)
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + grace
        if self._kill_at is None:
            # The mark tells the worker that SIGTERM is no notice, on which it would train on.
            self._signal(_STOP_MARK)
            if interrupt:
                self._signal(signal.SIGINT)
                self._end_at = loop.call_later(grace / 2, self._signal, signal.SIGTERM)
            else:
                self._signal(signal.SIGTERM)
        elif when >= self._kill_at.when():
            return
        else:
            self._kill_at.cancel()
        self._kill_at = loop.call_at(when, self._signal, signal.SIGKILL)

    def give_notice(self) -> None:
        """Announce the end to the worker itself; it may go on until it has left."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGTERM)

    async def ended(self) -> int:
        """Wait for the end of the worker and its leftovers; return its code as subprocess does."""
        await wait_for_end(self.pid)
        self._ended = True
        for timer in (self._end_at, self._kill_at):
            if timer is not None:
                timer.cancel()
        # The worker is still a zombie, so no other process can have its number.
        self._signal(signal.SIGKILL)
        await end_all(lambda: [p for p in self._strays() if stems_from(p, self.pid, self._marks)])
        with contextlib.suppress(ChildProcessError):  # collected elsewhere: it counts as 0
            _, status, used = os.wait4(self.pid, 0)
            self.peak = used.ru_maxrss * 1024
            return os.waitstatus_to_exitcode(status)
        return 0

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def is_of_this_user(process: psutil.Process) -> bool:
    """Return whether a process is of the user of this one; raises psutil.Error if it has ended."""
    return bool(process.uids().real == os.getuid())


# ---- the stdin of workers -----------------------------------------------------------------


STDIN_VARIABLE = "ELASTIC_WORKER_STDIN"  # of an agent: the number of the descriptor
_READ = {"x86_64": "0", "ppc64le": "3", "s390x": "3"}  # numbers of system calls; elsewhere 63


@contextlib.contextmanager
def stdin_for_workers() -> Iterator[int | None]:
    """Lend a copy of our stdin, for an agent; None if its workers are to read nothing.

    So it is where a shell has started us in the background (`&`): it reads the terminal itself, and
    workers would take its lines.
    """
    copy = None
    with contextlib.suppress(OSError):
        if not (os.isatty(0) and _in_background()):
            copy = os.dup(0)
    try:
        yield copy
    finally:
        if copy is not None:
            os.close(copy)


def _in_background() -> bool:
    with contextlib.suppress(OSError):  # this terminal does not control us
        return os.tcgetpgrp(0) != os.getpgrp()
    return False


def inherit_stdin(environ: MutableMapping[str, str]) -> int | None:
    """Return the descriptor that this agent has for its workers; None: they read nothing."""
    number = environ.pop(STDIN_VARIABLE, None)
    if number is None:
        return None
    os.set_inheritable(int(number), False)
    return int(number)


def is_terminal(fd: int | None) -> bool:
    """Return whether a person may answer there; False for None."""
    return fd is not None and os.isatty(fd)


def waits_for_line(pid: int) -> bool:
    """Return whether the main thread of a process waits for its stdin; True if nobody can tell."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            call = file.read().split()
        return call[:2] == [_READ.get(platform.machine(), "63"), "0x0"]
    return True


# ---- the stack of a worker ----------------------------------------------------------------


PY_SPY_S = 5.0  # for py-spy; a big process takes about one


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


async def stack_of(pid: int) -> Seen:
    """Look at a process of ours."""
    program = find_py_spy()
    if program is not None and state_of(pid) not in ("stopped", "gone"):
        argv = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            # The agent may reap py-spy first; its output is complete anyway.
            done = await asyncio.to_thread(
                subprocess.run,
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PY_SPY_S,
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
