"""The routes that show the job: its status and metrics, and its event log as it grows."""

import asyncio
import concurrent.futures
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web
from msgspec import Struct

from elastic_driver import contract
from elastic_driver.runtime import machine_api, metrics
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.machine_api import DriverPort
from elastic_driver.runtime.metrics import JobTimes
from elastic_driver.runtime.status_document import JobDocument
from elastic_driver.token_roles import WATCHERS
from elastic_driver.words.orders import Count
from rendezvous.auth import Caller
from rendezvous.fairness import Shares
from rendezvous.routes import (
    EVENT_STREAM,
    HITS,
    JSON,
    REFUSALS,
    REQUEST_TIMES,
    TEXT,
    Problem,
    Route,
    caller_of,
    mount,
)
from rendezvous.server import RendezvousServer

KEEP_ALIVE_S = 15.0  # a comment is sent to a reader if there is no news for so long
STATUS_WAIT_S = 5.0  # for the driver's thread to answer with the status
MAX_STREAMS = 64  # readers that follow the job or its event log at the same time


class LoggedEvents(Struct, frozen=True):
    """Lines of the event log, and the number of the last one."""

    events: tuple[dict[str, Any], ...]
    last: int


class Since(Struct, frozen=True):
    """The number of the last event that the reader knows."""

    since: Count = 0


class StatusRoutes:
    """Handlers of the routes that show the job."""

    def __init__(self, driver: DriverPort, log: EventLog, times: JobTimes) -> None:
        self._driver, self._log, self._times = driver, log, times
        self._streams = Shares(MAX_STREAMS)
        self._asking = asyncio.Lock()  # held while the driver is asked for its status
        self._next_status: asyncio.Task[bytes] | None = None
        self._app: web.Application | None = None
        self._scraped = b"", b""  # the last status that became metrics, and these

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        self._app = app
        mount(app, ROUTES, self)

    async def get_status(self, _request: web.Request) -> web.Response:
        """Answer with the status document."""
        return web.Response(body=await self.status(), content_type=JSON)

    async def get_metrics(self, _request: web.Request) -> web.Response:
        """Answer with the metrics, in Prometheus' text format."""
        status = await self.status()
        if self._scraped[0] is not status:  # others may have got the same
            self._scraped = status, metrics.exposition(status, self._figures(), self._times)
        body = self._scraped[1]
        return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})

    def _figures(self) -> metrics.ServerFigures:
        assert self._app is not None  # noqa: S101 - the routes are mounted before they are asked
        app = self._app
        counts = app[HITS].snapshot(), app[REFUSALS].snapshot()
        return metrics.ServerFigures(*counts, app[REQUEST_TIMES].snapshot())

    async def status(self) -> bytes:
        """Return a status from now; all who ask while the driver is asked share the next one."""
        if self._next_status is None:
            self._next_status = asyncio.create_task(self._ask_next())
            self._next_status.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._next_status)

    async def _ask_next(self) -> bytes:
        async with self._asking:
            self._next_status = None
            return await self._ask_status()

    async def _ask_status(self) -> bytes:
        answer: concurrent.futures.Future[bytes] = concurrent.futures.Future()

        def settle(document: bytes) -> None:
            if answer.set_running_or_notify_cancel():  # the client may have gone
                answer.set_result(document)

        self._driver.ask_status(settle)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), STATUS_WAIT_S)
        except asyncio.TimeoutError:
            problem = f"no status within {STATUS_WAIT_S:g} s"
            raise Problem(503, "busy", problem, "ask again in a moment") from None

    async def get_events(self, request: web.Request) -> web.StreamResponse:
        """Answer with the events after number `since` that are still in memory."""
        since = _since(request)
        if EVENT_STREAM in request.headers.get("Accept", ""):
            return await self._stream(request, since)
        events = self._log.since(since)
        last = events[-1].n if events else since
        body = b",".join(event.line for event in events)
        return web.Response(body=b'{"events":[%b],"last":%d}' % (body, last), content_type=JSON)

    @contextmanager
    def one_stream(self, caller: Caller, hint: str) -> Iterator[None]:
        """Count one more stream of a client while the context is open.

        Raises Problem if the client, or all together, have too many.
        """
        if not self._streams.take(caller):
            problem = f"this client has its share of the {MAX_STREAMS} streams, or all are taken"
            raise Problem(503, "too_many_streams", problem, hint)
        try:
            yield
        finally:
            self._streams.give_back(caller)

    async def _stream(self, request: web.Request, since: int) -> web.StreamResponse:
        """Send past and new events as server-sent events until the job is over."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        with self.one_stream(caller_of(request), "ask without -f"):
            response = web.StreamResponse(headers={"Cache-Control": "no-store"})
            response.content_type = EVENT_STREAM
            with self._log.listening(lambda: machine_api.call_on(loop, news.set)):
                await response.prepare(request)
                await self._send(response, since, news)
            await response.write_eof()
        return response

    async def _send(self, response: web.StreamResponse, since: int, news: asyncio.Event) -> None:
        """Write every event after number `since` until the log is closed."""
        over = False
        while not over:
            news.clear()
            over = self._log.closed  # read first: events logged before the end are sent
            for event in self._log.since(since):
                await response.write(b"id: %d\ndata: %b\n\n" % (event.n, event.line))
                since = event.n
            if not over:
                try:
                    await asyncio.wait_for(news.wait(), KEEP_ALIVE_S)
                except asyncio.TimeoutError:
                    await response.write(b": still here\n\n")


def _since(request: web.Request) -> int:
    """Return the number after which to begin: `since`, or the header by which browsers resume."""
    text = request.query.get("since") or request.headers.get("Last-Event-ID") or "0"
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise Problem(422, "invalid", f"since={text[:40]!r} is not an event's number", "since=0")
    return int(text)


ROUTES = (
    Route(
        "GET",
        contract.EVENTS_PATH,
        WATCHERS,
        StatusRoutes.get_events,
        LoggedEvents,
        query=Since,
        more=(EVENT_STREAM,),
        note="as `text/event-stream` also new ones",
    ),
    Route("GET", contract.STATUS_PATH, WATCHERS, StatusRoutes.get_status, JobDocument),
    Route("GET", contract.METRICS_PATH, WATCHERS, StatusRoutes.get_metrics, TEXT),
)


# ---- routes of features ------------------------------------------------------------------


class RoutePart(Protocol):
    """A part that answers some routes."""

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""


class Nodes(RoutePart, Protocol):
    """Takes in nodes that join by themselves."""

    def open(self, server: RendezvousServer, token: str) -> None:
        """Let nodes join from now on: the rendezvous is up, and the job's token is written."""

    def lease_expired(self, key: str) -> None:
        """Give up the node that owned this lease; called by the server's thread for every lease."""

    def job_ends(self, exit_code: int, reason: str) -> None:
        """Tell the nodes how the job has ended."""


@dataclass(frozen=True)
class Serving:
    """The driver, as the routes of a feature may need it."""

    driver: DriverPort
    log: EventLog
    status: StatusRoutes
    nodes: Nodes | None  # None: no nodes join
