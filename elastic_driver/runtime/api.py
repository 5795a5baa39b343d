"""The driver's own HTTP routes, mounted on the rendezvous server behind its token check.

| route | answer |
|---|---|
| `POST /v1/events` | 202 once the journal has it; posts a `core.events.WireEvent` to the driver |
| `GET /v1/status` | the run and `core.status.JobStatus` as one JSON object |
| `GET /v1/history?since=T` | `core.measured.History` of the last hour, after T (unix seconds) |
| `GET /v1/openapi.json` | all routes and their messages, see `runtime.openapi` |
| `GET /v1/events?since=N` | `{"events": […], "last": n}`; with `text/event-stream` it goes on |
| `GET /v1/live` | the job as it changes, see `runtime.live` |
| `/`, `/assets/…`, `/login` … | the page, see `runtime.page_routes` |
| `GET /metrics` | the same picture for Prometheus, see `runtime.metrics` |
| `POST /v1/scale` | 202; `{"num_proc": N}` within the job's bounds |
| `POST /v1/plan` | 202; see `core.events.PlanApplied`; 409 `stale_plan` |
| `POST /v1/hosts/{host}:drain` | 202; the host's workers leave in order; 404 for an unknown host |
| `POST /v1/hosts/{host}:undrain` | 202; it may be used again; 404, 409 `not_drained` |
| `POST /v1/stacks` | 202; every worker reports its stack: event `stacks_collected` |
| `POST /v1/stop` | 202; the job ends with status 143; a second request ends it at once |
| `/v1/shards/…`, `/v1/tf/…` | see `runtime.machine_api` |
| `/v1/nodes` | see `runtime.joined` |
| `POST /v1/output` | see `runtime.output` |
| `POST /v1/logs`, `GET /v1/logs` | see `runtime.log_routes` |

Handlers run on the server's loop: they decode a request, check it and post an event. Every
decision about the job is made in the driver's thread. Errors have the form of
`rendezvous.web`.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Struct
from prometheus_client.core import Metric

from elastic_driver import contract
from elastic_driver.core import events as ev
from elastic_driver.core.job_events import JobEvent
from elastic_driver.core.measured import History
from elastic_driver.errors import ExitCode
from elastic_driver.policies.nodecheck.messages import TaskEnded
from elastic_driver.runtime import machine_api, metrics
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.job_times import JobTimes
from elastic_driver.runtime.joined import JoinedNodes
from elastic_driver.runtime.live import EVENT_STREAM, KEEP_ALIVE_S, Live
from elastic_driver.runtime.log_routes import LogRoutes
from elastic_driver.runtime.openapi import HistorySince, OpenApi
from elastic_driver.runtime.output import AgentsOutput
from elastic_driver.runtime.page_routes import PageRoutes
from rendezvous.auth import Caller, Role
from rendezvous.round_members import RoundMembers
from rendezvous.web import (
    HITS,
    JSON,
    REFUSALS,
    REQUEST_TIMES,
    Problem,
    caller_of,
    forbidden,
    read_json,
)
from rendezvous.wire import EVENTS_PATH, UNREADABLE

STATUS_WAIT_S = 5.0  # for the driver's thread to answer with the status
TAKE_S = 5.0  # for an event to be taken from the mailbox and written into the journal
MAX_STREAMS = 64  # readers that follow the job or its event log at the same time

# The event that a POST to each path puts into the mailbox. The event's fields are those of the
# JSON body and the names in the path; a body may be empty if every other field has a default.
EVENT_OF_PATH: dict[str, type[JobEvent]] = {
    contract.SCALE_PATH: ev.ScaleRequested,
    contract.PLAN_PATH: ev.PlanApplied,
    contract.DRAIN_PATH: ev.DrainRequested,
    contract.UNDRAIN_PATH: ev.DrainCancelled,
    contract.STACKS_PATH: ev.StacksRequested,
}
Request = JobEvent | TaskEnded


class StopRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/stop`."""

    reason: ev.Reason = ev.ASKED


class DriverPort(Protocol):
    """The driver, as the routes use it; every method may be called by any thread."""

    @property
    def size_bounds(self) -> tuple[int, int | None]:
        """The fewest and (None: no limit) the most workers the job may have."""

    def post(self, event: machine_api.RequestEvent) -> bool:
        """Put an event into the mailbox; False when it is full or the job is over."""

    def deliver(self, event: Request, acknowledge: Callable[[], None]) -> bool:
        """Do the same, and have `acknowledge` handed to `DriverRoutes.acknowledge`.

        That is done once the journal has the event, so that no driver forgets it any more.
        """

    def request_stop(self, reason: str, exit_code: int) -> None:
        """Ask for the job's end; a second call ends it at once."""

    def ask_status(self, reply: Callable[[bytes], None]) -> None:
        """Have `reply` called soon with the status document, in another thread."""

    def history(self, since: float) -> History:
        """Return how the job has trained since then (unix seconds), in the last hour."""


