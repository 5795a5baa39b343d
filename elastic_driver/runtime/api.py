"""The driver's own HTTP routes, mounted on the rendezvous server behind its token check.

| route | answer |
|---|---|
| `POST /v1/events` | 202; a `core.events.WireEvent` goes into the driver's mailbox |
| `GET /v1/status` | the run and `core.status.JobStatus` as one JSON object |
| `GET /v1/events?since=N` | `{"events": […], "last": n}`; with `text/event-stream` it goes on |
| `GET /metrics` | the same picture for Prometheus, see `runtime.metrics` |
| `POST /v1/scale` | 202; `{"num_proc": N}` within the job's bounds |
| `POST /v1/hosts/{host}:drain` | 202; the host's workers leave in order; 404 for an unknown host |
| `POST /v1/hosts/{host}:undrain` | 202; it may be used again; 404, 409 `not_drained` |
| `POST /v1/stacks` | 202; every worker reports its stack: event `stacks_collected` |
| `POST /v1/stop` | 202; the job ends with status 143; a second request ends it at once |
| `/v1/shards/…`, `/v1/tf/…` | see `runtime.machine_api` |
| `/v1/nodes` | see `runtime.joined` |

Handlers run on the server's loop: they decode a request, check it and post an event. Every
decision about the job is made in the driver's thread. Errors have the form of
`rendezvous.web`.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Protocol, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from elastic_driver.contract import (
    DRAIN_PATH,
    METRICS_PATH,
    SCALE_PATH,
    STACKS_PATH,
    STATUS_PATH,
    STOP_PATH,
    UNDRAIN_PATH,
)
from elastic_driver.core.events import (
    DrainCancelled,
    DrainRequested,
    ScaleRequested,
    StacksRequested,
    WireEvent,
)
from elastic_driver.errors import ExitCode
from elastic_driver.policies.nodecheck.messages import TaskEnded
from elastic_driver.runtime import metrics
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.joined import JoinedNodes
from elastic_driver.runtime.machine_api import MachineRoutes, OpenRequests, RequestEvent, call_on
from rendezvous.web import JSON, Problem, read_json
from rendezvous.wire import EVENTS_PATH

STATUS_WAIT_S = 5.0  # for the mailbox thread to draw a picture of the job
MAX_STREAMS = 64  # readers that follow the event log at the same time
_KEEP_ALIVE_S = 15.0
T = TypeVar("T")
_EVENT_STREAM = "text/event-stream"


Reason = Annotated[str, Meta(min_length=1, max_length=500)]
Request = WireEvent | TaskEnded | ScaleRequested | DrainRequested | DrainCancelled | StacksRequested


class ScaleRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/scale`: the new number of workers."""

    num_proc: Annotated[int, Meta(ge=1, le=10**6)]


class DrainRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a drain: its reason, and the seconds until the host must be empty (or None)."""

    reason: Reason = "somebody asked for it"
    deadline: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None


class ReasonGiven(Struct, frozen=True, forbid_unknown_fields=True):
    """A body that gives the reason of a request."""

    reason: Reason = "somebody asked for it"


class _HostSeen(Struct, frozen=True):
    host: str
    state: str


class _HostsSeen(Struct, frozen=True):
    """The hosts of the status document."""

    hosts: tuple[_HostSeen, ...]


class EventAccepted(Struct, frozen=True):
    """The answer to a request that was put into the mailbox."""

    accepted: bool = True


class DriverPort(Protocol):
    """The driver, as the routes use it; every method may be called by any thread."""

    @property
    def size_bounds(self) -> tuple[int, int | None]:
        """The fewest and (None: no limit) the most workers the job may have."""

    def post(self, event: Request | RequestEvent) -> bool:
        """Put an event into the mailbox; False when it is full or the job is over."""

    def request_stop(self, reason: str, exit_code: int) -> None:
        """Ask for the job's end; a second call ends it at once."""

    def ask_status(self, reply: Callable[[bytes], None]) -> None:
        """Have `reply` called soon with the status document, in another thread."""


