"""Starts the agent's workers: forks of a process that has imported the heavy modules already.

`WorkerStarter` is the agent's end of the conversation with the warm parent (the folder `parent`),
which is the job's own command, held just before its first line. Whatever cannot be had from a warm
parent (another command, an unsafe fork, a parent that has died) is executed in a new process, and
the reason is said once. A worker is a child of the agent either way.

Each agent has one warm parent, which keeps `spares` processes forked in advance. All waiting here
has a deadline; times are seconds.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

from launcher.agent.processes import ProcessSpec, bound_to, start_fresh
from launcher.agent.warm.command import NotWarmable
from launcher.agent.warm.fork_client import MOST_LAUNCHES, START_S, WarmParent, execute
from launcher.agent.warm.parent._elastic_warm_common import send_line
from launcher.agent.warm.plan import WarmPlan

WARM_UP_S = 60.0  # longer than importing takes even from a slow network file system


class WorkerStarter:
    """Forks workers where it can, and executes the others.

    The agent must be a child subreaper: workers become its children because their first parent
    has ended. Until `launch` is called every process is executed.

    Args:
        say: shows a sentence to the user.
        inherited: a warm parent that the agent was forked with; it serves a plan that equals its
            own.
    """

    def __init__(self, say: Callable[[str], None], inherited: WarmParent | None = None) -> None:
        self._say, self._inherited = say, inherited
        self._plan: WarmPlan | None = None
        self._parent: WarmParent | None = None
        self._threads: int | None = None  # of torch's pool in the warm parent; None: not warm yet
        self._launches = 0
        self._said: set[str] = set()
        self._waiting = asyncio.Lock()

    def launch(self, plan: WarmPlan) -> None:
        """Start the warm parent of this plan in place of the former; it imports meanwhile."""
        self._end_parent()
        self._plan = plan
        if self._inherited is not None and self._inherited.digest == plan.digest():
            self._parent, self._inherited = self._inherited, None
            self._launches += 1
        else:
            self.disinherit()
            self._launch(plan)

    def disinherit(self) -> None:
        """End the inherited warm parent, if it has not been of use."""
        if self._inherited is not None:
            self._inherited.end()
            self._inherited = None

    @property
    def warm(self) -> bool:
        """True if the next `start` will be a fork, as far as is known without asking."""
        return self._warm_parent() is not None

    async def ready(self) -> None:
        """Wait until the warm parent is warm, or given up; never longer than `WARM_UP_S`.

        Waiting is quicker: the imports have begun already, and workers that import for themselves
        would only compete with them for the cores.
        """
        deadline = time.monotonic() + WARM_UP_S
        loop = asyncio.get_running_loop()
        async with self._waiting:  # one at a time may wait for a socket
            while (parent := self._parent) is not None and self._threads is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._lose(f"it was not warm after {WARM_UP_S:.0f} s")
                    return
                parent.status.setblocking(False)
                piece: bytes | None = None
                try:
                    piece = await asyncio.wait_for(loop.sock_recv(parent.status, 65536), left)
                except ConnectionError:
                    piece = b""
                except asyncio.TimeoutError:
                    continue
                self._warm_parent(piece)

    def start(self, spec: ProcessSpec) -> int:
        """Start a process, by a fork if the warm parent is warm; return the pid of our child.

        The child is as `start_fresh` describes it. Takes milliseconds; raises `StartError` where
        nothing was started.
        """
        parent = self._warm_parent()
        if parent is not None and self._plan is not None:
            try:
                self._plan.check(spec, self._threads or 0)
                return parent.fork(spec)
            except NotWarmable as reason:
                self._say_once(f"{reason}; it is started afresh")
            except (OSError, EOFError, ValueError) as error:
                self._lose(f"it does not answer: {error}{parent.last_words()}")
        return start_fresh(spec)

    def own_pids(self) -> frozenset[int]:
        """Return our children that are warm parents or their spares, not to be killed or reaped."""
        parents = [parent for parent in (self._parent, self._inherited) if parent is not None]
        return frozenset[int]().union(*(parent.own_pids() for parent in parents))

    def close(self) -> None:
        """End the warm parent and its spares; started workers stay."""
        self.disinherit()
        self._end_parent()

    # ---- the warm parent -----------------------------------------------------------------

    def _launch(self, plan: WarmPlan) -> None:
        self._launches += 1
        try:
            parent = execute(plan, bound_to(os.getpid()))
        except OSError as error:
            self._say_once(f"no warm workers: cannot start the warm parent ({error})")
            return
        self._parent = parent
        parent.status.settimeout(START_S)
        with contextlib.suppress(OSError):  # it has died already: `_warm_parent` will see it
            send_line(parent.status, plan.first_message(os.getpid()))

    def _end_parent(self) -> None:
        parent, self._parent, self._threads = self._parent, None, None
        if parent is not None:
            parent.end()

    def _warm_parent(self, piece: bytes | None = None) -> WarmParent | None:
        """Take in what the warm parent has said, `piece` first; return it if it can fork."""
        parent = self._parent
        if parent is None:
            return None
        for message in parent.receive(piece):
            if "refused" in message:
                self._say_once(f"no warm workers: {message['refused']}")
                self._end_parent()
                return None
            self._threads = int(message["threads"])
            for line in message["missing"]:
                self._say_once(f"cannot preload {line}; the rest is warm")
        if parent.ended:
            self._lose(f"it ended{parent.last_words()}")
            return None
        return None if self._threads is None else parent

    def _lose(self, why: str) -> None:
        """Give this warm parent up, and start the next if there were not too many."""
        self._end_parent()
        if self._plan is not None and self._launches < MOST_LAUNCHES:
            self._say_once(f"the warm parent is lost: {why}; starting another")
            self._launch(self._plan)
        else:
            self._say_once(f"no warm workers from now on: {why}, {self._launches} times now")

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)
