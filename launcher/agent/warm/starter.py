"""Starts processes as forks of a warm parent, which has imported the heavy modules already.

A warm parent (the folder `parent`) is the job's own command, held just before its first line. Its
owner talks to it through a `WorkerStarter`. An agent owns a warm parent and forks its workers from
it. If several agents share this machine, the local backend owns one too and forks the agents from
it; each agent gets a warm parent of its own, which is a fork of the backend's.

A process that cannot be forked (another command, an unsafe fork, a warm parent that has died) is
executed as a new process, and the starter shows the reason once. In both cases the process is a
child of the owner. Each wait here has a deadline; times are seconds.
"""

import asyncio
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from launcher.agent.environment import apply
from launcher.agent.processes import (
    ProcessSpec,
    allow_core_dumps,
    children,
    kill_child,
    readable,
    reap,
    start_fresh,
)
from launcher.agent.warm.parent._elastic_warm_worker import BORN_WARM, receive_line, send_line
from launcher.agent.warm.warm_plan import NotWarmable, WarmPlan

WARM_UP_S = 60.0  # for the imports; more than they take from a slow network file system
MOST_LAUNCHES = 4  # warm parents that one owner starts in all, if they keep dying
START_S = 5.0  # for a spare to answer; two forks on a busy machine take a tenth of a second
END_S = 2.0  # for the kernel to end killed processes
_PAD = "x" * 8192  # room in /proc/<pid>/environ for the variables that differ between workers
_HOOK = str(Path(__file__).parent / "parent")
_LOOK_AGAIN_S = 0.001


