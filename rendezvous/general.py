"""Bounds for the requests that aiohttp answers: memory, time, and turns of the loop.

aiohttp's protocol sits behind `GeneralConnection`, which keeps the record of its client up to date.
Two middlewares do the rest: `around` knows when a request is being answered, and `within` lets
requests begin one after the other, with their bodies. Everything runs on the server's loop.
"""

import asyncio
from time import monotonic
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rendezvous.connections import Client, Connections
from rendezvous.fairness import Queue, Turns, is_person
from rendezvous.web import CALLER, CLIENT, PEER, REQUEST_TIMES, Problem, busy
from rendezvous.wire import MAX_BODY_BYTES

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
