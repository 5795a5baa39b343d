"""The short way for what all workers send all the time: batches, and events for the driver.

Every connection begins here. A plain POST (`heads`) to one of a few paths is taken out of the
bytes, carried out and answered without aiohttp's machinery, which would cost several times what
the store does. Everything else, and everything that is wrong (no token, a body that is no batch, a
request that was here before), goes to aiohttp for the rest of the connection's life, bytes as they
came: so there is one place that refuses, and this one only says yes.

A client that does not read holds up nobody and little memory: an answer is written in pieces, the
next one when the last has gone, and its bytes are shared by all who get the same. Whoever takes
nothing for `STUCK_S` seconds, or leaves a request half sent for as long, is cut off. All of it
runs on the server's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rendezvous.auth import is_authorized_by_any
from rendezvous.errors import StoppedError
from rendezvous.heads import (
    END,
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    Head,
    may_be_plain,
    read_head,
)
from rendezvous.repeats import Asking, PostsOnce, Repeats
from rendezvous.replies import ReplyEncoder, reads_only
from rendezvous.service import StoreService
from rendezvous.wire import (
    BATCH_PATH,
    Batch,
    ErrorBody,
    ErrorDetail,
    Result,
    decode_batch,
    encode,
)

PIECE_BYTES = 64 * 1024  # of an answer, at most so much of it in the memory of one connection
STUCK_S = 60.0
IDLE_S = 600.0  # without a request; a client's next one opens a new connection
SWEEP_S = 15.0
_AHEAD_BYTES = MAX_HEAD_BYTES + MAX_BODY_BYTES  # that may wait while a request is answered

Post = Callable[[bytes], tuple[int, bytes] | None]
"""Takes a POST's body, answers with a status and a JSON document; None: not here (and not done)."""


