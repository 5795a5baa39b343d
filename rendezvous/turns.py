"""Requests that may take long, a little of them in each turn of the loop.

Heartbeats and other quick requests come between two of them, however many there are. Everything
runs on the server's loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter

SLICE_S = 0.002  # of a turn; the last request of a slice may be longer


class Turns:
    """A queue of work, first come first served; create it on a running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Callable[[], object] | asyncio.Future[None]] = deque()
        self._planned = False

    def add(self, work: Callable[[], object]) -> None:
        """Call `work` in one of the next turns."""
        self._waiting.append(work)
        self._plan()

    async def wait(self) -> None:
        """Return in a turn in which no other caller of this method goes on."""
        mine: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(mine)
        self._plan()
        await mine

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._take)

    def _take(self) -> None:
        self._planned, until = False, perf_counter() + SLICE_S
        try:
            while self._waiting:
                work = self._waiting.popleft()
                if isinstance(work, asyncio.Future):
                    if not work.done():  # its client may have gone
                        work.set_result(None)
                        break
                else:
                    work()
                if perf_counter() >= until:
                    break
        finally:
            if self._waiting:
                self._plan()
