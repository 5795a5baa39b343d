"""The open connections of one server: accepted within its limits, with TLS or without it.

A connection without an authorized request so far is one of a few, and has little time. If too many
come, the oldest one of the peer with the most goes; if descriptors become scarce, one that rests
goes too, and if none does, one of the client with the most. A client whose connection was closed
connects again, and repeats the request if it had sent one. `Acceptor` accepts no more than these
bounds allow: asyncio's own server accepts as many as there are descriptors, and then logs an error
for each try.

asyncio documents no way to choose the size of the buffer of TLS, so `TlsConnection` is a subclass
of its `SSLProtocol`. It uses the constructor, the callbacks of a protocol and `max_size`. With the
buffer of asyncio a connection takes 278 KiB, with this one 54 KiB. On loopback a server also
answers plain HTTP, for browsers and scripts: the first byte of a connection tells which one its
client speaks (`EitherConnection`).

Everything runs on the server's loop. Times are seconds.
"""

import asyncio
import contextlib
import hmac
import socket
import ssl
import sys
import weakref
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeVar, cast

from rendezvous.auth import Caller, Role, Tokens
from rendezvous.fairness import Peers, Shares, open_to, share_of
from rendezvous.limits import Hits, Limits, reserve_of

SWEEP_S = 1.0
YOUNG_S = 0.2  # a connection has this long before it may be closed to make room for another one
IDLE_S = 600.0  # without a request; then the client has to connect again
_LOOKS = 64  # at connections, to find one that rests
K = TypeVar("K", bound=Hashable)
FEW = 8  # connections of one client, all of which it keeps while others have more


