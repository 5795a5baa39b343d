"""Starts the same command fresh and warm, as the agent would, and shows both outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.agent.processes import ProcessSpec, become_subreaper, start_fresh
from launcher.agent.warm.starter import WorkerStarter
from launcher.agent.warm.warm_plan import WarmPlan, make_warm_plan

DEADLINE_S = 60.0
_alive: list[Agent] = []


@dataclass(frozen=True)
class Outcome:
    stdout: str
    stderr: str
    code: int


class Agent:
    """The part of an agent that a starter sees: a subreaper that waits for its children."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.said: list[str] = []
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(cwd),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LC_ALL": "C.UTF-8",
        }
        self.starter = WorkerStarter(self.said.append)

    def plan(self, *arguments: str, preload: Sequence[str] = (), warm: int | None = 1) -> WarmPlan:
        argv = (sys.executable, *arguments)
        return make_warm_plan(argv, self.env, str(self.cwd), warm=warm, preload=preload)

    def launch(self, *arguments: str, preload: Sequence[str] = ()) -> None:
        """Keep `python ARGUMENTS` warm, and wait until it is (or never will be)."""
        self.starter.launch(self.plan(*arguments, preload=preload))
        asyncio.run(self.starter.ready())

    @property
    def warm(self) -> bool:
        """Whether the next start will be a fork, as far as is known without asking."""
        return self.starter._warm_parent() is not None

    def spec(self, *arguments: str, out: int, err: int, **variables: str) -> ProcessSpec:
        argv = (sys.executable, *arguments)
        return ProcessSpec(argv, {**self.env, **variables}, str(self.cwd), out, err)

    def run(
        self,
        *arguments: str,
        start: Callable[[ProcessSpec], int] | None = None,
        then: Callable[[int], None] | None = None,
        reads: bytes | None = None,
        **variables: str,
    ) -> Outcome:
        """Start it (warm, unless told otherwise), do `then(pid)`, and wait for its end.

        `reads`: its stdin, a pipe; None: nothing.
        """
        with pipes() as ((out, out_end), (err, err_end)), pipes() as ((stdin, words), _):
            spec = self.spec(*arguments, out=out_end, err=err_end, **variables)
            if reads is not None:
                spec = replace(spec, stdin_fd=stdin)
                os.write(words, reads)
            pid = (start or self.starter.start)(spec)
            os.close(words)
            os.close(out_end)
            os.close(err_end)
            if then is not None:
                then(pid)
            texts = read_all(out, err)
            return Outcome(*texts, wait_for(pid))

    def run_fresh(self, *arguments: str, reads: bytes | None = None, **variables: str) -> Outcome:
        return self.run(*arguments, start=start_fresh, reads=reads, **variables)


@contextlib.contextmanager
def agent(cwd: Path) -> Iterator[Agent]:
    become_subreaper()
    fake = Agent(cwd)
    _alive.append(fake)
    try:
        yield fake
    finally:
        fake.starter.close()
        _alive.remove(fake)
        become_subreaper(bool(_alive))


@contextlib.contextmanager
def pipes() -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Two pipes; whatever is still open at the end is closed."""
    out, err = os.pipe(), os.pipe()
    try:
        yield out, err
    finally:
        for end in (*out, *err):
            with contextlib.suppress(OSError):
                os.close(end)


def read_all(*descriptors: int) -> list[str]:
    """Everything that comes out of these pipes until all are closed."""
    texts = {fd: bytearray() for fd in descriptors}
    deadline = time.monotonic() + DEADLINE_S
    with selectors.DefaultSelector() as selector:
        for fd in descriptors:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(deadline - time.monotonic())
            assert ready, f"no end of output; so far {texts}"
            for key, _ in ready:
                piece = os.read(key.fd, 65536)
                texts[key.fd] += piece
                if not piece:
                    selector.unregister(key.fd)
    return [texts[fd].decode() for fd in descriptors]


def wait_for(pid: int) -> int:
    """The exit code of a child; kills it after the deadline."""
    handle = os.pidfd_open(pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(handle, selectors.EVENT_READ)
            if not selector.select(DEADLINE_S):
                os.kill(pid, signal.SIGKILL)
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def eventually(condition: Callable[[], bool], within: float = 10.0) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
