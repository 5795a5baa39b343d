"""What stands around the handlers of aiohttp: who is let in, and how much one may take.

Every request that the fast path does not answer passes these middlewares, in this order:

1. `around` knows when a request is being answered, and for how long.
2. `guard` checks the token or the session and its rights, keeps its owner (`routes.caller_of`) and
   gives errors one shape. An exception that is none of ours becomes a 500 that only tells the
   client where to look.
3. `within` lets requests begin one after the other, with their bodies, within the limits of memory
   and time.
4. `once` answers repeated POSTs.

aiohttp's protocol sits behind `GeneralConnection`, which keeps the record of its client up to date.
Everything runs on the server's loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import cast
from weakref import WeakKeyDictionary

from aiohttp import web, web_response
from aiohttp.typedefs import Handler, Middleware

from rendezvous import wire
from rendezvous.access import Access
from rendezvous.answers import PostAnswer, PostsOnce
from rendezvous.auth import AUTHORIZATION, Caller, Tokens
from rendezvous.connections import Client, Connections
from rendezvous.errors import RefusedError, StoppedError
from rendezvous.fairness import Queue, Turns, is_person
from rendezvous.routes import (
    CALLER,
    CLIENT,
    FORBIDDEN,
    PEER,
    REFUSALS,
    REQUEST_TIMES,
    SESSION,
    Problem,
    busy,
    caller_of,
    error_answer,
    forbidden,
    session_of,
)
from rendezvous.sessions import OF_CONNECTION, Refusals, Session, Sessions
from rendezvous.wire import MAX_BODY_BYTES

# Neither version nor library, in any answer: also in one to a request that is none.
setattr(web_response, "SERVER_SOFTWARE", "elastic-driver")  # noqa: B010 - it is not exported
log = logging.getLogger(__name__)
_REFUSED = {"sealed": 410, "too_large": 413, "not_a_number": 409, "store_full": 503}
_REFUSED |= {"busy": 429, "share_full": 429}
# Status → code for programs, and a hint.
_OF_AIOHTTP = {
    404: ("not_found", "check the path; the routes are listed in docs/protocol.md"),
    405: ("method_not_allowed", "use one of the methods in the Allow header"),
    413: ("too_large", "send less at once"),
}


def guard(tokens: Tokens, access: Access, refusals: Refusals, sessions: Sessions) -> Middleware:
    """Return the middleware that lets in who may use a route, and shapes all errors.

    A request without a token may have a session: a cookie and a header. The request ends with it.
    """
    refuse = _Refuser(refusals).refuse

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        header = request.headers.get(AUTHORIZATION)
        if request.path in access.open:
            answer = await shape_errors(request, handler)
            wrong = request.path == access.login_path and answer.status == 401
            return await refuse(request, answer=answer) if wrong else answer
        session = None
        if header is None:
            session = session_of(request, sessions)
            caller = None if session is None else session.caller
        else:
            caller = request[CLIENT].identify(tokens, header)
        if caller is None:
            return await refuse(request, header=header)
        if problem := _right_lacking(request, caller, access):
            refusals.forbidden(caller, problem.message)
            return error_answer(problem)
        request[CALLER] = caller
        if session is None:
            return await shape_errors(request, handler)
        request[SESSION] = session
        with _ends_with(session, request.transport):
            return await shape_errors(request, handler)

    return guarded


@contextmanager
def _ends_with(session: Session, transport: asyncio.Transport | None) -> Iterator[None]:
    """Break off what is answered meanwhile, such as a stream, when its session ends."""
    if transport is None:  # the client has gone
        yield
        return
    cut = transport.abort
    timer = asyncio.get_running_loop().call_at(session.until, cut)
    session.cuts.add(cut)
    try:
        yield
    finally:
        session.cuts.discard(cut)
        timer.cancel()


async def dress(_request: web.Request, response: web.StreamResponse) -> None:
    """Give any answer the headers that each has: what one caller sees is kept nowhere for another.

    Pages of other servers neither load an answer, nor take it for something that it is not.
    """
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Cross-Origin-Resource-Policy"] = "same-origin"


class _Refuser:
    """Answers requests without a good token, later and later."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._failures: WeakKeyDictionary[asyncio.BaseTransport, int] = WeakKeyDictionary()

    async def refuse(
        self,
        request: web.Request,
        *,
        header: str | None = None,
        answer: web.StreamResponse | None = None,
    ) -> web.StreamResponse:
        """Return the answer to a request after a pause; `answer`: that of a login."""
        address, transport = request[PEER] or "a client that is gone", request.transport
        pause = self._refusals.unauthorized(address, asyncio.get_running_loop().time())
        if pause is None and transport is not None:
            transport.abort()
        elif pause:
            try:
                await asyncio.sleep(pause)
            finally:
                self._refusals.answered(address)
        if answer is None:
            found = "an unknown token" if header else "no token"
            hint = "send Authorization: Bearer <token>, with the token from the job's token file"
            problem = Problem(401, "unauthorized", f"the request carries {found}", hint)
            answer = error_answer(problem, {"WWW-Authenticate": "Bearer"})
        if transport is not None:
            self._failures[transport] = self._failures.get(transport, 0) + 1
            if self._failures[transport] >= OF_CONNECTION:
                answer.force_close()
        return answer


