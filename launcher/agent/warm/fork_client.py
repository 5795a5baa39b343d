"""A running warm parent, and the two ways to get one: start it, or inherit it.

An agent starts its own with `execute`. One that was forked from the machine's shared parent
(`launcher.backends.shared_parent`) inherits one: a child that it finds, with the ends of the
conversation, in one variable of its environment. Times are seconds.
"""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from elastic_driver import contract
from launcher.agent.processes import ProcessSpec, children, reap
from launcher.agent.warm.parent._elastic_warm_common import receive_line, send_line
from launcher.agent.warm.plan import WarmPlan

MOST_LAUNCHES = 4  # warm parents that one owner starts: one that keeps dying is no help
START_S = 5.0  # for a spare to answer; two forks on a busy machine take a tenth of a second
END_S = 2.0  # for the kernel to end what was killed
_PAD = "x" * 8192  # room in /proc/<pid>/environ for the variables that siblings do not share
_HOOK = str(Path(__file__).parent / "parent")
_LOOK_AGAIN_S = 0.001


@dataclass(eq=False)
class WarmParent:
    """A warm parent's process, a child of ours, and our ends of the conversation.

    It leads the session of all the processes that it forked and that did not become workers yet.
    """

    pid: int
    queue: socket.socket  # requests; its spares take them
    status: socket.socket  # its messages; the end of ours is its own
    log: IO[bytes]  # what its imports have written
    digest: str = ""  # of the plan that an inherited one was made for
    ended: bool = False
    _received: bytearray = field(default_factory=bytearray)

    def own_pids(self) -> frozenset[int]:
        """Return its pid, and those of our children that are in its session."""
        own = {self.pid}
        for pid in children():
            with suppress(OSError):
                if os.getsid(pid) == self.pid:
                    own.add(pid)
        return frozenset(own)

    def receive(self, piece: bytes | None = None) -> list[dict[str, Any]]:
        """Return the messages that have come, `piece` before others; notes its end in `ended`."""
        self.status.setblocking(False)
        with suppress(BlockingIOError):
            while not self.ended:
                if piece is None:
                    try:
                        piece = self.status.recv(65536)
                    except ConnectionError:
                        piece = b""
                self._received += piece
                self.ended, piece = not piece, None
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        return [json.loads(line) for line in lines]

    def fork(self, spec: ProcessSpec) -> int:
        """Let a spare become the process; return its pid. Raises OSError, EOFError, ValueError."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self.queue.settimeout(START_S)
                fds = [spec.stdout_fd, spec.stderr_fd, theirs.fileno()]
                socket.send_fds(self.queue, [b"start"], fds)
            ours.settimeout(START_S)
            send_line(ours, {"env": spec.env})
            pid = int(receive_line(ours)["pid"])
            try:
                ours.sendall(b"go")
            except OSError:
                end_child(pid)
                raise
        return pid

    def last_words(self) -> str:
        """Return the last line it wrote, in brackets; empty where it wrote none."""
        with suppress(OSError, ValueError):
            self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 4096))
            lines = self.log.read().decode("utf-8", "replace").split("\n")
            spoken = [line.strip() for line in lines if line.strip()]
            return f" ({spoken[-1]})" if spoken else ""
        return ""

    def end(self) -> None:
        """Kill and reap it with what it has forked, and free everything."""
        for ours in (self.queue, self.status, self.log):
            ours.close()
        deadline = time.monotonic() + END_S
        _kill(self.pid)
        # Once it is gone, all that it was forking has come to us.
        while reap(self.pid) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
        while (left := self.own_pids() - {self.pid}) and time.monotonic() < deadline:
            for pid in left:
                end_child(pid)
            time.sleep(_LOOK_AGAIN_S)


def execute(plan: WarmPlan, before_exec: Callable[[], None] | None = None) -> WarmParent:
    """Start the command with our `sitecustomize` in front of its own; OSError where it cannot be.

    It waits for `WarmPlan.first_message` on the status line. The child calls `before_exec`.
    """
    with ExitStack() as on_error:
        queue, their_queue = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        on_error.callback(queue.close)
        status, their_status = socket.socketpair()
        on_error.callback(status.close)
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `WarmParent.end`
        on_error.callback(log.close)
        with their_queue, their_status:
            fds = (their_queue.fileno(), their_status.fileno())
            process = subprocess.Popen(
                plan.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=plan.cwd,
                env=_environment(plan, fds),
                pass_fds=fds,
                start_new_session=True,
                preexec_fn=before_exec,  # noqa: PLW1509 - system calls only, see `bound_to`
            )
        on_error.pop_all()
    process.returncode = 0  # we reap it ourselves
    return WarmParent(process.pid, queue, status, log)


def _environment(plan: WarmPlan, fds: tuple[int, int]) -> dict[str, str]:
    """Return the variables of a warm parent, in an order that `/proc/<pid>/environ` keeps.

    A worker's own variables are written over everything from ELASTIC_WARM_FDS on.
    """
    path = plan.env.get("PYTHONPATH")
    env = {name: value for name, value in plan.env.items() if name != "PYTHONPATH"}
    env["ELASTIC_WARM_FDS"] = f"{fds[0]},{fds[1]}"
    env["PYTHONPATH"] = os.pathsep.join([_HOOK, path] if path else [_HOOK])
    env["ELASTIC_WARM_PAD"] = _PAD
    return env


def inherit(environ: MutableMapping[str, str]) -> WarmParent | None:
    """Take the warm parent that this process inherits out of its environment; None: there is none.

    Its `digest` says which plan it was made for.
    """
    words = environ.pop(contract.BORN_WARM, None)
    if words is None:
        return None
    pid, queue, status, log, digest = words.split(",")
    for number in (queue, status, log):
        os.set_inheritable(int(number), False)
    return WarmParent(
        int(pid),
        socket.socket(fileno=int(queue)),
        socket.socket(fileno=int(status)),
        open(int(log), "w+b"),
        digest,
    )


def end_child(pid: int) -> None:
    """Kill a child of ours that nobody else knows of, and reap it if it has ended."""
    _kill(pid)
    reap(pid)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
