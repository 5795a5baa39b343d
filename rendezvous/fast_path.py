"""The fast path for what workers send all the time, such as batches.

Every connection begins here. A plain POST to one of a few paths is carried out and answered
without aiohttp, which would take several times as long as the store
(docs/adr/0010-a-short-way-for-hot-requests.md). If a request is of another kind or has to be
refused (no token, no right, a body that is not a batch), aiohttp gets the bytes as they came, and
the connection from then on. So only aiohttp's handlers refuse requests.

A client that does not read costs little memory: an answer is written in pieces, each after the one
before has gone, and clients that get the same answer share its bytes. `Connections` closes the
connection of a client that reads nothing, or leaves a request half sent, for too long.

A connection whose last requests were quick is served at once. All others wait for their turn
(`Turns`), and so does an answer that is large.

A plain request has a head (the request line and the headers) that `read_head` reads. All other
heads are aiohttp's. Everything runs on the server's loop.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from time import monotonic, thread_time
from typing import cast

from msgspec import Struct

from rendezvous import wire
from rendezvous.access import Access
from rendezvous.answers import WAITS, PostAnswer, PostsOnce, RequestTimes
from rendezvous.auth import Caller, Tokens
from rendezvous.connections import Client, Connections
from rendezvous.fairness import Queue, Turns, owner_of
from rendezvous.routes import JSON, Answer, Post, Problem, busy, problem_body
from rendezvous.service import Results, StoreService
from rendezvous.web import GeneralConnection

# ---- heads -------------------------------------------------------------------------------

MAX_HEAD_BYTES = 8192  # as in aiohttp
MAX_BODY_BYTES = 256 * 1024  # larger ones are rare, and need not be quick
_NEEDED = ("authorization", "connection", "content-length", "x-request-id")
_IGNORED = ("host", "content-type", "accept", "accept-encoding", "user-agent")
_KNOWN = frozenset((*_NEEDED, *_IGNORED))


class PlainHead(Struct, frozen=True):
    """The parts of a plain POST's head that the fast path needs."""

    path: str
    authorization: str | None
    request_id: str | None
    length: int  # bytes of the body


def may_be_plain(start: bytes, lines: Mapping[bytes, str]) -> bool:
    """Return whether a request that begins like this may have one of these request lines."""
    return any(start.startswith(line) or line.startswith(start) for line in lines)


def read_head(head: bytes, lines: Mapping[bytes, str]) -> PlainHead | None:
    """Return a request's head (given without its final empty line), or None if it is not plain.

    A plain head has one of the request lines in `lines` (their values are paths), or begins with a
    line that ends in "/". It has only headers that our clients send; aiohttp handles all others.
    """
    if not head.isascii() or b"\0" in head:
        return None
    first, *rest = head.decode("ascii").split("\r\n")
    path = lines.get(f"{first}\r\n".encode())
    if path is None:
        folder, slash, name = first.removesuffix(" HTTP/1.1").rpartition("/")
        above = lines.get(f"{folder}{slash}".encode())
        path = above and above + name
    if path is None or not head.count(b"\r") == head.count(b"\n") == len(rest):
        return None
    headers: dict[str, str] = {}
    for line in rest:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or name not in _KNOWN or name in headers:
            return None
        headers[name] = value.strip(" \t")
    length = headers.get("content-length", "")
    if not length.isdigit() or len(length) > 9 or int(length) > MAX_BODY_BYTES:
        return None
    if headers.get("connection", "keep-alive").lower() != "keep-alive":
        return None
    request_id = headers.get("x-request-id") or None
    return PlainHead(path, headers.get("authorization"), request_id, int(length))


# ---- connections -------------------------------------------------------------------------

PIECE_BYTES = 64 * 1024  # the most of an answer in the memory of one connection
QUICK_S = 0.001  # of the processor; a request of a connection that is served at once takes less
SMALL_BODY = 8 * 1024  # bytes; only requests with a smaller body are served at once
FORGETS = 0.9  # with each request, the cost of the ones before counts less
LARGE_RESULTS = 256 * 1024  # bytes that are encoded in a turn of their own
# The most that may arrive while a request is being answered.
_AHEAD_BYTES = MAX_HEAD_BYTES + MAX_BODY_BYTES
_END = b"\r\n\r\n"


