"""The fast path for what workers send all the time: batches, events, requests for data shards.

Every connection begins here. A plain POST to one of a few paths is carried out and answered
without aiohttp, which would take several times as long as the store
(docs/adr/0010-a-short-way-for-hot-requests.md). Everything else, and everything that has to be
refused (no token, a body that is no batch), goes to aiohttp with the bytes as they came, for the
rest of the connection's life: one place refuses, and this one only says yes.

A client that does not read costs little memory: an answer is written in pieces, the next one
when the last has gone, and clients that get the same answer share its bytes. A client that
takes nothing for `STUCK_S` seconds, or leaves a request half sent for as long, is cut off.
Everything runs on the server's loop.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import msgspec
from msgspec import Struct

from rendezvous import wire
from rendezvous.auth import AUTHORIZATION, is_authorized
from rendezvous.errors import StoppedError
from rendezvous.repeats import PostsOnce, Repeats
from rendezvous.service import StoreService

PIECE_BYTES = 64 * 1024  # of an answer in the memory of one connection, at most
STUCK_S = 60.0
IDLE_S = 600.0  # without a request; a client's next one opens a new connection
SWEEP_S = 15.0
MAX_HEAD_BYTES = 8192  # as in aiohttp
MAX_BODY_BYTES = 256 * 1024  # larger ones are rare, and need not be quick
_AHEAD_BYTES = MAX_HEAD_BYTES + MAX_BODY_BYTES  # that may arrive while a request is answered
_END = b"\r\n\r\n"

Answer = Callable[[int, bytes], None]
"""Sends a status and a JSON document to a client."""
Post = Callable[[str, bytes, Answer], Callable[[], object] | None]
"""Takes a POST's path and body, and answers it, at once or later, on the loop.

Returns a function to call when the client goes away; None: nothing was done, aiohttp has to answer.
"""


# ---- heads -------------------------------------------------------------------------------

_LENGTH, _CONNECTION, _TOKEN, _ID = (
    name.lower() for name in ("Content-Length", "Connection", AUTHORIZATION, wire.REQUEST_ID_HEADER)
)
_IGNORED = ("host", "content-type", "accept", "accept-encoding", "user-agent")
_KNOWN = frozenset((_LENGTH, _CONNECTION, _TOKEN, _ID, *_IGNORED))


class PlainHead(Struct, frozen=True):
    """The head of a plain POST, as far as it matters."""

    path: str
    authorization: str | None
    request_id: str | None
    length: int  # bytes of the body


def may_be_plain(start: bytes, lines: Mapping[bytes, str]) -> bool:
    """Return whether a request that begins like this may have one of these request lines."""
    return any(start.startswith(line) or line.startswith(start) for line in lines)


def read_head(head: bytes, lines: Mapping[bytes, str]) -> PlainHead | None:
    """Return a request's head (given without its final empty line), or None if it is not plain.

    A plain head has one of the request lines in `lines` (values are their paths), or begins with
    one that ends in "/", and the headers that our clients send. None for anything unusual: aiohttp
    knows what to do about it.
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
    length = headers.get(_LENGTH, "")
    if not length.isdigit() or len(length) > 9 or int(length) > MAX_BODY_BYTES:
        return None
    if headers.get(_CONNECTION, "keep-alive").lower() != "keep-alive":
        return None
    return PlainHead(path, headers.get(_TOKEN), headers.get(_ID) or None, int(length))


# ---- connections -------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class FastPath:
    """The state that all connections share; create it on a running loop.

    `posts` answers other rooms' POSTs, by path; one that ends in "/" stands for all below it.
    `general()` makes the protocol that takes over
    everything else.
    """

    service: StoreService
    repeats: Repeats
    encode_reply: wire.ReplyEncoder
    posts_once: PostsOnce
    posts: Mapping[str, Post]
    tokens: Sequence[str]
    general: Callable[[], asyncio.Protocol]

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        ends = {True: "", False: " HTTP/1.1\r\n"}
        paths = (wire.BATCH_PATH, *self.posts)
        self.lines = {f"POST {path}{ends[path.endswith('/')]}".encode(): path for path in paths}
        self.connections: set[FastConnection] = set()
        self._sweep = self.loop.call_later(SWEEP_S, self._end_stuck)

    def connection(self) -> "FastConnection":
        """Return the protocol of a new connection."""
        return FastConnection(self)

    def close(self) -> None:
        """Close every connection once what is written has gone."""
        self._sweep.cancel()
        for connection in tuple(self.connections):
            connection.close()

    def _end_stuck(self) -> None:
        now = self.loop.time()
        for connection in tuple(self.connections):
            connection.end_if_stuck(now)
        self._sweep = self.loop.call_later(SWEEP_S, self._end_stuck)


