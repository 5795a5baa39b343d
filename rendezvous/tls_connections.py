"""TLS around the connections of the server: asyncio's own, with less memory for each.

Times are seconds. Everything runs on the server's loop.
"""

import asyncio
import ssl
import weakref
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable

HANDSHAKE_S = 10.0  # for a client to end its handshake; later than that it is nobody
# Before a connection counts as one that sends nothing: a server shakes hands with about a thousand
# clients a second, so those of a large job that come together wait for each other.
HANDSHAKE_WAIT_S = 3.0
GOODBYE_S = 1.0  # for a client to answer the end of its session


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
        timeout = HANDSHAKE_S
        super().__init__(loop, inner, context, nobody, True, ssl_handshake_timeout=timeout)  # type: ignore[arg-type]
        self._on_end = on_end
        self._ssl_shutdown_timeout = GOODBYE_S  # asyncio looks at it from Python 3.11 on

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the connection, also one whose handshake never ended."""
        super().connection_lost(exc)
        self._on_end()

    def abort(self) -> None:
        """End the connection at once."""
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()


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
