"""Requests that may take long, a little of them in each turn of the loop.

Heartbeats and other quick requests come between two of them, however many there are. There are
several queues, so that work of one kind does not wait for all the work of another. Everything runs
on the server's loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum
from time import perf_counter

SLICE_S = 0.002  # of a turn; the last request of a slice may be longer


class Queue(Enum):
    """The kinds of work; each has a queue, and the queues take turns."""

    NEW = "new"  # first requests of connections
    COSTLY = "costly"  # requests that are large, or of connections whose last ones took long
    ANSWER = "answer"  # large answers to be encoded
    STRANGERS = "strangers"  # requests for aiohttp that have no token: hellos, logins, guesses
    GENERAL = "general"  # of machines
    PEOPLE = "people"  # of operators, and of readers' sessions


class Turns:
    """Queues of work, each first come first served; create it on a running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queues: dict[Queue, deque[Callable[[], object] | asyncio.Future[None]]]
        self._queues = {queue: deque() for queue in Queue}
        self._order = deque(Queue)  # the queue that is next first
        self._left = 0  # in all queues
        self._planned = False

    def add(self, queue: Queue, work: Callable[[], object]) -> None:
        """Call `work` in one of the next turns."""
        self._add(queue, work)

    async def wait(self, queue: Queue) -> None:
        """Return in a turn in which no other caller of this method goes on."""
        mine: asyncio.Future[None] = self._loop.create_future()
        self._add(queue, mine)
        await mine

    def _add(self, queue: Queue, work: Callable[[], object] | asyncio.Future[None]) -> None:
        self._queues[queue].append(work)
        self._left += 1
        self._plan()

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._take)

    def _take(self) -> None:
        self._planned, until = False, perf_counter() + SLICE_S
        try:
            while self._left:
                work = self._pop()
                if isinstance(work, asyncio.Future):
                    if not work.done():  # its client may have gone
                        work.set_result(None)
                        break
                else:
                    work()
                if perf_counter() >= until:
                    break
        finally:
            if self._left:
                self._plan()

    def _pop(self) -> Callable[[], object] | asyncio.Future[None]:
        """Take the oldest work out of the next queue that has any."""
        while True:
            queue = self._queues[self._order[0]]
            self._order.rotate(-1)
            if queue:
                self._left -= 1
                return queue.popleft()