def _right_lacking(request: web.Request, caller: Caller, access: Access) -> Problem | None:
    """Return the problem of a request that its caller may not make; None: it may."""
    resource = request.match_info.route.resource
    if resource is not None and not access.may_call(caller, request.method, resource.canonical):
        what = f"{request.method} {resource.canonical}"
        return forbidden(f"a token of role {caller.role.value} may not {what}")
    return None


async def shape_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Return the handler's answer, or the answer for the exception it raised."""
    try:
        return await handler(request)
    except Problem as problem:
        if problem.code == FORBIDDEN:
            request.app[REFUSALS].forbidden(caller_of(request), problem.message)
        return error_answer(problem)
    except RefusedError as error:
        return error_answer(Problem(_REFUSED.get(error.code, 409), error.code, str(error)))
    except web.HTTPException as error:
        code, hint = _OF_AIOHTTP.get(error.status, ("http_error", ""))
        message = f"{request.method} {request.path}: {error.reason}"
        allow = error.headers.get("Allow")
        headers = {"Allow": allow} if allow else None
        return error_answer(Problem(error.status, code, message, hint), headers)
    except ConnectionResetError:  # nobody reads this answer
        return error_answer(Problem(400, "incomplete", "the client left before its request ended"))
    except StoppedError as error:
        return error_answer(Problem(503, "stopping", str(error), "try again in a moment"))
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        bug = Problem(500, "internal", "this request met a bug of ours", "see the driver's log")
        return error_answer(bug)


def once(posts_once: PostsOnce) -> Middleware:
    """Return the middleware that answers repeated POSTs; it belongs behind `guard`."""
    calls: set[asyncio.Task[None]] = set()

    async def call(key: str, request: web.Request, handler: Handler) -> None:
        answer = None
        try:
            response = await shape_errors(request, handler)
            body = response.body if isinstance(response, web.Response) else b""
            content = body if isinstance(body, bytes) else b""
            answer = PostAnswer(response.status, content, response.headers)
        finally:
            posts_once.end(key, caller_of(request), answer)

    @web.middleware
    async def answered_once(request: web.Request, handler: Handler) -> web.StreamResponse:
        caller = request.get(CALLER)
        request_id = request.headers.get(wire.REQUEST_ID_HEADER)
        key = posts_once.key_of(caller, request.path, request_id)
        if request.method != "POST" or caller is None or not key:
            return await handler(request)
        await request.read()  # now, as the connection may end before the handler reads
        if not posts_once.knows(key):
            if not posts_once.begin(key, caller):
                raise busy(
                    "this client has its share of the requests that are being answered, or there "
                    "are too many"
                )
            task = asyncio.create_task(call(key, request, handler))
            calls.add(task)
            task.add_done_callback(calls.discard)
        answer = await posts_once.answer_to(key)
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    return answered_once


# ---- bounds ------------------------------------------------------------------------------

LARGE_ANSWER = 64 * 1024  # bytes; smaller ones fit into the buffer of each connection
_OPEN_BODY_BYTES = 16 * 1024  # of a request without a token


class GeneralConnection(asyncio.Protocol):
    """A connection that aiohttp's protocol serves."""

    def __init__(self, connections: Connections, client: Client, general: asyncio.Protocol) -> None:
        self.client = client
        self._connections, self._general = connections, general
        self._ahead = False  # bytes have come while a request was being answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve a client."""
        self._general.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        """End what the client waits for."""
        self._connections.closed(self.client)
        self._general.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on."""
        client = self.client
        client.moved = self._connections.loop.time()
        if client.busy:
            self._ahead = True
        elif not client.begun:
            client.begun, client.has_head = client.moved, False
        self._general.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass on that the client sends nothing more."""
        return self._general.eof_received()

    def pause_writing(self) -> None:
        """Stop: the client has not taken all that was written."""
        self.client.stuck = True
        self._general.pause_writing()

    def resume_writing(self) -> None:
        """Go on: the client has taken most of it."""
        self.client.stuck = False
        self.client.moved = self._connections.loop.time()
        self._general.resume_writing()

    def begin(self) -> None:
        """Record that the head of a request has arrived, and its handler begins."""
        self.client.busy, self._ahead = True, False
        self.client.begun = 0.0

    def end(self) -> None:
        """Record that a request has its answer; perhaps a part of the next one has arrived."""
        now = self._connections.loop.time()
        self.client.busy, self.client.moved = False, now
        self.client.begun, self.client.has_head = now if self._ahead else 0.0, False

    def has_body(self) -> None:
        """Record that the whole request has arrived."""
        self._ahead = False


