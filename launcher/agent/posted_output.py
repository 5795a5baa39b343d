"""Lines of an agent and its workers on their way to a driver.

`RecordedOutput` sends the workers' lines to the driver, which keeps them for `elasticctl logs`.
`Consoles` writes the output to our console or, once that is gone, sends it to the next driver
(`PostedOutput`), whose console shows it.

In both, lines wait in their order up to a number of bytes; the oldest are dropped beyond that, and
the driver is told how many. Nothing here holds a worker up or ends the agent: while there is no
driver, lines wait for the next one. Lines for a console are numbered, so that a request that is
repeated shows none twice. The driver says how long to wait between two requests for its logs.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from elastic_driver import contract
from elastic_driver.console import HIGH_WATER, LOW_WATER, Console
from elastic_driver.words import counted
from elastic_driver.words.progress import (
    MAX_OUTPUT_LINES,
    LogsTaken,
    OutputLine,
    OutputLines,
    WorkerLine,
    WorkerLines,
)
from rendezvous.errors import RendezvousError, RequestError
from rendezvous.wire import UNREADABLE

# ---- to our console, or to that of the next driver ----------------------------------------


MAX_BYTES = 8 * 1024 * 1024  # of lines that wait
BATCH_BYTES = 256 * 1024  # in one request, about
MAX_LINE_CHARS = 65536  # of one line


class PostedOutput:
    """Lines that wait for a driver; used on the agent's loop.

    `flow(False)` is called when many lines wait, `flow(True)` when few do again. `post` sends a
    body to a path and returns when a driver has taken it. It raises RequestError if the driver
    refuses the body; then these lines are lost.
    """

    def __init__(
        self,
        host: str,
        incarnation: int,
        post: Callable[[str, bytes], Awaitable[object]],
        flow: Callable[[bool], None],
    ) -> None:
        self._host = host
        self._incarnation = incarnation
        self._post = post
        self._flow = flow
        self._waiting: deque[tuple[int, list[bytes]]] = deque()  # stream, lines
        self._bytes = 0
        self._sending: list[OutputLine] = []  # taken from `_waiting`, and not known to have arrived
        self._next = 1  # the number of the next line that is sent
        self._dropped = 0
        self._some = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()

    def take(self, stream: int, text: bytes) -> None:
        """Take whole lines, each with its newline."""
        self._waiting.append((stream, text.removesuffix(b"\n").split(b"\n")))
        self._bytes += len(text)
        while self._bytes > MAX_BYTES:
            _, lines = self._waiting.popleft()
            self._bytes -= _size(lines)
            self._dropped += len(lines)
        self._some.set()
        self._none.clear()
        if self._bytes > HIGH_WATER:
            self._flow(False)

    async def drained(self) -> None:
        """Wait until a driver has taken every line."""
        await self._none.wait()

    async def run(self) -> None:
        """Send lines for ever."""
        while True:
            await self._some.wait()
            self._sending = lines = self._batch()
            body = OutputLines(self._host, self._incarnation, self._next, tuple(lines))
            self._next += len(lines)
            try:
                await self._post(contract.OUTPUT_PATH, msgspec.json.encode(body))
            except RequestError:
                self._dropped += len(lines)
            self._sending = []
            if self._bytes <= LOW_WATER:
                self._flow(True)
            if not self._waiting:
                self._some.clear()
                self._none.set()

    def give_back(self) -> list[tuple[int, bytes]]:
        """Return all lines, by stream, and forget them: no driver will take them."""
        lines = [*self._sending, *self._told()]
        self._sending = []
        waiting = self._waiting
        self._waiting = deque()
        self._bytes = 0
        found = [(line.stream, [line.text.encode()]) for line in lines]
        return [(stream, b"\n".join(text) + b"\n") for stream, text in (*found, *waiting)]

    def _batch(self) -> list[OutputLine]:
        """Take out the next lines for one request; at least one."""
        found = self._told()
        size = 0
        while self._waiting and size < BATCH_BYTES and len(found) < MAX_OUTPUT_LINES:
            stream, lines = self._waiting.popleft()
            room = MAX_OUTPUT_LINES - len(found)
            if len(lines) > room:
                self._waiting.appendleft((stream, lines[room:]))
                lines = lines[:room]
            size += _size(lines)
            found += (_line(stream, line) for line in lines)
        self._bytes -= size
        return found

    def _told(self) -> list[OutputLine]:
        """Return the line that says how many were dropped, if any were."""
        count, self._dropped = self._dropped, 0
        if not count:
            return []
        where = f"elasticrun: agent on {self._host}"
        lines = counted(count, "line")
        told = f"{where}: {lines} of output dropped while no driver took output"
        return [OutputLine(2, told)]


def _line(stream: int, line: bytes) -> OutputLine:
    text = line.decode(errors="replace")[:MAX_LINE_CHARS]
    return OutputLine(1 if stream == 1 else 2, text)


def _size(lines: list[bytes]) -> int:
    return sum(map(len, lines)) + len(lines)


class Consoles:
    """Our stdout and stderr. `say` shows a sentence to the user.

    With `outlive`, lines are posted to the next driver once a console is broken or this driver is
    away. While a driver is `present`, workers that write faster than it takes their lines wait.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.stdout = Console(1, "stdout", on_trouble=say)
        self.stderr = Console(2, "stderr", on_trouble=lambda _sentence: None)
        self._posted: PostedOutput | None = None
        self._present: Callable[[], bool] = lambda: True

    def outlive(
        self,
        agent: tuple[str, int],
        post: Callable[[str, bytes], Awaitable[object]],
        present: Callable[[], bool],
    ) -> PostedOutput:
        """Have lines posted to the next driver; the caller runs what is returned."""
        self._present = present
        self._posted = posted = PostedOutput(*agent, post, self._flow)
        self.stdout.elsewhere = partial(posted.take, 1)
        self.stderr.elsewhere = partial(posted.take, 2)
        return posted

    def divert(self) -> None:
        """Keep all lines for the next driver from now on."""
        for console in (self.stdout, self.stderr):
            console.divert()
            console.hold(False)

    async def drain(self, patience: float) -> None:
        """Wait until a driver has taken every line, at most `patience` seconds."""
        if self._posted is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._posted.drained(), patience)

    async def close(self, patience: float) -> None:
        """Write what no driver has taken, and free both; in about `patience` seconds each."""
        both = self.stdout, self.stderr
        for console in both:
            console.take_back()
        for stream, text in self._posted.give_back() if self._posted is not None else ():
            both[stream - 1].write(text)
        for console in both:
            await console.drain(patience)
            console.close()

    def _flow(self, go_on: bool) -> None:
        for console in (self.stdout, self.stderr):
            console.hold(not go_on and self._present())


# ---- to the driver's logs -----------------------------------------------------------------


MOST_RECORDED_BYTES = 4 * 1024 * 1024  # of lines that wait
RECORDED_BATCH_BYTES = 256 * 1024  # in one request, about
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
        self._host = host
        self._incarnation = incarnation
        self._post = post
        self._waiting: deque[tuple[WorkerLine, int]] = deque()  # with its bytes
        self._bytes = self._dropped = 0
        self._next = 1  # the number of the next line that is sent
        self._some = asyncio.Event()
        self._none = asyncio.Event()
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
        while self._bytes > MOST_RECORDED_BYTES:
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
            lines = self._batch()
            dropped = self._dropped
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
        while self._waiting and size < RECORDED_BATCH_BYTES and len(found) < MAX_OUTPUT_LINES:
            line, taken = self._waiting.popleft()
            size += taken
            found.append(line)
        self._bytes -= size
        return tuple(found)
