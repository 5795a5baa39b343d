"""A node's part in one run of a job, once it was taken in: orders, agents' ends, and leaving.

Made and used by `launcher.join.node` on its loop; the local backend, which starts and ends the
agents, tells of their ends on a thread of its own. Times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable

import msgspec

from elastic_driver import contract
from elastic_driver.core.documents import JobSpec, decode
from elastic_driver.core.join_messages import (
    ATTEND_PATH,
    LEAVE_PATH,
    AgentEnd,
    AttendRequest,
    JobOver,
    LeaveRequest,
    NodeOrders,
)
from elastic_driver.errors import ExitCode
from launcher.backends.local import LocalBackend
from launcher.join.server import Membership
from rendezvous.errors import RendezvousError, RequestError, UnauthorizedError
from rendezvous.wire import MAX_WAIT_S

GOODBYE_S = 2.0  # for the server to hear that we leave
MAX_REASON = 2000
_decode_orders = msgspec.json.Decoder(NodeOrders).decode


class ServerLostError(Exception):
    """The server is gone, or does not know this node any more."""


class Part:
    """The node's part in one run: from its join to the run's end, its own, or the server's."""

    def __init__(
        self,
        membership: Membership,
        backend: LocalBackend,
        session: str,
        say: Callable[[str], None],
    ) -> None:
        self._say, self._backend, self._session = say, backend, session
        self._joined, self._client = membership.joined, membership.client
        self._loop = asyncio.get_running_loop()
        self._begun: set[int] = set()  # incarnations whose agents were started, ever
        self._alive: set[int] = set()
        self._ended: dict[int, str] = {}  # agents' ends that the server has not heard of
        self._news = asyncio.Event()  # there is something to tell it
        self._number = 0  # of the newest orders
        self._empty = asyncio.Event()  # no agent is alive
        self._empty.set()
        # A wait for orders is a third of the heartbeat timeout; an answer may take longer.
        self._client.timeout = self._joined.heartbeat_timeout

    async def read_spec(self) -> JobSpec:
        """What the job runs."""
        try:
            entry = await asyncio.to_thread(self._client.get, contract.JOB_SPEC, GOODBYE_S)
        except RendezvousError as error:
            raise ServerLostError(str(error)) from error
        if entry is None:
            raise ServerLostError("the server has no job")
        return decode(JobSpec, entry.value)

    async def live(self, signals: asyncio.Queue[signal.Signals]) -> int:
        """Carry out orders until the end; the exit status. Raises `ServerLostError`."""
        attending = asyncio.create_task(self._attend())
        signalled = asyncio.create_task(signals.get())
        leaving: asyncio.Task[None] | None = None
        number = signal.SIGINT
        try:
            while True:
                tasks = {task for task in (attending, signalled, leaving) if task is not None}
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if attending in done:
                    return self._end(attending.result())
                if leaving is not None and done & {leaving, signalled}:
                    await self._gone(number)
                    return 128 + number
                number = signalled.result()
                signalled = asyncio.create_task(signals.get())
                leaving = asyncio.create_task(self._leave_in_order(number))
        except ServerLostError:
            if leaving is not None:
                return 128 + number
            raise
        finally:
            for task in (attending, signalled, leaving):
                if task is not None:
                    task.cancel()

    def _end(self, over: JobOver) -> int:
        if over.exit_code != ExitCode.OK:
            self._say(f"the job has ended with exit status {over.exit_code}: {over.reason}")
        return over.exit_code

    # ---- orders --------------------------------------------------------------------------

    async def _attend(self) -> JobOver:
        """Show that we live, tell of agents' ends, and carry out what we are told."""
        patience = self._joined.heartbeat_timeout
        while True:
            ended = dict(self._ended)
            self._news.clear()
            asking = asyncio.create_task(self._ask(ended, patience))
            news = asyncio.create_task(self._news.wait())
            try:
                await asyncio.wait((asking, news), return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    continue  # what is new is told with the next request
                orders = asking.result()
            except UnauthorizedError:
                raise ServerLostError("another run is served there now") from None
            except RequestError as error:
                if error.status != 410:
                    raise
                raise ServerLostError("the server has given this node up") from None
            except RendezvousError as error:
                raise ServerLostError(f"lost the server: {error}") from None
            finally:
                if not asking.done():  # end its request; the next one has a client of its own
                    self._client.abort()
                    self._client = self._client.clone()
                asking.cancel()
                news.cancel()
            for incarnation in ended:
                self._ended.pop(incarnation, None)
            if orders.over is not None:
                return orders.over
            self._number = orders.number
            self._obey(orders)

    async def _ask(self, ended: dict[int, str], patience: float) -> NodeOrders:
        ends = tuple(AgentEnd(n, reason[:MAX_REASON]) for n, reason in ended.items())
        request = AttendRequest(self._session, self._number, ends, min(MAX_WAIT_S, patience / 3))
        body = msgspec.json.encode(request)
        return _decode_orders(await self._post(ATTEND_PATH, body, patience))

    async def _post(self, path: str, body: bytes, deadline: float) -> bytes:
        return await asyncio.to_thread(self._client.post_json, path, body, deadline)

    def _obey(self, orders: NodeOrders) -> None:
        name = self._joined.name
        for incarnation in orders.started:
            if incarnation not in self._begun:
                self._begun.add(incarnation)
                self._alive.add(incarnation)
                self._empty.clear()
                self._backend.start(name, incarnation, self._on_lost(incarnation))
        for incarnation in orders.killed:
            self._backend.kill(name, incarnation)

    def _on_lost(self, incarnation: int) -> Callable[[str], None]:
        def on_lost(reason: str) -> None:  # on the backend's thread
            self._loop.call_soon_threadsafe(self._agent_ended, incarnation, reason)

        return on_lost

    def _agent_ended(self, incarnation: int, reason: str) -> None:
        self._alive.discard(incarnation)
        self._ended[incarnation] = reason
        self._news.set()
        if not self._alive:
            self._empty.set()

    # ---- leaving -------------------------------------------------------------------------

    async def _leave_in_order(self, number: signal.Signals) -> None:
        """Have the driver take the workers away at a step boundary; returns when none is left."""
        notice = self._joined.leave_notice
        if not self._alive or not notice:
            return
        self._say(f"got {number.name}: leaving within {notice:g} s; once more: at once")
        body = {"reason": f"node {self._joined.name} got {number.name}", "deadline": notice}
        path = contract.DRAIN_PATH.format(host=self._joined.name)
        try:
            await self._post(path, msgspec.json.encode(body), notice)
        except RendezvousError:  # it does not use us any more, or is gone: nothing to wait for
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._empty.wait(), notice)

    async def _gone(self, number: signal.Signals) -> None:
        """End what is left, and say goodbye."""
        await asyncio.to_thread(self._backend.close, 0.0)
        await self.say_goodbye(f"it got {number.name}")

    async def say_goodbye(self, reason: str) -> None:
        """Tell the server, if it listens, that this node goes."""
        request = LeaveRequest(self._session, f"node {self._joined.name} has left: {reason}")
        with contextlib.suppress(RendezvousError):
            body = msgspec.json.encode(request)
            await self._post(LEAVE_PATH, body, GOODBYE_S)

    def close(self) -> None:
        """End pending requests and close the connections."""
        self._client.abort()
