"""Warm workers: forks of a process that has imported the heavy modules already.

`WarmStarter` is the agent's end of the conversation; the other end (`launcher.agent.warm_parent`)
is the job's own command, held just before its first line. A worker it gives is a child of the
agent like any other. Whatever cannot be had from a warm parent (another command, an unsafe fork,
a parent that has died) is started by the fallback, with the reason said once.

One warm parent for each agent, and `spares` processes forked from it in advance. All waiting here
has a deadline; times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from launcher.agent.descendants import children, die_with_parent, reap
from launcher.agent.leaving import spare_workers
from launcher.agent.starter import FreshStarter, ProcessSpec, Starter
from launcher.agent.warm_command import NotWarmable
from launcher.agent.warm_plan import WarmPlan

WARM_UP_S = 60.0  # longer than importing takes even from a slow network file system
START_S = 5.0  # for a spare to answer; two forks on a busy machine take a tenth of a second
END_S = 2.0  # for the kernel to end what was killed
MOST_LAUNCHES = 4  # warm parents in an agent's life: one that keeps dying is no help
_PAD = "x" * 8192  # room in /proc/<pid>/environ for the variables that siblings do not share
_HOOK = str(Path(__file__).parent / "warm_parent")
_EXIT_ORPHANED = 70
_LOOK_AGAIN_S = 0.001


class WarmStarter:
    """A `Starter` that forks where it can, and leaves the rest to `fallback`.

    Until `launch` is called it is the fallback and nothing more. The agent must be a child
    subreaper by then: workers become its children because their first parent has ended.
    """

    def __init__(self, say: Callable[[str], None], fallback: Starter | None = None) -> None:
        self._say = say
        self._fallback: Starter = fallback or FreshStarter()
        self._plan: WarmPlan | None = None
        self._parent: _WarmParent | None = None
        self._launches = 0
        self._said: set[str] = set()
        self._waiting = asyncio.Lock()

    def launch(self, plan: WarmPlan) -> None:
        """Start the warm parent of this plan; it imports while the agent goes on.

        It takes the place of the former one, if there was one.
        """
        if self._parent is not None:
            self._parent.close()
        self._plan = plan
        self._launch()

    @property
    def warm(self) -> bool:
        """Whether the next `start` will be a fork, as far as is known without asking."""
        return self._listen() is not None

    async def ready(self) -> None:
        """Wait until the warm parent is warm, or given up; never longer than `WARM_UP_S`.

        Waiting is the quicker way: the imports have begun already, and workers that import for
        themselves would only compete with them for the cores.
        """
        deadline = time.monotonic() + WARM_UP_S
        async with self._waiting:  # one at a time may wait for a socket
            while (parent := self._parent) is not None and parent.warming:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._lose(f"it was not warm after {WARM_UP_S:.0f} s")
                    return
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(parent.changed(), left)
                self._listen()

    def start(self, spec: ProcessSpec) -> int:
        """See `Starter.start`. Forks only if the warm parent is warm by now."""
        parent = self._listen()
        if parent is not None and self._plan is not None:
            try:
                self._plan.check(spec, parent.threads)
                return parent.fork(spec)
            except NotWarmable as reason:
                self._tell(f"{reason}; it is started afresh")
            except (OSError, EOFError, ValueError) as error:
                self._lose(f"it does not answer: {error}{parent.last_words()}")
        return self._fallback.start(spec)

    def own_pids(self) -> frozenset[int]:
        """See `Starter.own_pids`: the warm parent, and its spares."""
        own = frozenset() if self._parent is None else self._parent.own_pids()
        return own | self._fallback.own_pids()

    def close(self) -> None:
        """See `Starter.close`."""
        if self._parent is not None:
            self._parent.close()
            self._parent = None
        self._fallback.close()

    # ---- the warm parent's news ----------------------------------------------------------

    def _launch(self) -> None:
        assert self._plan is not None  # noqa: S101 - both callers have it
        self._launches += 1
        try:
            self._parent = _WarmParent(self._plan)
        except OSError as error:
            self._parent = None
            self._tell(f"no warm workers: cannot start the warm parent ({error})")

    def _listen(self) -> _WarmParent | None:
        """Take in what the warm parent has said; returns it if it can fork."""
        parent = self._parent
        if parent is None:
            return None
        for message in parent.news():
            if "refused" in message:
                self._tell(f"no warm workers: {message['refused']}")
                self._parent = None
                parent.close()
                return None
            parent.threads = int(message["threads"])
            for line in message["missing"]:
                self._tell(f"cannot preload {line}; the rest is warm")
        if parent.ended:
            self._lose(f"it ended{parent.last_words()}")
            return None
        return None if parent.warming else parent

    def _lose(self, why: str) -> None:
        """Give this warm parent up, and start the next if there were not too many."""
        if self._parent is not None:
            self._parent.close()
            self._parent = None
        if self._launches < MOST_LAUNCHES:
            self._tell(f"the warm parent is lost: {why}; starting another")
            self._launch()
        else:
            self._tell(f"no warm workers from now on: {why}, {self._launches} times now")

    def _tell(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)


class _WarmParent:
    """The running warm parent, and the two sockets shared with it."""

    def __init__(self, plan: WarmPlan) -> None:
        self.warming = True
        self.ended = False
        self.threads = 0  # of torch's pool; 0: torch is not among the modules
        self._heard = bytearray()
        with contextlib.ExitStack() as on_error:
            self._queue, their_queue = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            on_error.callback(self._queue.close)
            self._status, their_status = socket.socketpair()
            on_error.callback(self._status.close)
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
            on_error.callback(self._log.close)
            with their_queue, their_status:
                fds = (their_queue.fileno(), their_status.fileno())
                self._process = _execute(plan, fds, self._log)
            on_error.pop_all()
        self._queue.settimeout(START_S)
        self._status.setblocking(True)
        self._status.settimeout(START_S)
        with contextlib.suppress(OSError):  # it has died already: `news` will say so
            self._status.sendall(_line(plan.birth(os.getpid())))
        self._status.setblocking(False)

    @property
    def pid(self) -> int:
        """The warm parent's process, which leads the session of all its spares."""
        return self._process.pid

    async def changed(self) -> None:
        """Wait until it says something, or ends."""
        loop = asyncio.get_running_loop()
        try:
            piece = await loop.sock_recv(self._status, 65536)
        except ConnectionError:
            piece = b""
        self._heard += piece
        self.ended |= not piece

    def news(self) -> list[dict[str, Any]]:
        """Messages that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            while not self.ended:
                try:
                    piece = self._status.recv(65536)
                except ConnectionError:
                    piece = b""
                self._heard += piece
                self.ended = not piece
        *lines, rest = self._heard.split(b"\n")
        self._heard = bytearray(rest)
        messages = [json.loads(line) for line in lines]
        self.warming &= not messages
        return messages

    def fork(self, spec: ProcessSpec) -> int:
        """Let a spare become the process; its pid. OSError or EOFError where none answers."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                fds = [spec.stdout_fd, spec.stderr_fd, theirs.fileno()]
                socket.send_fds(self._queue, [b"start"], fds)
            ours.settimeout(START_S)
            ours.sendall(_line({"env": spec.env}))
            answer = bytearray()
            while not answer.endswith(b"\n"):
                piece = ours.recv(4096)
                if not piece:
                    raise EOFError("a spare ended while it was asked")
                answer += piece
            pid = int(json.loads(answer)["pid"])
            try:
                ours.sendall(b"go")
            except OSError:
                _end(pid)
                raise
        return pid

    def own_pids(self) -> frozenset[int]:
        """The warm parent and those of our children in its session: spares do not leave it."""
        own = {self.pid}
        for pid in children():
            with contextlib.suppress(OSError):
                if os.getsid(pid) == self.pid:
                    own.add(pid)
        return frozenset(own)

    def last_words(self) -> str:
        """The last line it wrote, in brackets; empty where it wrote none."""
        with contextlib.suppress(OSError, ValueError):
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4096))
            lines = self._log.read().decode("utf-8", "replace").split("\n")
            spoken = [line.strip() for line in lines if line.strip()]
            return f" ({spoken[-1]})" if spoken else ""
        return ""

    def close(self) -> None:
        """End it with its spares, and free everything."""
        self._queue.close()
        self._status.close()
        self._log.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)  # once it is gone, all that it was forking has come to us
        deadline = time.monotonic() + END_S
        while (spares := self.own_pids() - {self.pid}) and time.monotonic() < deadline:
            for pid in spares:
                _end(pid)
            time.sleep(_LOOK_AGAIN_S)


