"""One worker's process: watched through a pidfd, stopped with a grace period, ended whole.

A worker leads a session and process group of its own. When the leader has ended, whatever it
left behind is killed before its end is reported: the rest of its group, and the descendants that
made themselves independent, which the kernel gives to the agent as their new parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from elastic_driver import contract
from launcher.agent.processes.descendants import carries, children, kill_trees, reap

LEFTOVERS_S = 2.0  # for the kernel to end what was killed
_LOOK_AGAIN_S = 0.005
_STOP_MARK = signal.Signals[contract.STOP_MARK]


class Family:
    """The agent's children: leaders of workers, helpers of a starter, and strays.

    A stray is a process that lost its parent and came to us. All of them descend from workers,
    because nothing else below the agent starts processes.
    """

    def __init__(self, helpers: Callable[[], frozenset[int]]) -> None:
        self.leaders: set[int] = set()
        self.onlookers: set[int] = set()  # programs that look at workers (`looking`)
        self._helpers = helpers

    def strays(self) -> list[int]:
        """Pids of the strays that live; those that have ended are reaped on the way."""
        known = self.leaders | self.onlookers | self._helpers()
        return [pid for pid in children() if pid not in known and reap(pid) is None]

    async def end_strays(self, wanted: Callable[[int], bool], within: float = LEFTOVERS_S) -> None:
        """Kill the strays for which `wanted(pid)` holds, and all their descendants.

        Returns when none is left, or after `within` seconds (a process that hangs in the
        kernel cannot be killed).
        """
        deadline = asyncio.get_running_loop().time() + within
        while found := [pid for pid in self.strays() if wanted(pid)]:
            kill_trees(found)
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(_LOOK_AGAIN_S)


class WorkerProcess:
    """A started worker.

    Args:
        pid: a child of ours that leads its own session.
        marks: variables it was born with that no other worker has; they name its strays.
    """

    def __init__(self, pid: int, family: Family, marks: dict[str, str]) -> None:
        self.pid = pid
        self._loop = asyncio.get_running_loop()
        self._family, self._marks = family, marks
        self._leader_ended = asyncio.Event()
        self._kill_at: asyncio.TimerHandle | None = None
        family.leaders.add(pid)
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._on_ended)

    def stop(self, grace: float) -> None:
        """SIGTERM to the group, SIGKILL after `grace` seconds (0: at once); may be repeated.

        Of several calls the one that ends soonest counts.
        """
        if self._leader_ended.is_set():
            return
        if grace <= 0:
            self._signal(signal.SIGKILL)
            return
        when = self._loop.time() + grace
        if self._kill_at is None:
            self._signal(_STOP_MARK)  # so that nobody takes it for a notice and trains on
            self._signal(signal.SIGTERM)
        elif when >= self._kill_at.when():
            return
        else:
            self._kill_at.cancel()
        self._kill_at = self._loop.call_at(when, self._signal, signal.SIGKILL)

    async def ended(self) -> int:
        """Wait for the end of the leader and of all it left; its code as subprocess gives it."""
        await self._leader_ended.wait()
        # The leader is still a zombie, so its number cannot have become somebody else's.
        self._signal(signal.SIGKILL)
        await self._family.end_strays(self._is_left_over)
        code = reap(self.pid)
        self._family.leaders.discard(self.pid)
        return 0 if code is None else code

    def _is_left_over(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            if os.getsid(pid) == self.pid:
                return True
        return carries(pid, self._marks)

    def _on_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._kill_at is not None:
            self._kill_at.cancel()
        self._leader_ended.set()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
