"""A running warm parent, and the two ways to one: starting it, or being born with it.

An agent starts its own with `execute`. One that was forked from the machine's shared parent
(`launcher.backends.shared_parent`) has one from birth: a child that it finds, with the ends of the
conversation, in one variable of its environment.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from elastic_driver import contract
from launcher.agent.processes import children, reap
from launcher.agent.warm.plan import WarmPlan

MOST_LAUNCHES = 4  # warm parents in the life of who starts them: one that keeps dying is no help
END_S = 2.0  # for the kernel to end what was killed
_PAD = "x" * 8192  # room in /proc/<pid>/environ for the variables that siblings do not share
_HOOK = str(Path(__file__).parent / "parent")
_LOOK_AGAIN_S = 0.001


@dataclass(frozen=True)
class Held:
    """A warm parent's process, a child of ours, and our ends of the conversation.

    It leads the session of all that it forks and that has not gone its own way yet.
    """

    pid: int
    queue: socket.socket  # requests; its spares take them
    status: socket.socket  # what it says; the end of ours is its own
    log: IO[bytes]  # what its imports have written

    def own_pids(self) -> frozenset[int]:
        """It, and those of our children that are in its session."""
        own = {self.pid}
        for pid in children():
            with suppress(OSError):
                if os.getsid(pid) == self.pid:
                    own.add(pid)
        return frozenset(own)

    def last_words(self) -> str:
        """The last line it wrote, in brackets; empty where it wrote none."""
        with suppress(OSError, ValueError):
            self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 4096))
            lines = self.log.read().decode("utf-8", "replace").split("\n")
            spoken = [line.strip() for line in lines if line.strip()]
            return f" ({spoken[-1]})" if spoken else ""
        return ""

    def end(self) -> None:
        """Kill and reap it with what it has forked, and free everything."""
        self.queue.close()
        self.status.close()
        self.log.close()
        deadline = time.monotonic() + END_S
        _kill(self.pid)
        # Once it is gone, all that it was forking has come to us.
        while reap(self.pid) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
        while (left := self.own_pids() - {self.pid}) and time.monotonic() < deadline:
            for pid in left:
                end_child(pid)
            time.sleep(_LOOK_AGAIN_S)


def execute(plan: WarmPlan, before_exec: Callable[[], None] | None = None) -> Held:
    """Start the command with our `sitecustomize` in front of its own; OSError where it cannot be.

    It waits until it is told `WarmPlan.birth` on the status line. `before_exec`: called in the
    child.
    """
    with ExitStack() as on_error:
        queue, their_queue = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        on_error.callback(queue.close)
        status, their_status = socket.socketpair()
        on_error.callback(status.close)
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `Held.end`
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
                preexec_fn=before_exec,  # noqa: PLW1509 - one system call, see `starter`
            )
        on_error.pop_all()
    process.returncode = 0  # we reap it ourselves
    return Held(process.pid, queue, status, log)


def _environment(plan: WarmPlan, fds: tuple[int, int]) -> dict[str, str]:
    """The order matters: `/proc/<pid>/environ` keeps it.

    What a worker does not share with its siblings is written over everything from
    ELASTIC_WARM_FDS on.
    """
    path = plan.env.get("PYTHONPATH")
    env = {name: value for name, value in plan.env.items() if name != "PYTHONPATH"}
    env["ELASTIC_WARM_FDS"] = f"{fds[0]},{fds[1]}"
    env["PYTHONPATH"] = os.pathsep.join([_HOOK, path] if path else [_HOOK])
    env["ELASTIC_WARM_PAD"] = _PAD
    return env


@dataclass(frozen=True)
class Inherited:
    """The warm parent that an agent was born with, and which plan it was made for."""

    held: Held
    digest: str  # `WarmPlan.digest`


def inherit(environ: MutableMapping[str, str]) -> Inherited | None:
    """Take what this process was born with out of its environment; None: it was not."""
    words = environ.pop(contract.BORN_WARM, None)
    if words is None:
        return None
    pid, queue, status, log, digest = words.split(",")
    for number in (queue, status, log):
        os.set_inheritable(int(number), False)
    held = Held(
        int(pid),
        socket.socket(fileno=int(queue)),
        socket.socket(fileno=int(status)),
        open(int(log), "w+b"),  # noqa: SIM115 - closed by `Held.end`
    )
    return Inherited(held, digest)


def end_child(pid: int) -> None:
    """Kill a child of ours that nobody else knows of, and reap it if it has ended."""
    _kill(pid)
    reap(pid)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