def _connection_of(request: web.Request) -> GeneralConnection | None:
    """Return the connection of a request; None if it has ended."""
    if request.transport is None:
        return None
    return cast("GeneralConnection", request.transport.get_protocol())


@web.middleware
async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Record when a request begins and ends, and its time; the outermost middleware."""
    connection = _connection_of(request)
    if connection is None:
        return web.Response(status=400)  # the client has gone
    request[CLIENT], request[PEER] = connection.client, connection.client.peer
    connection.begin()
    began = monotonic()
    try:
        response = await handler(request)
    finally:
        connection.end()
    _record_time(request, response, monotonic() - began)
    return response


def _record_time(request: web.Request, response: web.StreamResponse, seconds: float) -> None:
    """Record the time of a request with a good token; a stream of events has none."""
    if CALLER not in request or not isinstance(response, web.Response):
        return
    resource, waited = request.match_info.route.resource, "wait" in request.query
    if resource is not None or waited:
        path = "" if resource is None else resource.canonical
        request.app[REQUEST_TIMES].record(path, seconds, waited=waited)


def within(connections: Connections, turns: Turns) -> Middleware:
    """Return the middleware that keeps requests within the limits; it belongs behind `guard`."""

    @web.middleware
    async def bounded(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = _connection_of(request)
        if connection is None:
            return web.Response(status=400)  # the client has gone
        size = _size_of_body(request)
        if CALLER in request:
            _prove(request, connections, connection.client)
        elif size > _OPEN_BODY_BYTES:
            raise Problem(413, "too_large", "a request without a token is short", "send less")
        if request.headers.get("Content-Encoding", "identity") != "identity":
            problem = "the body is compressed, and this server unpacks none"
            raise Problem(415, "compressed", problem, "send it without Content-Encoding")
        client = connection.client
        await turns.wait(_queue_of(request), client.caller or client.peer)
        try:
            if size:
                await _read_body(request, connections, connection.client, size)
            connection.has_body()
            response = await handler(request)
        finally:
            connections.hold(connection.client, 0)
        body = response.body if isinstance(response, web.Response) else None
        if isinstance(body, bytes) and len(body) > LARGE_ANSWER:
            caller = connection.client.caller
            if not connections.begin_leaving(body, caller):
                raise busy("clients have not taken the answers to other requests yet")
            try:
                await response.prepare(request)
                await response.write_eof()
            finally:
                connections.end_leaving(body, caller)
        return response

    return bounded


def _queue_of(request: web.Request) -> Queue:
    """Return where a request waits for its turn: however many others send, people come next."""
    if CALLER not in request:
        return Queue.STRANGERS
    return Queue.PEOPLE if is_person(request[CALLER]) else Queue.GENERAL


def _size_of_body(request: web.Request) -> int:
    """Return how many bytes of a request's body may come."""
    if not request.can_read_body:
        return 0
    length = request.content_length
    return MAX_BODY_BYTES if length is None else min(length, MAX_BODY_BYTES)


def _prove(request: web.Request, connections: Connections, client: Client) -> None:
    caller = request[CALLER]
    if not connections.prove(client, caller):
        most = connections.limits.of_one_caller
        problem = f"{caller.role.value} {caller.subject} has {most} connections already"
        hint = "close some, or use one of them again"
        raise Problem(429, "too_many_connections", problem, hint)


async def _read_body(
    request: web.Request, connections: Connections, client: Client, size: int
) -> None:
    """Read the body now, within its time; handlers find it read."""
    if not connections.hold(client, size):
        raise busy("too many large requests are arriving")
    try:
        await asyncio.wait_for(request.read(), connections.limits.body_s)
    except asyncio.TimeoutError:
        connections.hits.count("request_time")
        within_s = connections.limits.body_s
        problem = f"the body did not arrive within {within_s:g} s"
        raise Problem(408, "timed_out", problem, "send it again, faster or in parts") from None
