"""Output of an agent and its workers: to our console, or to the next driver once that is gone.

Lines for the next driver wait in their order, `MAX_BYTES` at most: the oldest ones are dropped, and
the driver is told how many. They are numbered, so that a request that is repeated shows none twice.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from elastic_driver import contract
from elastic_driver.console import HIGH_WATER, LOW_WATER, Console
from elastic_driver.words import counted
from elastic_driver.words.progress import MAX_OUTPUT_LINES, OutputLine, OutputLines
from rendezvous.errors import RequestError

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
        self._host, self._incarnation, self._post, self._flow = host, incarnation, post, flow
        self._waiting: deque[tuple[int, list[bytes]]] = deque()  # stream, lines
        self._bytes = 0
        self._sending: list[OutputLine] = []  # taken from `_waiting`, and not known to have arrived
        self._next = 1  # the number of the next line that is sent
        self._dropped = 0
        self._some, self._none = asyncio.Event(), asyncio.Event()
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
        lines, self._sending = [*self._sending, *self._told()], []
        waiting, self._waiting, self._bytes = self._waiting, deque(), 0
        found = [(line.stream, [line.text.encode()]) for line in lines]
        return [(stream, b"\n".join(text) + b"\n") for stream, text in (*found, *waiting)]

    def _batch(self) -> list[OutputLine]:
        """Take out the next lines for one request; at least one."""
        found, size = self._told(), 0
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
