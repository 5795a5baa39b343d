"""TLS around the connections of the server: asyncio's own, with less memory for each.

asyncio documents no way to choose the size of a connection's buffer, so `TlsConnection` is a
subclass of its `SSLProtocol`. It uses the constructor, the callbacks of a protocol and `max_size`.
With the buffer of asyncio a connection takes 278 KiB, with this one 54 KiB.

On loopback a server also answers plain HTTP, for browsers and scripts: the first byte of a
connection tells which one its client speaks (`EitherConnection`). Times are seconds. Everything
runs on the server's loop.
"""

import asyncio
import ssl
import sys
import weakref
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import cast

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
