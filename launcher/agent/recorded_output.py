"""The lines of our workers on their way to the driver, which keeps them for `elasticctl logs`.

Lines wait in their order, `MAX_BYTES` at most; the oldest are left out beyond that, and the driver
is told how many. The driver says how long to wait between two requests. Nothing here holds a worker
up or ends the agent: while there is no driver, lines wait for the next one.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from elastic_driver import contract
from elastic_driver.words.progress import MAX_OUTPUT_LINES, LogsTaken, WorkerLine, WorkerLines
from rendezvous.errors import RendezvousError
from rendezvous.wire import UNREADABLE

MAX_BYTES = 4 * 1024 * 1024  # of lines that wait
BATCH_BYTES = 256 * 1024  # in one request, about
FIRST_WAIT_S = 0.2  # from a line to the first request, so that more go with it
LINE_BYTES = 100  # what a line takes beside its text, about
# Takes a worker, its rank, a stream and whole lines without their newline.
Record = Callable[[str, int, int, Sequence[bytes]], None]
_taken = msgspec.json.Decoder(LogsTaken).decode


class RecordedOutput:
    """The waiting lines of one agent; used on its loop.

    `post` sends a body to a path and returns the answer of a driver. It raises RendezvousError if
    the driver refuses the body or there is none; then these lines are left out.
    """

    def __init__(
        self, host: str, incarnation: int, post: Callable[[str, bytes], Awaitable[bytes]]
    ) -> None:
        self._host, self._incarnation, self._post = host, incarnation, post
        self._waiting: deque[tuple[WorkerLine, int]] = deque()  # with its bytes
        self._bytes = self._dropped = 0
        self._next = 1  # the number of the next line that is sent
        self._some, self._none = asyncio.Event(), asyncio.Event()
        self._none.set()
        self._hurry = asyncio.Event()  # send at once: the agent ends

    def take(self, worker: str, rank: int, stream: int, lines: Sequence[bytes]) -> None:
        """Take whole lines; returns at once."""
        now = time.time()
        for line in lines:
            text = line.decode(errors="replace")
            size = len(line) + LINE_BYTES
            found = WorkerLine(now, worker, rank, 1 if stream == 1 else 2, text)
            self._waiting.append((found, size))
            self._bytes += size
        while self._bytes > MAX_BYTES:
            self._bytes -= self._waiting.popleft()[1]
            self._dropped += 1
        if self._waiting:
            self._some.set()
            self._none.clear()

    async def drain(self, patience: float) -> None:
        """Send everything without pauses; give up after `patience` seconds."""
        self._hurry.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._none.wait(), patience)

    async def run(self) -> None:
        """Send lines for ever."""
        wait = FIRST_WAIT_S
        while True:
            await self._some.wait()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), wait)
            lines, dropped = self._batch(), self._dropped
            body = WorkerLines(self._host, self._incarnation, self._next, lines, dropped)
            self._next += len(lines)
            try:
                answer = await self._post(contract.LOGS_PATH, msgspec.json.encode(body))
                self._dropped -= dropped
                wait = _taken(answer).wait
            except RendezvousError:
                self._dropped += len(lines)
            except UNREADABLE:  # an answer of a newer driver
                wait = FIRST_WAIT_S
            if not self._waiting:
                self._some.clear()
                self._none.set()

    def _batch(self) -> tuple[WorkerLine, ...]:
        """Take out the next lines for one request; at least one."""
        found: list[WorkerLine] = []
        size = 0
        while self._waiting and size < BATCH_BYTES and len(found) < MAX_OUTPUT_LINES:
            line, taken = self._waiting.popleft()
            size += taken
            found.append(line)
        self._bytes -= size
        return tuple(found)
