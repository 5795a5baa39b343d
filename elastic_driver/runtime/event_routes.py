"""The routes that put an event into the driver's mailbox: of agents, of workers and of users.

Handlers run on the server's loop: they decode a request, check it and post an event. It is answered
once the journal has the event.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial, reduce
from operator import or_
from typing import Any, TypeAlias

import msgspec
from aiohttp import web
from msgspec import Struct

from elastic_driver import contract, token_roles
from elastic_driver.errors import ExitCode
from elastic_driver.runtime import machine_api
from elastic_driver.runtime.machine_api import DriverPort, OfWorker, Request
from elastic_driver.runtime.machines import REPORTED
from elastic_driver.token_roles import JOBS, MEMBERS, OPERATORS
from elastic_driver.words import counted
from elastic_driver.words import wire_events as ev
from rendezvous.auth import Caller, Role
from rendezvous.fairness import Shares
from rendezvous.routes import (
    ACCEPTED,
    Accepted,
    Problem,
    Route,
    accepted,
    caller_of,
    first_line,
    forbidden,
    mount,
    read_json,
)
from rendezvous.wire import UNREADABLE

MOST_MAIL = 65_536  # events that wait for the driver's thread, fewer than its mailbox takes
TAKE_S = 5.0  # for an event to be taken from the mailbox and written into the journal


class StopRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/stop`."""

    reason: ev.Reason = ev.ASKED


# What agents and workers send: for the job, and for other machines.
Reported: TypeAlias = ev.WireEvent | ev.StateDescribed | OfWorker
_REPORTED: Any = reduce(or_, REPORTED, ev.WireEvent)  # the types, with those of features
_decode_event: Callable[[bytes], Reported]
KINDS: Any = _REPORTED | ev.StateDescribed
_decode_event = msgspec.json.Decoder(KINDS).decode
_decode_stop = msgspec.json.Decoder(StopRequest).decode
# Events about a worker that only its agent sees.
_OF_AGENTS = ev.WorkerStarted | ev.WorkerExited


class EventRoutes:
    """Handlers of the routes whose requests become events.

    `status` returns the document of `/v1/status`, which some requests have to fit.
    """

    def __init__(self, driver: DriverPort, status: Callable[[], Awaitable[bytes]]) -> None:
        self._driver, self._status = driver, status
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mail = Shares(MOST_MAIL)

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        mount(app, ROUTES, self)

    async def post_event(self, request: web.Request) -> web.Response:
        """Take in an event of an agent or a worker."""
        event, caller = await read_json(request, _decode_event), caller_of(request)
        if not may_report(caller, event):
            owner = f"the token of {caller.role.value} {caller.subject}"
            raise forbidden(f"{owner} may not report {type(event).__name__} of another")
        return await self._accept(caller, event)

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
        if not self._deliver(caller, event, partial(answer, 202, ACCEPTED)):
            return None
        return lambda: None  # the event stays, whether its sender reads the answer or not

    def _deliver(self, caller: Caller, event: Request, taken: Callable[[], None]) -> bool:
        """Put an event into the mailbox; call `taken` once the journal has it.

        Returns False if the mailbox is full, or this client's share of it.
        """
        if not self._mail.take(caller):
            return False

        def acknowledge() -> None:
            self._mail.give_back(caller)
            taken()

        if self._driver.deliver(event, acknowledge):
            return True
        self._mail.give_back(caller)
        return False

    def acknowledge(self, acts: list[Callable[[], None]]) -> None:
        """Answer the senders of events; any thread may call this."""
        if self._loop is not None:
            machine_api.call_on(self._loop, _call_all, acts)

    async def take_request(self, request: web.Request, kind: type[ev.Event]) -> web.Response:
        """Take in a user's request: an event of this kind."""

        def decode(body: bytes) -> ev.Event:
            fields = msgspec.json.decode(body or b"{}", type=dict[str, Any])
            return msgspec.convert({**fields, **request.match_info}, kind)

        event = await read_json(request, decode)
        await self._check(event)
        return await self._accept(caller_of(request), event)

    async def _check(self, event: ev.Event) -> None:
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
                if state not in ("draining", "drained", "refused"):
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
        return accepted()

    async def _accept(self, caller: Caller, event: Request) -> web.Response:
        self._loop = asyncio.get_running_loop()
        taken = asyncio.Event()
        if not self._deliver(caller, event, taken.set):
            problem = "the job is over or has too much to do"
            raise Problem(503, "not_accepting", problem, "try again later")
        try:
            await asyncio.wait_for(taken.wait(), TAKE_S)
        except asyncio.TimeoutError:
            problem = f"the driver has not taken this event within {TAKE_S:g} s"
            raise Problem(503, "busy", problem, "try again later") from None
        return accepted()


