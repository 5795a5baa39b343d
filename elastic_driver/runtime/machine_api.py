"""What HTTP routes use of the driver: its mailbox, and the answers of its machines.

Handlers run on the server's loop. For a request that a machine answers, such as those for data
shards, they decode it, post it as an event with a ticket, and wait for the machine's `Reply`
(`OpenRequests`). `machine_route` makes the row of such a request; the rows are in the chapters
`routes` of the features.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from typing import Any, Protocol, TypeAlias

import msgspec
from aiohttp import web
from msgspec import Struct

from elastic_driver import token_roles
from elastic_driver.features import chapters
from elastic_driver.kernel.machine import ForMachine, Reply
from elastic_driver.kernel.services import Rejection, RequestDropped
from elastic_driver.token_roles import RoundMembers
from elastic_driver.words.progress import History
from elastic_driver.words.wire_events import Event, StateDescribed
from rendezvous.access import Roles
from rendezvous.auth import Caller
from rendezvous.routes import (
    JSON,
    Problem,
    Route,
    caller_of,
    collect,
    first_line,
    forbidden,
    mount,
    read_json,
)


class OfWorker(ForMachine, Protocol):
    """An event of a feature that a worker sends (`machines.REPORTED`)."""

    @property
    def worker(self) -> str:
        """The worker that sends it."""


# An event that a client sends.
Request: TypeAlias = Event | StateDescribed | OfWorker


class DriverPort(Protocol):
    """The driver as routes see it; every method may be called by any thread."""

    @property
    def size_bounds(self) -> tuple[int, int | None]:
        """The fewest and (None: no limit) the most workers the job may have."""

    def post(self, event: ForMachine) -> bool:
        """Put an event into the mailbox; False when it is full or the job is over."""

    def deliver(self, event: Request, acknowledge: Callable[[], None]) -> bool:
        """Do the same, and have `acknowledge` handed to `EventRoutes.acknowledge`.

        That is done once the journal has the event, so that no driver forgets it any more.
        """

    def request_stop(self, reason: str, exit_code: int) -> None:
        """Ask for the job's end; a second call ends it at once."""

    def ask_status(self, reply: Callable[[bytes], None]) -> None:
        """Have `reply` called soon with the status document, in another thread."""

    def history(self, since: float) -> History:
        """Return how the job has trained since then (unix seconds), in the last hour."""


_encode = msgspec.json.Encoder().encode


class Asked(ForMachine, Protocol):
    """An event with a request."""

    @property
    def ticket(self) -> int:
        """What the machine's `Reply` to it is known by."""


# Returns the event for a ticket, a request, its caller, and the names in its path.
MakeEvent = Callable[[int, Any, Caller, Mapping[str, str]], Asked]
# Returns why a caller may not ask this; None: it may.
Refuse = Callable[[RoundMembers, Caller, Any], str | None]
# An encoded answer; None: one without content.
Answer = bytes | Problem | None