class FastPath:
    """The state that all connections share; create it on a running loop.

    `posts` answers other modules' POSTs, by path; a path that ends in "/" stands for all paths
    directly below it. `general()` makes the protocol that handles every other request.
    """

    def __init__(
        self,
        service: StoreService,
        posts_once: PostsOnce,
        posts: Mapping[str, Post],
        tokens: Tokens,
        access: Access,
        *,
        general: Callable[[], asyncio.Protocol],
        clients: Connections,
        turns: Turns,
        times: RequestTimes,
    ) -> None:
        self._service, self.posts_once = service, posts_once
        self.posts: dict[str, Post] = {wire.BATCH_PATH: self._take_batch, **posts}
        self.tokens, self.access, self.general = tokens, access, general
        ends = {True: "", False: " HTTP/1.1\r\n"}
        self.lines = {f"POST {p}{ends[p.endswith('/')]}".encode(): p for p in self.posts}
        self.clients, self.turns = clients, turns
        self.times = times
        for path in self.posts:  # they are shown from the start, and that of waits
            times.of(path)
        times.of_kind(WAITS)
        self.connections: set[FastConnection] = set()

    def close(self) -> None:
        """Close every connection once what is written has gone."""
        for connection in tuple(self.connections):
            connection.transport.close()

    def _take_batch(
        self, caller: Caller, _path: str, body: bytes, answer: Answer
    ) -> Callable[[], object] | None:
        try:
            batch = wire.decode_batch(body)
        except wire.UNREADABLE:
            return None
        if self.access.refused(caller, batch.operations) is not None:
            return None

        def done(results: Results | None) -> None:
            if results is None:
                answer(503, _STOPPING)
            elif wire.is_large(results, LARGE_RESULTS):
                encode = partial(wire.encode_reply, results)
                self.turns.add(Queue.ANSWER, lambda: answer(200, encode()), caller)
            else:
                answer(200, wire.encode_reply(results))

        owner = owner_of(caller)
        write_id = caller.own_id(batch.write_id)
        return self._service.ask(batch.operations, done, write_id, owner=owner)