def may_report(caller: Caller, event: Reported) -> bool:
    """Return whether a caller may report this: an agent about its host, a worker about itself."""
    if caller.role is Role.DRIVER:
        return True
    if isinstance(event, ev.AgentEvent):
        told = event.workers if isinstance(event, ev.AgentReturned) else ()
        own = all(contract.host_of_worker(each.worker) == event.host for each in told)
        return caller == (token_roles.AGENT, event.host) and own
    if caller.role is token_roles.AGENT:
        return contract.host_of_worker(event.worker) == caller.subject
    return caller == (token_roles.WORKER, event.worker) and not isinstance(event, _OF_AGENTS)


def _check_sizes(bounds: tuple[int, int | None], *sizes: int | None) -> None:
    """Raise Problem if one of these numbers of workers is outside the job's bounds."""
    least, most = bounds
    for size in sizes:
        if size is None:
            continue
        workers = counted(size, "worker is", "workers are")
        if size < least:
            problem = f"{workers} fewer than the job's minimum of {least}"
            hint = f"ask for at least {least}, or start the job with a lower --min-np"
            raise Problem(422, "below_min", problem, hint)
        if most is not None and size > most:
            problem = f"{workers} more than the job's maximum of {most}"
            hint = f"ask for at most {most}, or start the job with a higher --max-np"
            raise Problem(422, "above_max", problem, hint)


def _call_all(acts: list[Callable[[], None]]) -> None:
    for act in acts:
        act()


# ---- rows --------------------------------------------------------------------------------


def _body_of(kind: type[Struct], path: str) -> type[Struct]:
    """Return the type of the body of a request: its fields that are not in the path."""
    names = re.findall(r"{(\w+)}", path)
    fields: list[tuple[str, Any, Any]] = [
        (field.name, field.type, msgspec.NODEFAULT if field.required else field.default)
        for field in msgspec.structs.fields(kind)
        if field.name not in names
    ]
    body = msgspec.defstruct(
        f"{kind.__name__}Body", fields, frozen=True, forbid_unknown_fields=True
    )
    body.__doc__ = kind.__doc__
    return body


def _of_user(path: str, kind: type[ev.Event], *errors: str, note: str = "") -> Route:
    """Return the row of a user's request that becomes an event of this kind.

    The event's fields are those of the JSON body and the names in the path; the body may be empty
    if every other field has a default.
    """

    async def handler(part: EventRoutes, request: web.Request) -> web.Response:
        return await part.take_request(request, kind)

    return Route(
        "POST",
        path,
        OPERATORS,
        handler,
        Accepted,
        _body_of(kind, path),
        optional=True,
        errors=errors,
        sentence=first_line(kind),
        note=note,
    )


_SIZES = ("422 below_min", "422 above_max")
ROUTES = (
    Route(
        # On the server of a Brain, jobs post events.
        "POST",
        contract.EVENTS_PATH,
        MEMBERS | JOBS,
        EventRoutes.post_event,
        answer=Accepted,
        body=_REPORTED,
        short=EventRoutes.take_event,
        note="the answer comes when the journal has it",
    ),
    _of_user(
        contract.SCALE_PATH, ev.ScaleRequested, *_SIZES, note="`null` leaves it to the job again"
    ),
    _of_user(
        contract.PLAN_PATH,
        ev.PlanApplied,
        *_SIZES,
        "409 stale_plan",
        note="`number` has to be higher than before",
    ),
    _of_user(contract.DRAIN_PATH, ev.DrainRequested, "404 unknown_host"),
    _of_user(contract.UNDRAIN_PATH, ev.DrainCancelled, "404 unknown_host", "409 not_drained"),
    _of_user(
        contract.STACKS_PATH, ev.StacksRequested, note="the answer is the event `stacks_collected`"
    ),
    Route(
        "POST",
        contract.STOP_PATH,
        OPERATORS,
        EventRoutes.stop,
        Accepted,
        body=_body_of(StopRequest, contract.STOP_PATH),
        optional=True,
        note="its exit status is 143, and a second request ends it at once",
    ),
)
