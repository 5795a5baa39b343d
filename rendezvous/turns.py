"""Requests that may take long, a little of them in each turn of the loop.

Heartbeats and other quick requests come between two of them, however many there are. There are
several queues, so that work of one kind does not wait for all the work of another. In each queue
the clients take turns, so that one that asks without end makes no other one wait long. Everything
runs on the server's loop.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from enum import Enum
from time import perf_counter
from typing import TypeAlias

SLICE_S = 0.002  # of a turn; the last request of a slice may be longer
_Work: TypeAlias = "Callable[[], object] | asyncio.Future[None]"


class Queue(Enum):
    """The kinds of work; each has a queue, and the queues take turns."""

    NEW = "new"  # first requests of connections
    COSTLY = "costly"  # requests that are large, or of connections whose last ones took long
    ANSWER = "answer"  # large answers to be encoded
    STRANGERS = "strangers"  # requests for aiohttp that have no token: hellos, logins, guesses
    GENERAL = "general"  # of machines
    PEOPLE = "people"  # of operators, and of readers' sessions


class Turns:
    """Queues of work, each first come first served for one client; create it on a running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # The clients with work; the one that is next first.
        self._queues: dict[Queue, OrderedDict[Hashable, deque[_Work]]]
        self._queues = {queue: OrderedDict() for queue in Queue}
        self._order = deque(Queue)  # the queue that is next first
        self._left = 0  # in all queues
        self._planned = False

    def add(self, queue: Queue, work: Callable[[], object], client: Hashable = None) -> None:
        """Call `work`, which is for this client, in one of the next turns."""
        self._add(queue, work, client)

    async def wait(self, queue: Queue, client: Hashable = None) -> None:
        """Return in a turn in which no other caller of this method goes on."""
        mine: asyncio.Future[None] = self._loop.create_future()
        self._add(queue, mine, client)
        await mine

    def _add(self, queue: Queue, work: _Work, client: Hashable) -> None:
        self._queues[queue].setdefault(client, deque()).append(work)
        self._left += 1
        self._schedule()

    def _schedule(self) -> None:
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
                self._schedule()

    def _pop(self) -> _Work:
        """Take the oldest work of the next client out of the next queue that has any."""
        while True:
            queue = self._queues[self._order[0]]
            self._order.rotate(-1)
            if queue:
                self._left -= 1
                client, own = next(iter(queue.items()))
                work = own.popleft()
                if own:
                    queue.move_to_end(client)
                else:
                    del queue[client]
                return work
