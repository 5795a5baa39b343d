"""An agent's link to its driver: reports go out, orders come in, and a driver may be replaced.

The drivers of a job follow one another, and each has a *term* (`job/driver`). When one dies, the
agent keeps its workers and its reports, and asks until another driver answers. To a driver with a
higher term it sends its reports first and then its story (`AgentReturned`); it obeys that driver's
orders, which are numbered from 1 again. It never obeys a driver with a lower term.

A job without `driver_timeout` waits for no other driver: no answer within the heartbeat timeout is
the end. Times are seconds.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.reachability import probe
from elastic_driver.words import orders as documents
from elastic_driver.words.orders import JobSpec
from elastic_driver.words.wire_events import AgentReturned, WireEvent
from rendezvous.client import RendezvousClient
from rendezvous.client_connections import parse_url
from rendezvous.errors import RefusedError, RendezvousError, RequestError
from rendezvous.wire import MAX_WAIT_S, Entries, Get, Set, Watch, Written, expect

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
