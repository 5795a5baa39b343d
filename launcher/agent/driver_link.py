"""An agent's link to its driver: reports and lines go out, orders come in.

The drivers of a job follow one another, and each has a *term* (`job/driver`). When one dies, the
agent keeps its workers and its reports, and asks until another driver answers. To a driver with a
higher term it sends its reports first and then its story (`AgentReturned`); it obeys that driver's
orders, which are numbered from 1 again. It never obeys a driver with a lower term.

A job without `driver_timeout` waits for no other driver: no answer within the heartbeat timeout is
the end.

`RecordedOutput` sends the workers' lines to the driver, which keeps them for `elasticctl logs`.
`Consoles` writes the output to our console or, once that is gone, sends it to the next driver
(`PostedOutput`), whose console shows it.

In both, lines wait in their order up to a number of bytes; the oldest are dropped beyond that, and
the driver is told how many. Nothing here holds a worker up or ends the agent: while there is no
driver, lines wait for the next one. Lines for a console are numbered, so that a request that is
repeated shows none twice. The driver says how long to wait between two requests for its logs.
Times are seconds.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from elastic_driver import contract
from elastic_driver.console import HIGH_WATER, LOW_WATER, Console
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.reachability import probe
from elastic_driver.words import counted
from elastic_driver.words import orders as documents
from elastic_driver.words.orders import JobSpec
from elastic_driver.words.progress import (
    MAX_OUTPUT_LINES,
    LogsTaken,
    OutputLine,
    OutputLines,
    WorkerLine,
    WorkerLines,
)
from elastic_driver.words.wire_events import AgentReturned, WireEvent
from rendezvous.client import RendezvousClient
from rendezvous.client_connections import parse_url
from rendezvous.errors import RefusedError, RendezvousError, RequestError
from rendezvous.wire import MAX_WAIT_S, UNREADABLE, Entries, Get, Set, Watch, Written, expect

ORDERS_AHEAD = 16  # orders that one answer may bring
CALM_LOOK_S = 1.0  # between two looks at whether the driver answers, while it does
LOOK_S = 0.25  # the same, while it does not
SILENCE_S = 2.0  # without an answer, before a driver counts as away; longer than a calm look
PROBE_S = 0.6  # for the driver's machine to accept a connection
STRANGER_PAUSE_S = 0.2  # before the next question to a server that is not our driver's
T = TypeVar("T")


class NoDriverError(RendezvousError):
    """No other driver came in time."""


def term_in(found: Entries, reader: documents.Reader, known: int = 0) -> int:
    """Return the driver's term in the answer to a request for `job/driver`; 0: it has none.

    If the key holds nonsense, it is the term that is `known`.
    """
    entry = found.entries.get(contract.JOB_DRIVER)
    if entry is None:
        return 0
    driver = reader.read(documents.decode_term, contract.JOB_DRIVER, entry.value)
    return known if driver is None else driver.term


class DriverLink:
    """Reports to one driver after the other, and reads their orders.

    `deliver`, `obey` and `watch` run until the agent ends. They raise RendezvousError when it has
    no driver any more. `on_absent` is called when the driver is away; `story` returns the agent's
    story for the driver of a term.
    """

    def __init__(
        self,
        client: RendezvousClient,
        agent: tuple[str, int],
        spec: JobSpec,
        term: int,
        *,
        story: Callable[[int], AgentReturned],
        on_absent: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._agent = agent
        self._say = say
        self._reader = documents.Reader(say)
        self._timeout, self._patience = spec.driver_timeout, spec.heartbeat_timeout
        self._deadline = math.inf if self._timeout else self._patience  # `watch` ends the wait
        self._story, self._on_absent = story, on_absent
        self.term = term  # the highest one seen; 0: the drivers of this job have none
        # Without bound, as what an agent reports while no driver orders anything is little: the
        # ends of its workers.
        self._events: asyncio.Queue[WireEvent] = asyncio.Queue()
        self.report = self._events.put_nowait
        self.absent = False
        self._died_at: float | None = None  # monotonic; of the driver whose term we know
        self._stranger_since: float | None = None  # monotonic; another server answers

    @property
    def waits(self) -> bool:
        """True if workers outlive their driver."""
        return self._timeout > 0

    async def delivered(self) -> None:
        """Wait until every report so far has been taken."""
        await self._events.join()

    def driver_died(self, why: str) -> None:
        """Wait for the next driver from now on: the process of this one is gone."""
        self._died_at = time.monotonic()
        self._miss(why)

    # ---- reports -------------------------------------------------------------------------

    async def deliver(self) -> None:
        """Deliver events for ever, one at a time.

        An event that the driver refuses is a bug of ours: it is shown and dropped, so that it does
        not hold up the events behind it.
        """
        while True:
            event = await self._events.get()
            try:
                await self.post(EVENTS_PATH, msgspec.json.encode(event))
            except RequestError as error:
                self._say(f"the driver did not take {type(event).__name__}: {error}")
            finally:
                self._events.task_done()

    async def post(self, path: str, body: bytes) -> bytes:
        """POST to this driver or the next one; return the answer.

        Raises RequestError if it refuses the request.
        """
        return await self._call(lambda: self._client.post_json(path, body, self._deadline))

    async def _call(self, call: Callable[[], T]) -> T:
        """Call in a thread; the answer of a program that is no driver counts as none."""
        while True:
            try:
                return await asyncio.to_thread(call)
            except RequestError as error:
                if error.code != "http_error" or not self.waits:
                    raise
            await self._pause_for_stranger()

    # ---- orders --------------------------------------------------------------------------

    async def obey(self, carry_out: Callable[[documents.Order], None]) -> None:
        """Renew the lease and wait for orders, in one request; carry them out one by one."""
        lease = Set(contract.agent_lease(*self._agent), lease=self._patience)
        done = newest = 0  # orders carried out; revision of `job/driver`
        while True:
            numbers = range(done + 1, done + 1 + ORDERS_AHEAD)
            keys = tuple(contract.agent_order(*self._agent, number) for number in numbers)
            wait = min(self._patience / 3, MAX_WAIT_S)
            watch = Watch({keys[0]: 0, contract.JOB_DRIVER: newest}, wait=wait)
            asked = lease, watch, Get((contract.JOB_DRIVER,)), Get(keys)
            answer = await self._call(lambda: self._client.batch(*asked, deadline=self._deadline))  # noqa: B023
            driver = expect(answer[2], Entries)
            term = term_in(driver, self._reader, self.term)
            if term < self.term:  # it was replaced, or has just opened its store
                await self._pause_for_stranger()
                continue
            newest = driver.entries[contract.JOB_DRIVER].revision if term else 0
            try:
                expect(answer[0], Written)
                expect(answer[1], Entries)
                found = expect(answer[3], Entries).entries
            except RefusedError as error:
                raise RendezvousError(f"it has given this agent up ({error})") from error
            self._stranger_since = None
            if term > self.term:
                await self._return_to(term)
                done = 0
                continue
            for key in keys:
                if key not in found:
                    break
                order = self._reader.read(documents.decode_order, key, found[key].value)
                if order is not None:
                    carry_out(order)
                done += 1

    async def _return_to(self, term: int) -> None:
        """Report to the driver of a higher term; return when it has taken everything."""
        self.term = term
        self._died_at = None
        self.absent = False
        self.report(self._story(term))
        await self.delivered()
        self._say(f"the driver of term {term} goes on with the job")

    # ---- absence -------------------------------------------------------------------------

    async def watch(self) -> None:
        """Notice that no driver answers; raises NoDriverError when `driver_timeout` is over."""
        away = 0.0
        while True:
            await asyncio.sleep(LOOK_S if away or self.absent else CALM_LOOK_S)
            signs = self._died_at, self._stranger_since, self._client.silent_since
            away = max((time.monotonic() - at for at in signs if at is not None), default=0.0)
            if away >= self._timeout:
                raise NoDriverError(f"no other came within {self._timeout:g} s")
            if away >= SILENCE_S and (away >= self._patience / 3 or not await self._listens()):
                self._miss("it does not answer")
            elif away == 0.0 and self.absent:
                self.absent = False
                self._say("the driver answers again")

    async def _listens(self) -> bool:
        """Return whether the driver accepts connections: it may be stopped, or very busy."""
        address = parse_url(self._client.url)
        where = str(address.hostname), int(address.port or 0)
        return await probe(*where, PROBE_S) == "answered"

    def _miss(self, why: str) -> None:
        if not self.absent:
            self.absent = True
            self._say(
                f"the driver is away ({why}); the workers go on, and wait up to "
                f"{self._timeout:g} s for the next one"
            )
            self._on_absent()

    async def _pause_for_stranger(self) -> None:
        if self._stranger_since is None:
            self._stranger_since = time.monotonic()
        await asyncio.sleep(STRANGER_PAUSE_S)


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