class FastConnection(asyncio.Protocol):
    """One client's connection; its requests are answered one after the other."""

    transport: asyncio.Transport

    def __init__(self, shared: FastPath, client: Client) -> None:
        self._shared, self._client = shared, client
        self._inbox = b""  # bytes received and not carried out yet
        self._cost = math.inf  # seconds of the processor for its last requests; inf: none yet
        self._planned = False  # it waits for its turn
        self._arrived = 0.0  # when the request came that is being answered
        self._route, self._waits = "", False  # its path among `posts`; it waits for a key
        # To call if the client goes away while a request waits for its answer.
        self._leave: Callable[[], object] | None = None
        self._rest: memoryview | None = None  # the part of the answer that is not written yet
        self._large: bytes | None = None  # the answer that `_rest` is a part of

    # ---- called by asyncio ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve a client."""
        self.transport = cast("asyncio.Transport", transport)
        # Paused until everything has gone. (At high=0 a TLS transport pauses with nothing to send.)
        self.transport.set_write_buffer_limits(high=1, low=0)
        self._shared.connections.add(self)

    def connection_lost(self, _error: Exception | None) -> None:
        """Give up what the client waits for."""
        self._shared.connections.discard(self)
        self._shared.clients.closed(self._client)
        self._forget_answer()
        if self._leave is not None:
            self._leave()

    def data_received(self, data: bytes) -> None:
        """Take bytes, up to a limit while a request is being answered."""
        self._client.moved = self._shared.clients.loop.time()
        self._inbox = self._inbox + data if self._inbox else data
        if not self._busy:
            self._take_soon()
        elif len(self._inbox) > _AHEAD_BYTES:
            self.transport.pause_reading()
        self._record_held()

    def pause_writing(self) -> None:
        """Stop: the client has not taken all that was written."""
        self._client.stuck = True

    def resume_writing(self) -> None:
        """Go on: the client has taken all that was written."""
        self._client.stuck = False
        self._client.moved = self._shared.clients.loop.time()
        self._write_rest()
        self._take_soon()

    # ---- requests ------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        return self._client.busy or self._client.stuck or self._rest is not None

    def _take_soon(self) -> None:
        """Carry out the requests that have arrived: now if they are quick, or in a later turn."""
        if self._planned:
            return
        if self._cost < QUICK_S:
            self._take_requests()
        else:
            self._take_later(Queue.NEW if self._cost == math.inf else Queue.COSTLY)

    def _take_later(self, queue: Queue) -> None:
        if not self._planned:
            self._planned = True
            client = self._client.caller or self._client.peer
            self._shared.turns.add(queue, partial(self._take_turn, queue), client)

    def _take_turn(self, queue: Queue) -> None:
        self._planned = False
        self._take_requests(queue)
        self._record_held()

    def _take_requests(self, queue: Queue | None = None) -> None:
        """Carry out the requests that have arrived, until one is incomplete or has to wait.

        `queue`: it is the turn of this one.
        """
        lines, tokens, client = self._shared.lines, self._shared.tokens, self._client
        first = thread_time()
        began = first
        while self._inbox and not self._busy and not self.transport.is_closing():
            end = self._inbox.find(_END)
            if end < 0 and len(self._inbox) <= MAX_HEAD_BYTES and may_be_plain(self._inbox, lines):
                self._record_half(has_head=False)
                break
            head = read_head(self._inbox[:end], lines) if 0 <= end <= MAX_HEAD_BYTES else None
            caller = None if head is None else client.identify(tokens, head.authorization)
            if head is None or caller is None:
                self._give_to_general()
                return
            start = end + len(_END)
            arrived, body = self._inbox, self._inbox[start : start + head.length]
            if len(body) < head.length:
                if not self._shared.clients.prove(self._client, caller):
                    self._give_to_general()
                    return
                self._record_half(has_head=True)
                break
            if head.length > SMALL_BODY and queue is not Queue.COSTLY:
                self._take_later(Queue.COSTLY)
                return
            self._inbox, client.begun = arrived[start + head.length :], 0.0
            if not self._carry_out(caller, head, body):
                self._inbox = arrived
                self._give_to_general()
                return
            before, began = began, thread_time()
            older = 0.0 if self._cost == math.inf else self._cost * FORGETS
            self._cost = max(began - before, older)
            if self._inbox and began - first >= QUICK_S:
                self._take_later(Queue.COSTLY)
                return
        if not self._busy:
            self.transport.resume_reading()

    def _record_half(self, *, has_head: bool) -> None:
        """Record that a request has arrived in part."""
        self._client.begun = self._client.begun or self._client.moved
        self._client.has_head = has_head

    def _record_held(self) -> None:
        """Record how much has arrived and is not carried out; refuse what is too much."""
        held = len(self._inbox)
        if held == self._client.held or self.transport.is_closing():
            return
        if not self._shared.clients.hold(self._client, held):
            self._inbox = b""
            self._shared.clients.hold(self._client, 0)
            self.transport.write(_HEADS[503] % len(_FULL) + _FULL)
            self.transport.close()

    def _carry_out(self, caller: Caller, head: PlainHead, body: bytes) -> bool:
        """Begin to answer; return False, with nothing done, if aiohttp has to answer."""
        shared, path = self._shared, head.path
        key = shared.posts_once.key_of(caller, path, head.request_id)
        if key and (shared.posts_once.knows(key) or not shared.posts_once.may_begin(caller)):
            return False
        if not shared.access.may_post(caller, path):
            return False
        if not shared.clients.prove(self._client, caller):
            return False
        if path not in shared.posts:
            path = path[: path.rindex("/") + 1]
        self._route, self._waits, self._arrived = path, False, self._client.moved
        self._client.busy = True
        leave = shared.posts[path](caller, head.path, body, partial(self._answer, key, caller))
        if leave is None:
            self._client.busy = False
        elif self._client.busy and key:  # its client may repeat it, so it goes on
            shared.posts_once.begin(key, caller)
        elif self._client.busy:
            self._leave, self._waits = leave, path == wire.BATCH_PATH
        return leave is not None

    def _answer(self, key: str, caller: Caller, status: int, body: bytes) -> None:
        """Send an answer, then go on with the next request."""
        if key:
            kept = PostAnswer(status, body, {"Content-Type": JSON})
            self._shared.posts_once.end(key, caller, kept)
        self._client.busy, self._leave = False, None
        self._shared.times.record(self._route, monotonic() - self._arrived, waited=self._waits)
        if self.transport.is_closing():
            return
        is_large = len(body) > PIECE_BYTES
        if is_large and not self._shared.clients.begin_leaving(body, caller):
            is_large, status, body = False, 503, _FULL
        head = _HEADS[status] % len(body)
        if not is_large:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self._rest, self._large = memoryview(body), body
            self._write_rest()
        if self._inbox:
            self._shared.clients.loop.call_soon(self._take_soon)

    def _write_rest(self) -> None:
        while self._rest is not None and not self._client.stuck:
            piece, rest = self._rest[:PIECE_BYTES], self._rest[PIECE_BYTES:]
            self._rest = rest or None
            self.transport.write(piece)
        if self._rest is None:
            self._forget_answer()

    def _forget_answer(self) -> None:
        """Record that the answer has been written, or that nobody wants it any more."""
        self._rest = None
        if self._large is not None:
            self._shared.clients.end_leaving(self._large, self._client.caller)
            self._large = None

    # ---- the end -------------------------------------------------------------------------

    def _give_to_general(self) -> None:
        """Hand the connection to aiohttp, with what has arrived."""
        self._shared.connections.discard(self)
        self._shared.clients.hold(self._client, 0)
        self._client.begun = 0.0
        general = GeneralConnection(self._shared.clients, self._client, self._shared.general())
        arrived, self._inbox = self._inbox, b""
        self.transport.set_write_buffer_limits()
        self.transport.set_protocol(general)
        self.transport.resume_reading()
        general.connection_made(self.transport)
        general.data_received(arrived)


_HEADS = {
    status.value: (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        "Content-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n\r\n"
    ).encode()
    for status in HTTPStatus
}
_FULL = problem_body(busy("the requests of all clients take too much memory"))
_STOPPING = problem_body(
    Problem(503, "stopping", "the rendezvous server was stopped", "try again in a moment")
)
