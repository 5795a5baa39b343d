"""Accepts the connections of one server, within its limits, and never logs a line for one.

asyncio's own server accepts as many as there are descriptors, and then logs an error for each try.
Everything runs on the server's loop. Times are seconds.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial

from rendezvous.connections import Client, Connections
from rendezvous.peers import Peers

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
