"""The fast path for what workers send all the time: batches, events, requests for data shards.

Every connection begins here. A plain POST to one of a few paths is carried out and answered
without aiohttp, which would take several times as long as the store
(docs/adr/0010-a-short-way-for-hot-requests.md). If a request is of another kind or has to be
refused (no token, no right, a body that is not a batch), aiohttp gets the bytes as they came, and
the connection from then on. So only aiohttp's handlers refuse requests.

A client that does not read costs little memory: an answer is written in pieces, each after the one
before has gone, and clients that get the same answer share its bytes. The server closes the
connection of a client that reads nothing, or leaves a request half sent, for `STUCK_S` seconds.
Everything runs on the server's loop.
"""

import asyncio
import hmac
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import cast

import msgspec
from msgspec import Struct

from rendezvous import access, wire
from rendezvous.auth import Caller, Tokens
from rendezvous.service import Results, StoreService
from rendezvous.web import PostsOnce, Problem, problem_body

PIECE_BYTES = 64 * 1024  # the most of an answer in the memory of one connection
STUCK_S = 60.0
IDLE_S = 600.0  # without a request; then the client has to connect again
SWEEP_S = 15.0
MAX_HEAD_BYTES = 8192  # as in aiohttp
MAX_BODY_BYTES = 256 * 1024  # larger ones are rare, and need not be quick
# The most that may arrive while a request is being answered.
_AHEAD_BYTES = MAX_HEAD_BYTES + MAX_BODY_BYTES
_END = b"\r\n\r\n"

# Sends a status and a JSON document to a client.
Answer = Callable[[int, bytes], None]
# Takes a POST's caller, path and body, and answers it, at once or later, on the loop. Returns a
# function to call when the client goes away; None: nothing was done, aiohttp has to answer.
Post = Callable[[Caller, str, bytes, Answer], Callable[[], object] | None]