_decode_event: Callable[[bytes], ev.WireEvent | TaskEnded] = msgspec.json.Decoder(
    ev.WireEvent | TaskEnded
).decode
_decode_stop = msgspec.json.Decoder(StopRequest).decode
_ACCEPTED = b'{"accepted":true}'
# Events about a worker that only its agent sees.
_OF_AGENTS = ev.WorkerStarted | ev.WorkerExited


class DriverRoutes:
    """Handlers of the routes above."""

    def __init__(
        self,
        driver: DriverPort,
        log: EventLog,
        joined: JoinedNodes | None = None,
        output: AgentsOutput | None = None,
        *,
        logs: LogRoutes | None = None,
        times: JobTimes | None = None,
    ) -> None:
        self._driver, self._log, self._output, self._logs = driver, log, output, logs
        self.rounds, self._joined = RoundMembers(), joined
        self.requests = machine_api.OpenRequests(driver.post, self.rounds)
        self._times = JobTimes() if times is None else times
        self._streams = 0
        self._live = Live(self._status, driver.history, log, self._one_stream)
        self._asking = asyncio.Lock()  # held while the driver is asked for its status
        self._next_status: asyncio.Task[bytes] | None = None
        self._app: web.Application | None = None
        self._scraped = b"", b""  # the last status that became metrics, and these
        self._loop: asyncio.AbstractEventLoop | None = None

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        self._app = app
        app.router.add_get(EVENTS_PATH, self.get_events, allow_head=False)
        app.router.add_get(contract.STATUS_PATH, self.get_status, allow_head=False)
        app.router.add_get(contract.HISTORY_PATH, self.get_history, allow_head=False)
        app.router.add_get(contract.METRICS_PATH, self.get_metrics, allow_head=False)
        app.router.add_post(EVENTS_PATH, self.post_event)
        app.router.add_post(contract.STOP_PATH, self.stop)
        for path, kind in EVENT_OF_PATH.items():
            app.router.add_post(path, self._route_of(kind))
        machine_api.add_machine_routes(app, self.requests)
        OpenApi({**EVENT_OF_PATH, contract.STOP_PATH: StopRequest}).add_to(app)
        for part in (self._joined, self._output, self._logs, self._live, PageRoutes()):
            if part is not None:
                part.add_to(app)

    # ---- events into the mailbox ---------------------------------------------------------

    async def post_event(self, request: web.Request) -> web.Response:
        """Take in an event of an agent or a worker."""
        event, caller = await read_json(request, _decode_event), caller_of(request)
        if not may_report(caller, event):
            owner = f"the token of {caller.role.value} {caller.subject}"
            raise forbidden(f"{owner} may not report {type(event).__name__} of another")
        return await self._accept(event)

    def take_event(
        self, caller: Caller, _path: str, body: bytes, answer: Callable[[int, bytes], None]
    ) -> Callable[[], object] | None:
        """Take in a raw event; None leaves the request to `post_event`, which refuses it."""
        try:
            event = _decode_event(body)
        except UNREADABLE:
            return None
        if not may_report(caller, event):
            return None
        self._loop = asyncio.get_running_loop()
        if not self._driver.deliver(event, partial(answer, 202, _ACCEPTED)):
            return None
        return lambda: None  # the event stays, whether its sender reads the answer or not

    def acknowledge(self, acts: list[Callable[[], None]]) -> None:
        """Answer the senders of events; any thread may call this."""
        if self._loop is not None:
            machine_api.call_on(self._loop, _call_all, acts)

    def _route_of(self, kind: type[JobEvent]) -> Handler:
        """Return the handler of a user's request, which becomes an event of this kind."""

        async def handler(request: web.Request) -> web.Response:
            def decode(body: bytes) -> JobEvent:
                fields = msgspec.json.decode(body or b"{}", type=dict[str, Any])
                return msgspec.convert({**fields, **request.match_info}, kind)

            event = await read_json(request, decode)
            await self._check(event)
            return await self._accept(event)

        return handler

    async def _check(self, event: JobEvent) -> None:
        """Raise Problem for a request that does not fit the job."""
        match event:
            case ev.ScaleRequested(num_proc=wished):
                _check_sizes(self._driver.size_bounds, wished)
            case ev.PlanApplied(number=number):
                _check_sizes(self._driver.size_bounds, event.workers, event.min, event.max)
                newest = msgspec.json.decode(await self._status())["plan"]
                if number <= newest:
                    problem = f"plan {number} is stale: plan {newest} was carried out"
                    raise Problem(409, "stale_plan", problem, "read the job's status, then plan")
            case ev.DrainRequested(host=host):
                await self._state_of(host)
            case ev.DrainCancelled(host=host):
                state = await self._state_of(host)
                if state not in ("draining", "drained"):
                    problem = f"host {host} is not drained, it is {state}"
                    raise Problem(409, "not_drained", problem, "GET /v1/status shows the hosts")

    async def _state_of(self, host: str) -> Any:
        """Return the state of a host; raises Problem for an unknown one."""
        seen = msgspec.json.decode(await self._status())["hosts"]
        states = {each["host"]: each["state"] for each in seen if each["state"] != "removed"}
        if host not in states:
            known = ", ".join(list(states)[:8]) or "none"
            problem = f"the job knows no host {host[:80]!r}"
            raise Problem(404, "unknown_host", problem, f"it knows {known}")
        return states[host]

    async def stop(self, request: web.Request) -> web.Response:
        """End the job; the body may be empty."""
        reason = (await read_json(request, lambda body: _decode_stop(body or b"{}"))).reason
        self._driver.request_stop(f"told to stop: {reason}", int(ExitCode.TERMINATED))
        return web.Response(body=_ACCEPTED, status=202, content_type=JSON)

    async def _accept(self, event: Request) -> web.Response:
        self._loop = asyncio.get_running_loop()
        taken = asyncio.Event()
        if not self._driver.deliver(event, taken.set):
            problem = "the job is over or has too much to do"
            raise Problem(503, "not_accepting", problem, "try again later")
        try:
            await asyncio.wait_for(taken.wait(), TAKE_S)
        except asyncio.TimeoutError:
            problem = f"the driver has not taken this event within {TAKE_S:g} s"
            raise Problem(503, "busy", problem, "try again later") from None
        return web.Response(body=_ACCEPTED, status=202, content_type=JSON)

    # ---- status, metrics and log ---------------------------------------------------------

    async def get_status(self, _request: web.Request) -> web.Response:
        """Answer with the status document."""
        return web.Response(body=await self._status(), content_type=JSON)

    async def get_history(self, request: web.Request) -> web.Response:
        """Answer with step, speed and world size of the last hour."""
        text = request.query.get("since") or "0"
        try:
            since = msgspec.convert({"since": text}, HistorySince, strict=False).since
        except msgspec.ValidationError:
            problem = f"since={text[:40]!r} is not a time in unix seconds"
            raise Problem(422, "invalid", problem, "since=0") from None
        body = msgspec.json.encode(self._driver.history(since))
        return web.Response(body=body, content_type=JSON)

    async def get_metrics(self, _request: web.Request) -> web.Response:
        """Answer with the metrics, in Prometheus' text format."""
        status = await self._status()
        if self._scraped[0] is not status:  # others may have got the same
            self._scraped = status, metrics.exposition(status, self._figures(), self._times)
        body = self._scraped[1]
        return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})

    def metric_families(self, status: bytes) -> Iterator[Metric]:
        """Return the metrics of a status document; any thread may call this."""
        return metrics.families(status, self._figures(), self._times)

    def _figures(self) -> metrics.ServerFigures:
        assert self._app is not None  # noqa: S101 - the routes are mounted before they are asked
        app = self._app
        counts = app[HITS].snapshot(), app[REFUSALS].snapshot()
        return metrics.ServerFigures(*counts, app[REQUEST_TIMES].snapshot())

    async def _status(self) -> bytes:
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
    def _one_stream(self, hint: str) -> Iterator[None]:
        """Count one more reader while the context is open; raises Problem if there are too many."""
        if self._streams >= MAX_STREAMS:
            raise Problem(503, "too_many_streams", f"{MAX_STREAMS} readers follow already", hint)
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    async def _stream(self, request: web.Request, since: int) -> web.StreamResponse:
        """Send past and new events as server-sent events until the job is over."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        with self._one_stream("ask without -f"):
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


def may_report(caller: Caller, event: ev.WireEvent | TaskEnded) -> bool:
    """Return whether a caller may report this: an agent about its host, a worker about itself."""
    if caller.role is Role.DRIVER:
        return True
    if isinstance(event, ev.AgentEvent):
        return caller == (Role.AGENT, event.host)
    if caller.role is Role.AGENT:
        return contract.host_of_worker(event.worker) == caller.subject
    return caller == (Role.WORKER, event.worker) and not isinstance(event, _OF_AGENTS)


def _check_sizes(bounds: tuple[int, int | None], *sizes: int | None) -> None:
    """Raise Problem if one of these numbers of workers is outside the job's bounds."""
    least, most = bounds
    for size in sizes:
        if size is None:
            continue
        if size < least:
            problem = f"{size} workers are fewer than the job's minimum of {least}"
            hint = f"ask for at least {least}, or start the job with a lower --min-np"
            raise Problem(422, "below_min", problem, hint)
        if most is not None and size > most:
            problem = f"{size} workers are more than the job's maximum of {most}"
            hint = f"ask for at most {most}, or start the job with a higher --max-np"
            raise Problem(422, "above_max", problem, hint)


def _call_all(acts: list[Callable[[], None]]) -> None:
    for act in acts:
        act()


def _since(request: web.Request) -> int:
    """Return the number after which to begin: `since`, or the header by which browsers resume."""
    text = request.query.get("since") or request.headers.get("Last-Event-ID") or "0"
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise Problem(422, "invalid", f"since={text[:40]!r} is not an event's number", "since=0")
    return int(text)
