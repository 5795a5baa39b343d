"""The port where an agent answers probes, and where a driver that has taken over calls."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import cast

from elastic_driver.announcement import ANSWER, MAX_LINE

LINE_S = 2.0  # for a line to arrive
MOST = 64  # connections at the same time


class ProbePort:
    """Sends one byte over each connection; hands a line that comes back to `on_line`.

    A line is answered with the same byte again, whatever it says.
    """

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self.on_line = on_line
        self.open = set[asyncio.Transport]()
        self._server: asyncio.Server | None = None

    async def listen(self, address: str, ports: Sequence[int] = (0,)) -> int:
        """Answer from now on; return the port, or 0 if that is not possible.

        `ports`: those to listen at, of which the first free one is taken; 0: any.

        Without it the driver notices the loss of this host later; that is no reason to end.
        """
        loop = asyncio.get_running_loop()
        for port in ports:
            with contextlib.suppress(OSError):
                self._server = await loop.create_server(
                    lambda: _Connection(self), address, port, backlog=MOST
                )
                return int(self._server.sockets[0].getsockname()[1])
        return 0

    def close(self) -> None:
        """Refuse connections from now on; may be called again."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self.open):
            connection.abort()


class _Connection(asyncio.Protocol):
    def __init__(self, port: ProbePort) -> None:
        self._port, self._data = port, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(ANSWER)
        if len(self._port.open) >= MOST:
            self._transport.close()
            return
        self._port.open.add(self._transport)
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(LINE_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if b"\n" in self._data[:MAX_LINE]:
            self._port.on_line(self._data[: self._data.index(b"\n")])
            self._transport.write(ANSWER)
        elif len(self._data) < MAX_LINE:
            return
        self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        if self._transport in self._port.open:
            self._port.open.discard(self._transport)
            self._patience.cancel()
