"""Warm workers: forks of a process that has imported the heavy modules already.

`WarmStarter` is the agent's end of the conversation; the other end (the folder `parent`)
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
import socket
import time
from collections.abc import Callable
from typing import Any

from launcher.agent.preemption import spare_workers
from launcher.agent.processes import FreshStarter, ProcessSpec, Starter, die_with_parent
from launcher.agent.warm.command import NotWarmable
from launcher.agent.warm.fork_client import MOST_LAUNCHES, Held, Inherited, end_child, execute
from launcher.agent.warm.parent._elastic_warm_common import receive_line, send_line
from launcher.agent.warm.plan import WarmPlan

WARM_UP_S = 60.0  # longer than importing takes even from a slow network file system
START_S = 5.0  # for a spare to answer; two forks on a busy machine take a tenth of a second
_EXIT_ORPHANED = 70


class WarmStarter:
    """A `Starter` that forks where it can, and leaves the rest to `fallback`.

    Until `launch` is called it is the fallback and nothing more. The agent must be a child
    subreaper by then: workers become its children because their first parent has ended.

    Args:
        say: tells people a sentence.
        fallback: starts what cannot be forked.
        inherited: a warm parent that the agent was born with; it serves a plan that equals its own.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        fallback: Starter | None = None,
        inherited: Inherited | None = None,
    ) -> None:
        self._say = say
        self._inherited = inherited
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
            self._parent = None
        self._plan = plan
        inherited = self._inherited
        if inherited is not None and inherited.digest == plan.digest():
            self._inherited = None
            self._launches += 1
            self._parent = _WarmParent(inherited.held)
        else:
            self.disinherit()
            self._launch()

    def disinherit(self) -> None:
        """End the warm parent that the agent was born with, if it has not been of use."""
        if self._inherited is not None:
            self._inherited.held.end()
            self._inherited = None

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
        own = self._fallback.own_pids()
        if self._parent is not None:
            own |= self._parent.own_pids()
        if self._inherited is not None:
            own |= self._inherited.held.own_pids()
        return own

    def close(self) -> None:
        """See `Starter.close`."""
        self.disinherit()
        if self._parent is not None:
            self._parent.close()
            self._parent = None
        self._fallback.close()

    # ---- the warm parent's news ----------------------------------------------------------

    def _launch(self) -> None:
        assert self._plan is not None  # noqa: S101 - both callers have it
        self._launches += 1
        try:
            self._parent = _WarmParent.start(self._plan)
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
    """The running warm parent, and what it has said so far."""

    def __init__(self, held: Held) -> None:
        self.warming = True
        self.ended = False
        self.threads = 0  # of torch's pool; 0: torch is not among the modules
        self._held = held
        self._heard = bytearray()
        held.queue.settimeout(START_S)
        held.status.setblocking(False)

    @classmethod
    def start(cls, plan: WarmPlan) -> _WarmParent:
        """A new one; OSError where it cannot be started."""
        held = execute(plan, _bound_to(os.getpid()))
        held.status.settimeout(START_S)
        with contextlib.suppress(OSError):  # it has died already: `news` will say so
            send_line(held.status, plan.birth(os.getpid()))
        return cls(held)

    async def changed(self) -> None:
        """Wait until it says something, or ends."""
        loop = asyncio.get_running_loop()
        try:
            piece = await loop.sock_recv(self._held.status, 65536)
        except ConnectionError:
            piece = b""
        self._heard += piece
        self.ended |= not piece

    def news(self) -> list[dict[str, Any]]:
        """Messages that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            while not self.ended:
                try:
                    piece = self._held.status.recv(65536)
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
                socket.send_fds(self._held.queue, [b"start"], fds)
            ours.settimeout(START_S)
            send_line(ours, {"env": spec.env})
            pid = int(receive_line(ours)["pid"])
            try:
                ours.sendall(b"go")
            except OSError:
                end_child(pid)
                raise
        return pid

    def own_pids(self) -> frozenset[int]:
        """The warm parent and its spares, which do not leave its session."""
        return self._held.own_pids()

    def last_words(self) -> str:
        """The last line it wrote, in brackets; empty where it wrote none."""
        return self._held.last_words()

    def close(self) -> None:
        """End it with its spares, and free everything."""
        self._held.end()


def _bound_to(agent: int) -> Callable[[], None]:
    """What the warm parent does between fork and exec: bind its life to the agent's."""

    def before_exec() -> None:
        die_with_parent()
        spare_workers()
        if os.getppid() != agent:  # the agent died in between
            os._exit(_EXIT_ORPHANED)

    return before_exec