# ---- heads -------------------------------------------------------------------------------

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
        general: Callable[[], asyncio.Protocol],
    ) -> None:
        self._service, self.posts_once = service, posts_once
        self.posts: dict[str, Post] = {wire.BATCH_PATH: self._take_batch, **posts}
        self.tokens, self.general = tokens, general
        ends = {True: "", False: " HTTP/1.1\r\n"}
        self.lines = {f"POST {p}{ends[p.endswith('/')]}".encode(): p for p in self.posts}
        self.loop = asyncio.get_running_loop()
        self.connections: set[FastConnection] = set()
        self._end_stuck()

    def close(self) -> None:
        """Close every connection once what is written has gone."""
        self._sweep.cancel()
        for connection in tuple(self.connections):
            connection.transport.close()

    def _take_batch(
        self, caller: Caller, _path: str, body: bytes, answer: Answer
    ) -> Callable[[], object] | None:
        try:
            batch = wire.decode_batch(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if access.refused(caller, batch.operations) is not None:
            return None

        def done(results: Results | None) -> None:
            if results is None:
                answer(503, _STOPPING)
            else:
                answer(200, wire.encode_reply(results))

        return self._service.ask(batch.operations, done, batch.write_id)

    def _end_stuck(self) -> None:
        """Cut off clients that are stuck, and close idle connections, from time to time."""
        now = self.loop.time()
        for connection in tuple(self.connections):
            connection.end_if_stuck(now)
        self._sweep = self.loop.call_later(SWEEP_S, self._end_stuck)


class FastConnection(asyncio.Protocol):
    """One client's connection; its requests are answered one after the other."""

    transport: asyncio.Transport

    def __init__(self, shared: FastPath) -> None:
        self._shared = shared
        self._inbox = b""  # bytes received and not carried out yet
        self._waits = False  # a request waits for its answer
        self._known: tuple[bytes, Caller] | None = None  # the header last checked, and its owner
        # To call if the client goes away during that wait.
        self._leave: Callable[[], object] | None = None
        self._rest: memoryview | None = None  # the part of the answer that is not written yet
        self._paused = False  # the client has not taken all that was written
        self._moved = shared.loop.time()  # the last time that bytes came or went

    # ---- called by asyncio ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve a client."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=0)  # paused until everything has gone
        self._shared.connections.add(self)

    def connection_lost(self, _error: Exception | None) -> None:
        """Give up what the client waits for."""
        self._shared.connections.discard(self)
        self._rest = None
        if self._leave is not None:
            self._leave()

    def data_received(self, data: bytes) -> None:
        """Take bytes, up to a limit while a request is being answered."""
        self._moved = self._shared.loop.time()
        self._inbox = self._inbox + data if self._inbox else data
        if not self._busy:
            self._take_requests()
        elif len(self._inbox) > _AHEAD_BYTES:
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        """Stop: the client has not taken all that was written."""
        self._paused = True

    def resume_writing(self) -> None:
        """Go on: the client has taken all that was written."""
        self._paused = False
        self._moved = self._shared.loop.time()
        self._write_rest()
        self._take_requests()

    # ---- requests ------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        return self._waits or self._paused or self._rest is not None

    def _take_requests(self) -> None:
        """Carry out the requests that have arrived, until one is incomplete or has to wait."""
        lines = self._shared.lines
        while self._inbox and not self._busy and not self.transport.is_closing():
            end = self._inbox.find(_END)
            if end < 0 and len(self._inbox) <= MAX_HEAD_BYTES and may_be_plain(self._inbox, lines):
                break
            head = read_head(self._inbox[:end], lines) if 0 <= end <= MAX_HEAD_BYTES else None
            caller = None if head is None else self._identify(head.authorization)
            if head is None or caller is None:
                self._give_to_general()
                return
            start = end + len(_END)
            arrived, body = self._inbox, self._inbox[start : start + head.length]
            if len(body) < head.length:
                break
            self._inbox = arrived[start + head.length :]
            if not self._carry_out(caller, head, body):
                self._inbox = arrived
                self._give_to_general()
                return
        if not self._busy:
            self.transport.resume_reading()

    def _identify(self, header: str | None) -> Caller | None:
        """Return the owner of a token; the proof of the last one is not calculated again."""
        given = (header or "").encode()
        if self._known is not None and hmac.compare_digest(self._known[0], given):
            return self._known[1]
        caller = self._shared.tokens.identify(header)
        self._known = None if caller is None else (given, caller)
        return caller

    def _carry_out(self, caller: Caller, head: PlainHead, body: bytes) -> bool:
        """Begin to answer; return False, with nothing done, if aiohttp has to answer."""
        shared, path = self._shared, head.path
        # The store itself knows repeated batches.
        known_by_id = head.request_id is not None and path != wire.BATCH_PATH
        key = f"{path} {head.request_id}" if known_by_id else ""
        if key and shared.posts_once.knows(key):
            return False
        post = shared.posts.get(path) or shared.posts[path[: path.rindex("/") + 1]]
        self._waits = True
        leave = post(caller, path, body, partial(self._answer, key))
        if leave is None:
            self._waits = False
        elif self._waits and key:  # its client may repeat it, so it goes on
            shared.posts_once.begin(key)
        elif self._waits:
            self._leave = leave
        return leave is not None

    def _answer(self, key: str, status: int, body: bytes) -> None:
        """Send an answer, then go on with the next request."""
        if key:
            self._shared.posts_once.end(key, status, body)
        self._waits, self._leave = False, None
        if self.transport.is_closing():
            return
        head = _HEADS[status] % len(body)
        if len(body) <= PIECE_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self._rest = memoryview(body)
            self._write_rest()
        if self._inbox:
            self._shared.loop.call_soon(self._take_requests)

    def _write_rest(self) -> None:
        while self._rest is not None and not self._paused:
            piece, rest = self._rest[:PIECE_BYTES], self._rest[PIECE_BYTES:]
            self._rest = rest or None
            self.transport.write(piece)

    # ---- the end -------------------------------------------------------------------------

    def _give_to_general(self) -> None:
        """Hand the connection to aiohttp, with what has arrived."""
        self._shared.connections.discard(self)
        general, arrived, self._inbox = self._shared.general(), self._inbox, b""
        self.transport.set_write_buffer_limits()
        self.transport.set_protocol(general)
        self.transport.resume_reading()
        general.connection_made(self.transport)
        general.data_received(arrived)

    def end_if_stuck(self, now: float) -> None:
        """Cut off a client that takes no answer or never ends its request; close an idle one."""
        still = now - self._moved
        if not self._waits and (self._paused or self._inbox) and still > STUCK_S:
            self.transport.abort()
        elif not self._waits and still > IDLE_S:
            self.transport.close()


_HEADS = {
    status.value: (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        "Content-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n\r\n"
    ).encode()
    for status in HTTPStatus
}
_STOPPING = problem_body(
    Problem(503, "stopping", "the rendezvous server was stopped", "try again in a moment")
)
