"""The port where an agent answers probes, and where a driver that has taken over calls.

Everybody may connect: what is answered tells nothing (`elastic_driver.presence`), and what is
believed is signed (`elastic_driver.announcement`). Connections that say nothing keep nobody out.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import cast

from elastic_driver.announcement import MAX_LINE, READ

LINE_S = 2.0  # for the lines of a connection to arrive
MOST = 256  # connections at the same time; one more, and the oldest has to go
QUESTIONS = 2  # that one connection may ask


class ProbePort:
    """Answers the questions of probes; hands another line, one for a connection, to `on_line`.

    `answer` returns the answer to a line, None if it is no question. The other line is answered
    with `READ`, whatever it says.
    """

    def __init__(
        self, answer: Callable[[bytes], bytes | None], on_line: Callable[[bytes], None]
    ) -> None:
        self.answer, self.on_line = answer, on_line
        self.open = dict[asyncio.Transport, None]()  # the oldest first
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
        self._port, self._data, self._questions = port, b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        others = self._port.open
        if len(others) >= MOST:
            oldest = next(iter(others))
            del others[oldest]
            oldest.abort()
        others[self._transport] = None
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(LINE_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while b"\n" in self._data[:MAX_LINE]:
            line, _, self._data = self._data.partition(b"\n")
            answer = self._port.answer(line)
            self._questions += 1
            if answer is None:
                self._port.on_line(line)
            self._transport.write(answer or READ)
            if answer is None or self._questions >= QUESTIONS:
                self._transport.close()
                return
        if len(self._data) >= MAX_LINE:
            self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        self._port.open.pop(self._transport, None)
        self._patience.cancel()