class Shortcut:
    """What all connections share. `general` makes the protocol that takes everything else."""

    def __init__(
        self,
        *,
        service: StoreService,
        repeats: Repeats,
        encode_reply: ReplyEncoder,
        posts_once: PostsOnce,
        posts: Mapping[str, Post],
        tokens: Sequence[str],
        general: Callable[[], asyncio.Protocol],
    ) -> None:
        """Needs a running loop. `posts`: what takes the other rooms' POSTs, by path."""
        self.loop = asyncio.get_running_loop()
        self.service, self.repeats, self.encode_reply = service, repeats, encode_reply
        self.posts_once, self.posts, self.tokens = posts_once, dict(posts), tuple(tokens)
        self.general = general
        self.lines = {
            f"POST {path} HTTP/1.1\r\n".encode(): path for path in (BATCH_PATH, *self.posts)
        }
        self.connections: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = self.loop.call_later(SWEEP_S, self._look)

    def connection(self) -> Connection:
        """The protocol of a new connection."""
        return Connection(self)

    def close(self) -> None:
        """Close every connection once what is written has gone."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in tuple(self.connections):
            connection.close()

    def _look(self) -> None:
        now = self.loop.time()
        for connection in tuple(self.connections):
            connection.end_if_stuck(now)
        self._sweep = self.loop.call_later(SWEEP_S, self._look)


class Connection(asyncio.Protocol):
    """One client's connection; its requests are answered one after the other."""

    __slots__ = (
        "_asking",
        "_head",
        "_inbox",
        "_moved",
        "_paused",
        "_reading",
        "_rest",
        "_room",
        "_ticket",
        "_transport",
        "_waits",
    )

    def __init__(self, room: Shortcut) -> None:
        self._room = room
        self._transport: asyncio.Transport
        self._inbox = b""  # arrived, and not carried out yet
        self._head: tuple[Head, int] | None = None  # of the request that arrives; where its body is
        self._waits = False  # a request is carried out, and its answer not there yet
        self._asking: Asking | None = None  # for that answer
        self._ticket = 0  # the same for a batch that only reads
        self._rest: memoryview | None = None  # of the answer
        self._paused = False  # what was written has not all gone
        self._reading = True
        self._moved = room.loop.time()  # bytes came or went then

    # ---- what asyncio calls --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a stream server
        self._transport = transport
        transport.set_write_buffer_limits(high=0)  # tell us until everything has gone
        self._room.connections.add(self)

    def connection_lost(self, _error: Exception | None) -> None:
        """It has gone: nobody waits for what it asked any more."""
        self._room.connections.discard(self)
        self._rest = None
        if self._asking is not None:
            self._asking.leave()
        elif self._ticket:
            self._room.service.cancel(self._ticket)

    def data_received(self, data: bytes) -> None:
        """Some of what it sends has come; while it is not answered, only so much is taken."""
        self._moved = self._room.loop.time()
        self._inbox = self._inbox + data if self._inbox else data
        if not self._busy:
            self._take_requests()
        elif len(self._inbox) > _AHEAD_BYTES and self._reading:
            self._reading = False
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        """It has not taken all that was written."""
        self._paused = True

    def resume_writing(self) -> None:
        """Now it has."""
        self._paused = False
        self._moved = self._room.loop.time()
        self._write_rest()
        if not self._busy:
            self._take_requests()

    # ---- requests ------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        return self._waits or self._paused or self._rest is not None

    def _take_requests(self) -> None:
        """Carry out the whole requests that have arrived, while they are answered at once."""
        while self._inbox and not self._busy and not self._transport.is_closing():
            if self._head is None and not self._read_head():
                return
            assert self._head is not None  # noqa: S101 - read just now
            head, start = self._head
            if len(self._inbox) < start + head.length:
                break
            if not self._carry_out(head, self._inbox[start : start + head.length]):
                self._give_to_general()
                return
            self._inbox = self._inbox[start + head.length :]
            self._head = None
        if not self._reading and not self._busy:
            self._reading = True
            self._transport.resume_reading()

    def _read_head(self) -> bool:
        """Read the next request's head; False where it is not all here, or no longer ours."""
        end = self._inbox.find(END)
        if end < 0:
            if len(self._inbox) > MAX_HEAD_BYTES or not may_be_plain(self._inbox, self._room.lines):
                self._give_to_general()
            return False
        head = read_head(self._inbox[:end], self._room.lines) if end <= MAX_HEAD_BYTES else None
        if head is None or not is_authorized_by_any(head.authorization, self._room.tokens):
            self._give_to_general()
            return False
        self._head = head, end + len(END)
        return True

    def _carry_out(self, head: Head, body: bytes) -> bool:
        """Begin to answer; False (and nothing done) where that is the general server's."""
        post = self._room.posts.get(head.path)
        if post is not None:
            return self._post(post, head, body)
        try:
            batch = decode_batch(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        self._batch(batch)
        return True

    def _post(self, post: Post, head: Head, body: bytes) -> bool:
        once = self._room.posts_once
        if head.request_id is not None and once.knows(head.path, head.request_id):
            return False
        said = post(body)
        if said is None:
            return False
        if head.request_id is not None:
            once.remember(head.path, head.request_id, *said, self._room.loop.time())
        self._write(*said)
        return True

    def _batch(self, batch: Batch) -> None:
        room, self._waits = self._room, True
        try:
            if reads_only(batch):
                ticket = room.service.begin(batch.operations, self._answer)
                self._ticket = ticket if self._waits else 0
            else:
                asking = room.repeats.ask(batch.request_id, batch.operations, self._answer)
                self._asking = asking if self._waits else None
        except StoppedError:
            self._answer(None)

    def _answer(self, results: tuple[Result, ...] | None) -> None:
        """The results of the batch are there: at once, or while the client waits."""
        waited = bool(self._asking or self._ticket)
        self._waits, self._asking, self._ticket = False, None, 0
        if results is None:
            self._write(503, _STOPPING)
        else:
            self._write(200, self._room.encode_reply(results))
        if waited and self._inbox and not self._busy:
            self._room.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self._busy:
            self._take_requests()

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
        """From now on this is the general server's connection."""
        self._room.connections.discard(self)
        general, arrived, self._inbox = self._room.general(), self._inbox, b""
        self._transport.set_write_buffer_limits()
        self._transport.set_protocol(general)
        if not self._reading:
            self._transport.resume_reading()
        general.connection_made(self._transport)
        general.data_received(arrived)

    def close(self) -> None:
        """Close once what is written has gone."""
        self._transport.close()

    def end_if_stuck(self, now: float) -> None:
        """Cut off a client that takes no answer, or never ends its request; close an idle one."""
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


_HEADS = {
    200: _head_of("200 OK"),
    202: _head_of("202 Accepted"),
    503: _head_of("503 Service Unavailable"),
}
_STOPPING = encode(
    ErrorBody(ErrorDetail("stopping", "the rendezvous server was stopped", "try again in a moment"))
)