class FastConnection(asyncio.Protocol):
    """One client's connection; its requests are answered one after the other."""

    def __init__(self, shared: FastPath) -> None:
        self._shared = shared
        self._transport: asyncio.Transport
        self._inbox = b""  # received, and not carried out yet
        self._head: tuple[PlainHead, int] | None = None  # of the first request; start of its body
        self._waits = False  # for the results of a request
        self._leave: Callable[[], object] | None = None  # gives up that wait
        self._rest: memoryview | None = None  # of the answer, not written yet
        self._paused = False  # what was written has not all gone
        self._reading = True
        self._moved = shared.loop.time()  # when bytes last came or went

    # ---- called by asyncio ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve a client."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a stream server
        self._transport = transport
        transport.set_write_buffer_limits(high=0)  # paused until everything has gone
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
        elif len(self._inbox) > _AHEAD_BYTES and self._reading:
            self._reading = False
            self._transport.pause_reading()

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
        """Carry out the requests that have arrived, until one has to wait."""
        while self._inbox and not self._busy and not self._transport.is_closing():
            if self._head is None and not self._read_head():
                return
            assert self._head is not None  # noqa: S101 - just read
            head, start = self._head
            end = start + head.length
            if len(self._inbox) < end:
                break
            if not self._carry_out(head, self._inbox[start:end]):
                self._give_to_general()
                return
            self._inbox, self._head = self._inbox[end:], None
        if not self._reading and not self._busy:
            self._reading = True
            self._transport.resume_reading()

    def _read_head(self) -> bool:
        """Read the next head; return False if it is incomplete, or went to aiohttp."""
        lines, end = self._shared.lines, self._inbox.find(_END)
        if end < 0 and len(self._inbox) <= MAX_HEAD_BYTES and may_be_plain(self._inbox, lines):
            return False
        head = read_head(self._inbox[:end], lines) if 0 <= end <= MAX_HEAD_BYTES else None
        if head is None or not is_authorized(head.authorization, self._shared.tokens):
            self._give_to_general()
            return False
        self._head = head, end + len(_END)
        return True

    def _carry_out(self, head: PlainHead, body: bytes) -> bool:
        """Begin to answer; return False, with nothing done, if aiohttp has to answer."""
        if head.path != wire.BATCH_PATH:
            return self._post(head, body)
        try:
            batch = wire.decode_batch(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        self._batch(batch)
        return True

    def _post(self, head: PlainHead, body: bytes) -> bool:
        shared, path, request_id = self._shared, head.path, head.request_id
        if request_id is not None and shared.posts_once.knows(path, request_id):
            return False
        post = shared.posts.get(path) or shared.posts[path[: path.rindex("/") + 1]]
        self._waits = True
        leave = post(path, body, partial(self._posted, head))
        if leave is None:
            self._waits = False
            return False
        if self._waits and request_id is None:
            self._leave = leave
        elif self._waits and request_id is not None:  # its client may repeat it, so nothing ends it
            shared.posts_once.begin(path, request_id, shared.loop.time())
        return True

    def _posted(self, head: PlainHead, status: int, body: bytes) -> None:
        if head.request_id is not None:
            now = self._shared.loop.time()
            self._shared.posts_once.remember(head.path, head.request_id, status, body, now)
        self._waits, self._leave = False, None
        if not self._transport.is_closing():
            self._write(status, body)
            if self._inbox:
                self._shared.loop.call_soon(self._take_requests)

    def _batch(self, batch: wire.KVBatch) -> None:
        service, self._waits = self._shared.service, True
        leave: Callable[[], object]
        try:
            if batch.reads_only:
                leave = partial(service.cancel, service.begin(batch.operations, self._answer))
            else:
                leave = self._shared.repeats.ask(batch.request_id, batch.operations, self._answer)
        except StoppedError:
            self._answer(None)
        else:
            self._leave = leave if self._waits else None

    def _answer(self, results: tuple[wire.Result, ...] | None) -> None:
        """Send the results of the batch, at once or after a wait."""
        waited = self._leave is not None
        self._waits, self._leave = False, None
        if results is None:
            self._write(503, _STOPPING)
        else:
            self._write(200, self._shared.encode_reply(results))
        if waited and self._inbox:
            self._shared.loop.call_soon(self._take_requests)

    # ---- answers -------------------------------------------------------------------------

    def _write(self, status: int, body: bytes) -> None:
        head = _HEADS[status] % len(body)
        if len(body) <= PIECE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._rest = memoryview(body)
            self._write_rest()

    def _write_rest(self) -> None:
        while self._rest is not None and not self._paused:
            piece, rest = self._rest[:PIECE_BYTES], self._rest[PIECE_BYTES:]
            self._rest = rest if rest else None
            self._transport.write(piece)

    # ---- the end -------------------------------------------------------------------------

    def _give_to_general(self) -> None:
        """Hand the connection to aiohttp, with what has arrived."""
        self._shared.connections.discard(self)
        general, arrived, self._inbox = self._shared.general(), self._inbox, b""
        self._transport.set_write_buffer_limits()
        self._transport.set_protocol(general)
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()
        general.connection_made(self._transport)
        general.data_received(arrived)

    def close(self) -> None:
        """Close the connection once what is written has gone."""
        self._transport.close()

    def end_if_stuck(self, now: float) -> None:
        """Cut off a client that takes no answer or never ends its request; close an idle one."""
        if self._waits:
            return
        still = now - self._moved
        if (self._paused or self._inbox) and still > STUCK_S:
            self._transport.abort()
        elif still > IDLE_S:
            self._transport.close()


def _head_of(status: str) -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json; charset=utf-8\r\n"
        "Content-Length: %d\r\n\r\n"
    ).encode()


_HEADS = {status.value: _head_of(f"{status.value} {status.phrase}") for status in HTTPStatus}
_STOPPING = wire.encode(
    wire.ErrorBody(
        wire.ErrorDetail("stopping", "the rendezvous server was stopped", "try again in a moment")
    )
)