class Client:
    """The state of one connection; the protocols that serve it keep it up to date."""

    __slots__ = (
        *("_known", "begun", "busy", "caller", "has_head", "held", "moved", "patience"),
        *("peer", "stuck", "transport"),
    )

    def __init__(self, now: float, peer: str = "") -> None:
        self.peer = peer  # see `fairness.Peers`
        self.patience = 0.0  # more time until its first request, for a handshake
        self.transport: asyncio.WriteTransport | None = None  # of the socket, once there is one
        self.caller: Caller | None = None  # the owner of its first authorized request
        self.moved = now  # when bytes last came or went
        self.begun = 0.0  # since when a request arrives that is not whole yet; 0: none does
        self.has_head = False  # the head of that request has arrived
        self.busy = False  # it waits for an answer
        self.stuck = False  # it has not taken all that was written
        self.held = 0  # bytes of the requests that have arrived and are not carried out
        self._known: tuple[bytes, Caller] | None = None  # the header last checked, and its owner

    def identify(self, tokens: Tokens, header: str | None) -> Caller | None:
        """Return the owner of a token; the proof of the last one is not calculated again."""
        given = (header or "").encode(errors="surrogatepass")
        if self._known is not None and hmac.compare_digest(self._known[0], given):
            return self._known[1]
        caller = tokens.identify(header)
        self._known = None if caller is None else (given, caller)
        return caller

    def abort(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()


class Connections:
    """All connections of one server; create it on a running loop.

    `files`: how many descriptors the process may have; `used`: how many it has now. `handshake`:
    the time that each connection has before its first request is awaited.
    """

    def __init__(
        self, limits: Limits, hits: Hits, files: int, used: int, handshake: float = 0.0
    ) -> None:
        self.limits, self.hits = limits, hits
        self.loop = asyncio.get_running_loop()
        self._highest = files - reserve_of(files, limits)  # the first descriptor not for clients
        self._most = max(1, self._highest - used)
        self._most_unproven = min(limits.unproven, max(1, self._most // 4))
        self._handshake = handshake
        self._unproven: dict[Client, float] = {}  # since when; the oldest first
        self._of_peer: dict[str, dict[Client, None]] = {}  # the same, by peer
        self._proven: dict[Client, None] = {}  # about in the order of their last requests
        self._of_caller: dict[Caller, dict[Client, None]] = {}  # the same, by client
        self._arriving = Shares(limits.arriving_bytes)
        self._leaving: dict[int, tuple[int, int]] = {}  # id of an answer → readers, bytes
        self._leaving_bytes = 0
        self._leaving_to: Counter[Caller | None] = Counter()  # bytes, each answer for each reader
        self._sweep = self.loop.call_later(SWEEP_S, self._end_late)

    def close(self) -> None:
        """Stop to look after connections."""
        self._sweep.cancel()

    # ---- how many ------------------------------------------------------------------------

    def opened(self, peer: str = "") -> Client:
        """Record a new connection of a peer (see `fairness.Peers`)."""
        now = self.loop.time()
        client = Client(now, peer)
        client.patience = self._handshake
        self._unproven[client] = now
        self._of_peer.setdefault(peer, {})[client] = None
        return client

    def shakes_hands(self, client: Client, patience: float) -> None:
        """Record that a handshake has begun: the connection has this much more time."""
        client.patience = patience

    def closed(self, client: Client) -> None:
        """Record that a connection has ended; may be called again."""
        self._forget_unproven(client)
        if client in self._proven:
            del self._proven[client]
            self._release(client)
        self.hold(client, 0)

    def _forget_unproven(self, client: Client) -> None:
        if self._unproven.pop(client, None) is not None:
            _remove(self._of_peer, client.peer, client)

    def prove(self, client: Client, caller: Caller) -> bool:
        """Record an authorized request; return False if its caller has too many connections."""
        if client.caller is None:
            own = self._of_caller.setdefault(caller, {})
            if len(own) >= self.limits.of_one_caller and caller.role is not Role.DRIVER:
                self.hits.count("caller")
                return False
            own[client] = None
            self.hold(client, 0)  # as a stranger's; what follows is its own
            client.caller = caller
            self._forget_unproven(client)
            self._proven[client] = None
        return True

    def _release(self, client: Client) -> None:
        if client.caller is not None:
            _remove(self._of_caller, client.caller, client)

    def may_open(self) -> bool:
        """Return whether one more client may connect; close an older one for it if need be."""
        if len(self._unproven) < self._most_unproven:
            return True
        if self._oldest_unproven() is None:
            return False  # try again in a moment
        self.hits.count("unproven")
        return self._close_oldest_unproven()

    def has_room(self, descriptor: int) -> bool:
        """Return whether a connection with this descriptor leaves the driver's reserve alone.

        The system gives the lowest number that is free, so the number says how many are in use.
        """
        many = len(self._unproven) + len(self._proven)
        return many < self._most and descriptor < self._highest

    def make_room(self) -> bool:
        """Free a descriptor: close the connection that is needed least; False: there is none."""
        self.hits.count("files")
        return self._close_oldest_unproven() or self._close_resting() or self._close_of_greediest()

    def _oldest_unproven(self) -> Client | None:
        """Return the oldest unproven connection of the peer with the most, unless it is young.

        So a peer that connects without end closes its own connections. Handshakes have more time
        only while there is no other peer that waits.
        """
        most = max(self._of_peer.values(), key=len, default={})
        client = next(iter(most), None)
        if client is None:
            return None
        patience = client.patience if len(self._of_peer) == 1 else 0.0
        young = self.loop.time() - self._unproven[client] < YOUNG_S + patience
        return None if young else client

    def _close_oldest_unproven(self) -> bool:
        client = self._oldest_unproven()
        if client is not None:
            self._forget_unproven(client)
            client.abort()
        return client is not None

    def _close_of_greediest(self) -> bool:
        """Close a connection of the client with the most, if these are not few."""
        others = (own for caller, own in self._of_caller.items() if caller.role is not Role.DRIVER)
        most = max(others, key=len, default={})
        if len(most) <= FEW:
            return False
        client = next((each for each in most if not each.busy), next(iter(most)))
        self.closed(client)
        client.abort()
        return True

    def _close_resting(self) -> bool:
        """Close a connection that rests, if there is one among the next few."""
        now = self.loop.time()
        for _ in range(min(_LOOKS, len(self._proven))):
            client = next(iter(self._proven))
            if client.busy or now - client.moved < YOUNG_S:
                self._proven[client] = self._proven.pop(client)  # its turn comes again
            else:
                self.closed(client)
                client.abort()
                return True
        return False

    # ---- how much ------------------------------------------------------------------------

    def hold(self, client: Client, size: int) -> bool:
        """Record that so many bytes of a client's requests are kept; False: that is too much."""
        more = size - client.held
        if more > 0 and not self._arriving.take(client.caller, more):
            self.hits.count("arriving")
            return False
        if more < 0:
            self._arriving.give_back(client.caller, -more)
        client.held = size
        return True

    def begin_leaving(self, answer: bytes, caller: Caller | None) -> bool:
        """Record that a large answer is kept until one more client has taken it.

        `end_leaving` follows. False: it may not be kept, there are too many.
        """
        room = self.limits.leaving_bytes
        readers, size = self._leaving.get(id(answer), (0, len(answer)))
        new = 0 if readers else size  # others get the same bytes
        own, share = self._leaving_to[caller], share_of(caller, room)
        fits = not own or share == room or own + size <= share
        if not fits or self._leaving_bytes + new > open_to(caller, room):
            self.hits.count("leaving")
            return False
        self._leaving[id(answer)] = readers + 1, size
        self._leaving_bytes += new
        self._leaving_to[caller] += size
        return True

    def end_leaving(self, answer: bytes, caller: Caller | None) -> None:
        """Record that a client has taken an answer, or has gone."""
        readers, size = self._leaving.pop(id(answer))
        self._leaving_to[caller] -= size
        if not self._leaving_to[caller]:
            del self._leaving_to[caller]
        if readers > 1:
            self._leaving[id(answer)] = readers - 1, size
        else:
            self._leaving_bytes -= size

    # ---- how long ------------------------------------------------------------------------

    def _end_late(self) -> None:
        """Cut off clients that take too long, and close idle connections."""
        now = self.loop.time()
        for client, since in tuple(self._unproven.items()):
            if now - since > self.limits.unproven_s + client.patience:
                self._forget_unproven(client)
                self.hits.count("unproven_time")
                client.abort()
        for client in (*self._unproven, *self._proven):
            self._end_if_late(client, now)
        self._sweep = self.loop.call_later(SWEEP_S, self._end_late)

    def _end_if_late(self, client: Client, now: float) -> None:
        limits, still = self.limits, now - client.moved
        for_request = limits.body_s if client.has_head else limits.head_s
        if client.begun and now - client.begun > for_request:
            self.hits.count("request_time")
            client.abort()
        elif client.stuck and still > limits.stuck_s:
            self.hits.count("answer_time")
            client.abort()
        elif not client.busy and not client.stuck and still > IDLE_S:
            client.abort()


def _remove(table: dict[K, dict[Client, None]], key: K, client: Client) -> None:
    """Take a client out of a table of clients by key."""
    clients = table.get(key, {})
    clients.pop(client, None)
    if not clients:
        table.pop(key, None)


# ---- accept ------------------------------------------------------------------------------

AT_ONCE = 32  # in one turn of the loop; so the first bytes of each are read soon
PAUSE_S = 0.05  # when there is no room
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b"
)

# Makes the protocol of a new connection.
Serve = Callable[[Client], asyncio.BaseProtocol]


class Acceptor:
    """Accepts connections on a listening socket until it is stopped.

    `refusal`: the document that a client gets for which there is no descriptor; b"": none, because
    the client expects TLS.
    """

    def __init__(
        self, listener: socket.socket, connections: Connections, serve: Serve, refusal: bytes = b""
    ) -> None:
        self._listener, self._connections, self._serve = listener, connections, serve
        self._refusal = _FULL % (len(refusal), refusal) if refusal else b""
        self._loop = asyncio.get_running_loop()
        self._peers = Peers()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener, self._accept)

    def stop(self) -> None:
        """Accept no more connections."""
        self._loop.remove_reader(self._listener)
        self._peers.close()
        if self._pause is not None:
            self._pause.cancel()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if not self._connections.may_open():
                self._rest()
                return
            try:
                accepted, name = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor or no memory is left
                self._connections.make_room()
                self._rest()
                return
            room = self._connections.has_room(accepted.fileno())
            if room or self._connections.make_room():
                self._open(accepted, self._peers.of(accepted, name))
            else:
                self._refuse(accepted)

    def _rest(self) -> None:
        """Leave new clients in the queue of the system for a moment."""
        self._loop.remove_reader(self._listener)
        go_on = partial(self._loop.add_reader, self._listener, self._accept)
        self._pause = self._loop.call_later(PAUSE_S, go_on)

    def _open(self, accepted: socket.socket, peer: str) -> None:
        accepted.setblocking(False)
        client = self._connections.opened(peer)
        task = self._loop.create_task(self._connect(accepted, client))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, accepted: socket.socket, client: Client) -> None:
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                partial(self._serve, client), accepted
            )
        except OSError:  # the client has gone already
            self._connections.closed(client)
            accepted.close()
        else:
            client.transport = transport

    def _refuse(self, accepted: socket.socket) -> None:
        with accepted, contextlib.suppress(OSError):
            accepted.setblocking(False)
            accepted.send(self._refusal)
            accepted.shutdown(socket.SHUT_WR)