class OpenRequests:
    """Requests that wait for a machine's answer, by their ticket.

    `post` puts an event into the driver's mailbox; it returns False if the driver does not take it.
    `rounds` knows the members of the job's world.
    """

    def __init__(self, post: Callable[[ForMachine], bool], rounds: RoundMembers) -> None:
        self._post, self._rounds = post, rounds
        self._tickets = count(1)
        self._open: dict[int, Callable[[Answer], None]] = {}
        self._status: dict[str, int] = {}  # of HTTP, by the code of a rejection
        for chapter in chapters("routes"):
            self._status |= getattr(chapter, "STATUS", {})
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(
        self, make: Callable[[int], Asked], done: Callable[[Answer], None]
    ) -> Callable[[], None] | None:
        """Post a request; call `done` with its answer.

        Returns a function to call when the client goes away; None if the driver is too busy.
        """
        self._loop = asyncio.get_running_loop()
        event = make(next(self._tickets))
        self._open[event.ticket] = done
        if self._post(event):
            return partial(self._drop, event)
        del self._open[event.ticket]
        return None

    def _drop(self, event: Asked) -> None:
        if self._open.pop(event.ticket, None) is not None:
            self._post(RequestDropped(event.machine, event.ticket))

    async def ask(self, make: Callable[[int], Asked]) -> bytes | None:
        """Return the encoded answer, None for one without content; raises Problem."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        drop = self.begin(make, lambda body: None if future.done() else future.set_result(body))
        if drop is None:
            raise Problem(503, "not_accepting", "the driver has too much to do", "ask again")
        try:
            answer = await future
        finally:
            drop()
        if isinstance(answer, Problem):
            raise answer
        return answer

    @property
    def rounds(self) -> RoundMembers:
        """Who is in which round."""
        return self._rounds

    def answer(self, replies: Iterable[Reply]) -> None:
        """Answer waiting requests; called in the driver's thread."""
        encoded: dict[int, bytes] = {}  # an answer that many wait for is encoded once
        answers: list[tuple[int, Answer]] = []
        for reply in replies:
            document = reply.document
            if isinstance(document, Rejection):
                status = self._status.get(document.code, 409)
                problem = Problem(status, document.code, document.message, document.hint)
                answers.append((reply.ticket, problem))
                continue
            if document is not None and id(document) not in encoded:
                encoded[id(document)] = _encode(document)
            answers.append((reply.ticket, encoded.get(id(document))))
        if answers and self._loop is not None:
            call_on(self._loop, self._deliver, answers)

    def _deliver(self, answers: list[tuple[int, Answer]]) -> None:
        for ticket, answer in answers:
            done = self._open.pop(ticket, None)
            if done is not None:
                done(answer)

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        mount(app, rows(), self)
        app.on_shutdown.append(self.close)

    async def close(self, _app: web.Application) -> None:
        """Refuse the waiting requests: the server stops."""
        waiting, self._open = self._open, {}
        for done in waiting.values():
            done(Problem(503, "stopping", "the driver is stopping", "ask its successor"))


def rows() -> tuple[Route, ...]:
    """Return the rows of all requests that machines answer."""
    return collect(each for each in chapters("routes") if not hasattr(each, "parts"))


def machine_route(
    method: str,
    path: str,
    roles: Roles,
    kind: type[Struct],
    answer: Any,
    *,
    make: MakeEvent,
    refuse: Refuse = lambda _rounds, _caller, _asked: None,
    short: Callable[..., Callable[[], object] | None] | None = None,
    note: str = "",
) -> Route:
    """Return the row of a request that a machine answers.

    Args:
        kind: the type of the request: of the body, or of a GET's query.
        answer: that of the machine's answer; None: it has no content.
        refuse: says why a caller may not ask something although its role may use the route.
    """
    decode_body = msgspec.json.Decoder(kind).decode
    is_get = method == "GET"

    def decode(request: web.Request, body: bytes) -> Any:
        return msgspec.convert(dict(request.query), kind) if is_get else decode_body(body)

    async def handler(requests: OpenRequests, request: web.Request) -> web.Response:
        asked = await read_json(request, partial(decode, request))
        caller = caller_of(request)
        if (reason := refuse(requests.rounds, caller, asked)) is not None:
            raise forbidden(reason)
        names = request.match_info
        found = await requests.ask(lambda ticket: make(ticket, asked, caller, names))
        status = 204 if found is None else 200
        return web.Response(body=found, status=status, content_type=JSON)

    return Route(
        method,
        path,
        roles,
        handler,
        answer,
        body=None if is_get else kind,
        query=kind if is_get else None,
        sentence=first_line(kind),
        short=short,
        note=note,
    )


def slot_of(caller: Caller) -> str:
    """Return the slot of a worker, whose share its successors have too; "" for any other caller."""
    return caller.subject.rpartition(".")[0] if caller.role is token_roles.WORKER else ""


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    """Call a function in the loop's thread; do nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