def _execute(plan: WarmPlan, fds: tuple[int, int], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the command with our `sitecustomize` in front of its own.

    The order of the variables matters: `/proc/<pid>/environ` keeps it, and what a worker does not
    share with its siblings is written over everything from ELASTIC_WARM_FDS on.
    """
    path = plan.env.get("PYTHONPATH")
    env = {name: value for name, value in plan.env.items() if name != "PYTHONPATH"}
    env["ELASTIC_WARM_FDS"] = f"{fds[0]},{fds[1]}"
    env["PYTHONPATH"] = os.pathsep.join([_HOOK, path] if path else [_HOOK])
    env["ELASTIC_WARM_PAD"] = _PAD
    agent = os.getpid()

    def before_exec() -> None:
        die_with_parent()
        spare_workers()
        if os.getppid() != agent:  # the agent died in between
            os._exit(_EXIT_ORPHANED)

    return subprocess.Popen(
        plan.argv,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=plan.cwd,
        env=env,
        pass_fds=fds,
        start_new_session=True,
        preexec_fn=before_exec,  # noqa: PLW1509 - a system call, as in `launcher.agent.starter`
    )


def _line(message: dict[str, object]) -> bytes:
    return json.dumps(message).encode("ascii") + b"\n"


def _end(pid: int) -> None:
    """Kill a child of ours that nobody else knows of, and reap it if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    reap(pid)