# ---- TLS ---------------------------------------------------------------------------------

HANDSHAKE_S = 10.0  # for a client to end its handshake; later than that it is nobody
# Before a connection counts as one that sends nothing: a server shakes hands with about a thousand
# clients a second, so those of a large job that come together wait for each other.
HANDSHAKE_WAIT_S = 3.0
GOODBYE_S = 1.0  # for a client to answer the end of its session
_HANDSHAKE = 0x16  # the type of a record, its first byte (RFC 8446, 5.1); no method begins with it


class TlsConnection(SSLProtocol):
    """One TLS connection of the server, from its first byte on.

    asyncio has a buffer of `max_size` bytes for each; its own default is 256 KiB.
    """

    max_size = 32 * 1024

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        inner: asyncio.Protocol,
        context: ssl.SSLContext,
        on_end: Callable[[], None],
    ) -> None:
        nobody = None  # waits for the end of the handshake
        times = {"ssl_handshake_timeout": HANDSHAKE_S}
        if sys.version_info >= (3, 11):
            times["ssl_shutdown_timeout"] = GOODBYE_S
        super().__init__(loop, inner, context, nobody, True, **times)  # type: ignore[arg-type]
        self._on_end = on_end
        self._below: asyncio.Transport | None = None  # of the socket, while there is one

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._below = cast("asyncio.Transport", transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the connection, also one whose handshake never ended."""
        self._below = None
        super().connection_lost(exc)
        self._on_end()

    def abort(self) -> None:
        """End the connection at once."""
        if self._below is not None:
            self._below.abort()


class TlsConnections:
    """Makes the server's connections; create it on a running loop."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context, self._loop = context, asyncio.get_running_loop()
        self._open: weakref.WeakSet[TlsConnection] = weakref.WeakSet()

    def around(self, inner: asyncio.Protocol, on_end: Callable[[], None]) -> TlsConnection:
        """Return a connection that talks to `inner` after the handshake, and calls `on_end`."""
        connection = TlsConnection(self._loop, inner, self._context, on_end)
        self._open.add(connection)
        return connection

    def abort(self) -> None:
        """End all connections, and those that wait for their client's goodbye."""
        for connection in tuple(self._open):
            connection.abort()


class EitherConnection(asyncio.Protocol):
    """A connection until its first byte, which makes it one of TLS or of plain HTTP.

    `tls` and `plain` make the protocol that has the connection from then on; `on_end` is called if
    no byte ever comes.
    """

    _transport: asyncio.Transport

    def __init__(
        self,
        tls: Callable[[], asyncio.BaseProtocol],
        plain: Callable[[], asyncio.BaseProtocol],
        on_end: Callable[[], None],
    ) -> None:
        self._tls, self._plain, self._on_end = tls, plain, on_end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first byte."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _error: Exception | None) -> None:
        """End a connection that has sent nothing."""
        self._on_end()

    def data_received(self, data: bytes) -> None:
        """Hand the connection over, with what has arrived."""
        protocol = (self._tls if data[0] == _HANDSHAKE else self._plain)()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        _feed(protocol, data, self._transport)


def _feed(protocol: asyncio.BaseProtocol, data: bytes, transport: asyncio.Transport) -> None:
    """Give bytes to a protocol; asyncio's TLS takes them in a buffer from Python 3.11 on."""
    if isinstance(protocol, asyncio.Protocol):
        protocol.data_received(data)
        return
    taker, rest = cast("asyncio.BufferedProtocol", protocol), memoryview(data)
    while rest and not transport.is_closing():
        room = memoryview(taker.get_buffer(len(rest)))
        size = min(len(room), len(rest))
        room[:size], rest = rest[:size], rest[size:]
        taker.buffer_updated(size)