@dataclass(eq=False)
class WarmParent:
    """A warm parent's process, a child of ours, and our ends of the conversation."""

    pid: int
    session: int  # of the warm parent and its spares; a worker or agent has its own
    queue: socket.socket  # for requests, which the spares take
    status: socket.socket  # for its messages; it ends when we close our end
    log: IO[bytes]  # the output of its imports
    digest: str  # of its plan
    ended: bool = False
    _received: bytes = b""

    def own_pids(self) -> set[int]:
        """Return its pid, and those of our children that are in its session."""
        own = {self.pid}
        for pid in children():
            with suppress(OSError):
                if os.getsid(pid) == self.session:
                    own.add(pid)
        return own

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; set `ended` when it has ended."""
        self.status.setblocking(False)
        with suppress(BlockingIOError):
            while not self.ended:
                piece = b""
                with suppress(ConnectionError):
                    piece = self.status.recv(65536)
                self._received += piece
                self.ended = not piece
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines]

    def fork(self, spec: ProcessSpec) -> int:
        """Let a spare become the process; return its pid. Raises OSError, EOFError, ValueError."""
        request: dict[str, Any] = {"env": spec.env}
        stdio = [spec.stderr_fd, spec.stdout_fd]
        if spec.lifeline is not None:
            request.update(argv=spec.argv, cwd=spec.cwd)
            stdio.append(spec.lifeline)
        if spec.stdin_fd is not None:
            stdio.append(spec.stdin_fd)
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self.queue.settimeout(START_S)
                socket.send_fds(self.queue, [b"start"], [*stdio, theirs.fileno()])
            ours.settimeout(START_S)
            send_line(ours, request)
            pid = int(receive_line(ours)["pid"])
            try:
                if spec.cpus:
                    apply(pid, spec.cpus)
                ours.sendall(b"go")
            except OSError:
                _end_child(pid)
                raise
        return pid

    def last_words(self) -> str:
        """Return the last line that it wrote, in parentheses; empty if it wrote none."""
        with suppress(OSError, ValueError):
            self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 4096))
            if words := self.log.read().decode("utf-8", "replace").strip():
                return f" ({words.splitlines()[-1].strip()})"
        return ""

    def end(self) -> None:
        """Kill and reap it and its spares, and free everything."""
        for ours in (self.queue, self.status, self.log):
            ours.close()
        deadline = time.monotonic() + END_S
        _end_child(self.pid)
        # After its end, processes that it was forking are our children.
        while reap(self.pid) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
        while (left := self.own_pids() - {self.pid}) and time.monotonic() < deadline:
            for pid in left:
                _end_child(pid)
            time.sleep(_LOOK_AGAIN_S)


def execute(plan: WarmPlan, marks: Mapping[str, str]) -> WarmParent:
    """Start the plan's command with our `sitecustomize` in front of its own; may raise OSError.

    The order of the variables matters: in `/proc/<pid>/environ`, the variables of a worker replace
    everything from ELASTIC_WARM_FDS on.
    """
    env = dict(plan.env)
    path = env.pop("PYTHONPATH", None)
    with ExitStack() as on_error:
        queue, their_queue = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        status, their_status = socket.socketpair()
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `WarmParent.end`
        for ours in (queue, status, log):
            on_error.callback(ours.close)
        with their_queue, their_status:
            fds = (their_queue.fileno(), their_status.fileno())
            env["ELASTIC_WARM_FDS"] = f"{fds[0]},{fds[1]}"
            env["PYTHONPATH"] = os.pathsep.join([_HOOK, path] if path else [_HOOK])
            process = subprocess.Popen(
                plan.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=plan.cwd,
                env={**env, **marks, "ELASTIC_WARM_PAD": _PAD},
                pass_fds=fds,
                start_new_session=True,
                preexec_fn=allow_core_dumps,  # noqa: PLW1509 - a system call only
            )
        on_error.pop_all()
    process.returncode = 0  # we reap it ourselves
    digest = plan.digest()
    status.settimeout(START_S)
    with suppress(OSError):  # if it has died already, `receive` will see its end
        send_line(status, {**asdict(plan), "parent": os.getpid(), "digest": digest})
    return WarmParent(process.pid, process.pid, queue, status, log, digest)


def inherit(environ: MutableMapping[str, str]) -> WarmParent | None:
    """Return the warm parent that this process was forked with; None: it was executed.

    The variable of an agent that is a fork (`parent._elastic_warm_worker`) describes it.
    """
    words = environ.pop(BORN_WARM, None)
    if words is None:
        return None
    pid, queue, status, log, digest = words.split(",")
    for number in (queue, status, log):
        os.set_inheritable(int(number), False)
    ends = socket.socket(fileno=int(queue)), socket.socket(fileno=int(status))
    return WarmParent(int(pid), os.getsid(0), *ends, open(int(log), "w+b"), digest)


def _end_child(pid: int) -> None:
    """Kill a child of ours, and reap it if it has ended."""
    kill_child(pid)
    reap(pid)


class WorkerStarter:
    """Forks processes from a warm parent, and executes those that cannot be forked.

    The owner must be a child subreaper: forks become its children when their first parent ends.
    Until `launch` is called, every process is executed. A starter belongs to one thread, but for
    `abort`.

    Args:
        say: shows a sentence to the user.
        marks: variables by which the owner knows the processes of the warm parent.
        inherited: a warm parent that the agent was forked with; it is used if its plan is equal.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        marks: Mapping[str, str] | None = None,
        inherited: WarmParent | None = None,
    ) -> None:
        self._say, self._marks = say, marks or {}
        self._plan: WarmPlan | None = None
        self._parent = inherited
        self._threads: int | None = None  # of torch's pool in the warm parent; None: not warm yet
        self._launches = 0
        self._said: set[str] = set()
        self._waiting = asyncio.Lock()
        self._aborted = False

    def launch(self, plan: WarmPlan) -> None:
        """Start the warm parent of this plan, unless an equal one was inherited."""
        self._plan = plan
        if self._parent is None or self._parent.digest != plan.digest():
            self._launch(plan)

    async def ready(self, *, for_next: bool = True) -> None:
        """Wait until the warm parent can fork, `WARM_UP_S` seconds at most.

        If the warm parent is lost meanwhile, wait for the next one only with `for_next`.

        Waiting is quicker: the imports have begun already, and workers with imports of their own
        would compete with them for the cores.
        """
        deadline = time.monotonic() + WARM_UP_S
        first = self._parent
        async with self._waiting:  # one at a time may wait for a socket
            while (parent := self._parent) is not None and self._threads is None:
                if parent is not first and not for_next:
                    return
                if await readable(parent.status.fileno(), deadline - time.monotonic()):
                    self._warm_parent()
                    continue
                if parent is first:  # the next one has not had its time yet
                    self._lose(f"it was not warm after {WARM_UP_S:.0f} s")
                return

    def start(self, spec: ProcessSpec) -> int:
        """Start a process, as a fork if the warm parent can fork; return the pid of our child.

        The child is as `start_fresh` describes it. Takes milliseconds; raises `StartError` if no
        process was started.
        """
        parent = self._warm_parent()
        if parent is not None and self._plan is not None:
            try:
                if spec.lifeline is None:
                    self._plan.check(spec, self._threads or 0)
                return parent.fork(spec)
            except NotWarmable as reason:
                self._say_once(f"{reason}; it is started afresh")
            except (OSError, EOFError, ValueError) as error:
                self._lose(f"it does not answer: {error}{parent.last_words()}")
        return start_fresh(spec)

    def own_pids(self) -> set[int]:
        """Return the pids of the warm parent and its spares."""
        return set() if self._parent is None else self._parent.own_pids()

    def abort(self) -> None:
        """Kill the warm parent, so that a fork that waits for it ends now. Any thread may call it.

        The owner is about to close the starter: no other warm parent follows.
        """
        self._aborted = True
        for pid in self.own_pids() & set(children()):
            kill_child(pid)

    def close(self) -> None:
        """End the warm parent and its spares; started processes stay."""
        parent = self._parent
        self._parent = None
        self._threads = None
        if parent is not None:
            parent.end()

    # ---- the warm parent -----------------------------------------------------------------

    def _launch(self, plan: WarmPlan) -> None:
        self.close()
        self._launches += 1
        try:
            self._parent = execute(plan, self._marks)
        except OSError as error:
            self._say_once(f"no warm workers: cannot start the warm parent ({error})")

    def _warm_parent(self) -> WarmParent | None:
        """Read the warm parent's messages; return the warm parent if it can fork."""
        parent = self._parent
        if parent is None:
            return None
        for message in parent.receive():
            if "refused" in message:
                self._say_once(f"no warm workers: {message['refused']}")
                self.close()
                return None
            self._threads = int(message["threads"])
            for line in message["missing"]:
                self._say_once(f"cannot preload {line}; the rest is warm")
        if parent.ended:
            self._lose(f"it ended{parent.last_words()}")
            return None
        return None if self._threads is None else parent

    def _lose(self, why: str) -> None:
        """End this warm parent, and start the next one unless `MOST_LAUNCHES` were started."""
        self.close()
        if self._aborted:
            return
        if self._plan is not None and self._launches < MOST_LAUNCHES:
            self._say_once(f"the warm parent is lost: {why}; starting another")
            self._launch(self._plan)
        else:
            lost = f"{self._launches} warm parents were lost"
            self._say_once(f"no warm workers from now on: {why}; {lost}")

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)