_decode_event: Callable[[bytes], WireEvent | TaskEnded] = msgspec.json.Decoder(
    WireEvent | TaskEnded
).decode
_decode_scale = msgspec.json.Decoder(ScaleRequest).decode
_decode_drain = msgspec.json.Decoder(DrainRequest).decode
_decode_reason = msgspec.json.Decoder(ReasonGiven).decode
_ACCEPTED = msgspec.json.encode(EventAccepted())


class DriverRoutes:
    """Handlers of the routes above."""

    def __init__(
        self, driver: DriverPort, log: EventLog, joined: JoinedNodes | None = None
    ) -> None:
        self._driver, self._log = driver, log
        self.requests, self._joined = OpenRequests(driver.post), joined
        self._streams = 0

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        app.router.add_post(EVENTS_PATH, self.post_event)
        app.router.add_get(EVENTS_PATH, self.get_events, allow_head=False)
        app.router.add_get(STATUS_PATH, self.get_status, allow_head=False)
        app.router.add_get(METRICS_PATH, self.get_metrics, allow_head=False)
        app.router.add_post(SCALE_PATH, self.scale)
        app.router.add_post(DRAIN_PATH, self.drain)
        app.router.add_post(UNDRAIN_PATH, self.undrain)
        app.router.add_post(STACKS_PATH, self.stacks)
        app.router.add_post(STOP_PATH, self.stop)
        MachineRoutes(self.requests).add_to(app)
        if self._joined is not None:
            self._joined.add_to(app)

    async def post_event(self, request: web.Request) -> web.Response:
        """Take in an event of an agent or a worker."""
        event = await read_json(request, _decode_event)
        return self._accept(event)

    def take_event(
        self, _path: str, body: bytes, answer: Callable[[int, bytes], None]
    ) -> Callable[[], object] | None:
        """Take in a raw event; None leaves the request to `post_event`, which refuses it."""
        try:
            event = _decode_event(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if not self._driver.post(event):
            return None
        answer(202, _ACCEPTED)
        return lambda: None  # nothing is left to give up

    async def scale(self, request: web.Request) -> web.Response:
        """Change the number of workers."""
        wished = (await read_json(request, _decode_scale)).num_proc
        least, most = self._driver.size_bounds
        if wished < least:
            raise Problem(
                422,
                "below_min",
                f"{wished} workers are fewer than the job's minimum of {least}",
                f"ask for at least {least}, or start the job with a lower --min-np",
            )
        if most is not None and wished > most:
            raise Problem(
                422,
                "above_max",
                f"{wished} workers are more than the job's maximum of {most}",
                f"ask for at most {most}, or start the job with a higher --max-np",
            )
        return self._accept(ScaleRequested(wished))

    async def drain(self, request: web.Request) -> web.Response:
        """Drain a host; the body may be empty."""
        wish = await _read_optional(request, _decode_drain, DrainRequest())
        host = await self._host_named(request)
        return self._accept(DrainRequested(host.host, wish.reason, wish.deadline))

    async def undrain(self, request: web.Request) -> web.Response:
        """Use a drained host again; the body may be empty."""
        wish = await _read_optional(request, _decode_reason, ReasonGiven())
        host = await self._host_named(request)
        if host.state not in ("draining", "drained"):
            problem = f"host {host.host} is not drained, it is {host.state}"
            raise Problem(409, "not_drained", problem, "GET /v1/status shows the hosts")
        return self._accept(DrainCancelled(host.host, wish.reason))

    async def stacks(self, request: web.Request) -> web.Response:
        """Collect the stacks of all workers; the body may be empty."""
        wish = await _read_optional(request, _decode_reason, ReasonGiven())
        return self._accept(StacksRequested(wish.reason))

    async def stop(self, request: web.Request) -> web.Response:
        """End the job; the body may be empty."""
        wish = await _read_optional(request, _decode_reason, ReasonGiven())
        self._driver.request_stop(f"told to stop: {wish.reason}", int(ExitCode.TERMINATED))
        return web.Response(body=_ACCEPTED, status=202, content_type=JSON)

    async def _host_named(self, request: web.Request) -> _HostSeen:
        """Return the host named in the path; raises Problem for an unknown one."""
        name = request.match_info["host"]
        seen = msgspec.json.decode(await self._status(), type=_HostsSeen).hosts
        hosts = {host.host: host for host in seen if host.state != "removed"}
        if name in hosts:
            return hosts[name]
        known = ", ".join(list(hosts)[:8]) or "none"
        raise Problem(
            404, "unknown_host", f"the job knows no host {name[:80]!r}", f"it knows {known}"
        )

    async def get_status(self, _request: web.Request) -> web.Response:
        """Answer with the status document."""
        return web.Response(body=await self._status(), content_type=JSON)

    async def get_metrics(self, _request: web.Request) -> web.Response:
        """Answer with the metrics, in Prometheus' text format."""
        body = metrics.exposition(await self._status())
        return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _status(self) -> bytes:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()

        def settle(document: bytes) -> None:
            if not answer.done():
                answer.set_result(document)

        self._driver.ask_status(lambda document: call_on(loop, settle, document))
        try:
            return await asyncio.wait_for(answer, STATUS_WAIT_S)
        except asyncio.TimeoutError:
            raise Problem(
                503, "busy", f"no status within {STATUS_WAIT_S:g} s", "ask again in a moment"
            ) from None

    async def get_events(self, request: web.Request) -> web.StreamResponse:
        """Answer with the events after number `since` that are still in memory."""
        since = _since(request)
        if _EVENT_STREAM in request.headers.get("Accept", ""):
            return await self._stream(request, since)
        events = self._log.since(since)
        last = events[-1].n if events else since
        body = b",".join(event.line for event in events)
        return web.Response(body=b'{"events":[%b],"last":%d}' % (body, last), content_type=JSON)

    async def _stream(self, request: web.Request, since: int) -> web.StreamResponse:
        """Send past and new events as server-sent events until the job is over."""
        if self._streams >= MAX_STREAMS:
            raise Problem(
                503, "too_many_streams", f"{MAX_STREAMS} readers follow already", "ask without -f"
            )
        response = web.StreamResponse(headers={"Cache-Control": "no-store"})
        response.content_type = _EVENT_STREAM
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        unsubscribe = self._log.subscribe(lambda: call_on(loop, news.set))
        self._streams += 1
        try:
            await response.prepare(request)
            while True:
                news.clear()
                over = self._log.closed  # asked first: what is logged before the end is sent
                for event in self._log.since(since):
                    await response.write(b"id: %d\ndata: %b\n\n" % (event.n, event.line))
                    since = event.n
                if over:
                    break
                try:
                    await asyncio.wait_for(news.wait(), _KEEP_ALIVE_S)
                except asyncio.TimeoutError:
                    await response.write(b": still here\n\n")
            await response.write_eof()
        finally:
            self._streams -= 1
            unsubscribe()
        return response

    def _accept(self, event: Request) -> web.Response:
        if not self._driver.post(event):
            raise Problem(
                503, "not_accepting", "the job is over or has too much to do", "try again later"
            )
        return web.Response(body=_ACCEPTED, status=202, content_type=JSON)


async def _read_optional(request: web.Request, decode: Callable[[bytes], T], otherwise: T) -> T:
    """Return the decoded body of a request, or `otherwise` if it is empty."""
    return await read_json(request, decode) if await request.read() else otherwise


def _since(request: web.Request) -> int:
    """Return the number after which to begin: `since`, or the header by which browsers resume."""
    text = request.query.get("since") or request.headers.get("Last-Event-ID") or "0"
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise Problem(422, "invalid", f"since={text[:40]!r} is not an event's number", "since=0")
    return int(text)
