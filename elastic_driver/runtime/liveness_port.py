"""A port at which a driver proves that it lives, and connections by which its end is seen.

The Brain asks (`elastic_driver.reachability`), and keeps the connection. The kernel holds it for a
process that is stopped, too, and ends it with the process, however that ends. Anybody may connect;
who has not proved to be the Brain is sent away soon, and keeps the Brain out no longer than that.
Times are seconds.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import cast

from elastic_driver.reachability import DriverPresence

LINE_S = 2.0  # for the question to arrive
MOST = 64  # connections without one; one more, and the oldest has to go
KEPT = 4  # connections with one: the newest stay
END_S = 2.0  # for the thread to end
_LINE = 200  # bytes; a question is shorter


class LivenessPort:
    """The port, at the address by which this machine reaches another one.

    `address` is HOST:PORT with a numeric host, "" until `open` has succeeded. One thread serves it.
    """

    def __init__(self, towards: str, port: int, token: str, ports: Sequence[int] = (0,)) -> None:
        """Open nothing.

        `towards`, `port`: the other machine's name or address, and any port. `token`: the job's.
        `ports`: those to listen at, of which the first free one is taken; 0: any.
        """
        self._towards, self._port, self._token, self._ports = towards, port, token, ports
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._up = threading.Event()
        self.address = ""

    def open(self, began: float) -> None:
        """Open the port, if that was not possible before; asks a name server.

        `began`: of the run, as its reports say it.
        """
        if self._thread is not None:
            return
        with contextlib.suppress(OSError):  # there is no way to it now
            family, kind, _, _, target = socket.getaddrinfo(
                self._towards, self._port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as unsent:  # nothing is sent by `connect`
                unsent.connect(target)
                own = unsent.getsockname()[0]
            listener = self._listen(own, family)
            host = f"[{own}]" if ":" in own else own
            self.address = f"{host}:{listener.getsockname()[1]}"
            presence = DriverPresence(self._token, began, self.address)
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._serve(listener, _Lines(presence))),
                name="liveness",
                daemon=True,
            )
            self._thread.start()

    def _listen(self, own: str, family: int) -> socket.socket:
        """Return a socket that listens at the first free port; OSError if none is free."""
        for port in self._ports:
            with contextlib.suppress(OSError):  # another program listens there
                return socket.create_server((own, port), family=family, backlog=MOST)
        raise OSError("no port is free")

    async def _serve(self, listener: socket.socket, lines: "_Lines") -> None:
        self._loop = asyncio.get_running_loop()
        server = await self._loop.create_server(lambda: _Line(lines), sock=listener, backlog=MOST)
        self._up.set()
        await self._stop.wait()
        server.close()
        lines.close()
        await asyncio.sleep(0)  # so that they are closed

    def close(self) -> None:
        """Close the port and all connections. May be called again."""
        if self._thread is None:
            return
        if self._up.wait(END_S) and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it was closed before
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(END_S)
        self.address = ""


class _Lines:
    """All connections, the oldest first; and who the driver is."""

    def __init__(self, presence: DriverPresence) -> None:
        self.presence = presence
        self.unproved = dict[asyncio.Transport, None]()
        self.kept = dict[asyncio.Transport, None]()

    def close(self) -> None:
        for connection in (*self.unproved, *self.kept):
            connection.abort()


def _add(connection: asyncio.Transport, to: dict[asyncio.Transport, None], most: int) -> None:
    if len(to) >= most:
        oldest = next(iter(to))
        del to[oldest]
        oldest.abort()
    to[connection] = None


class _Line(asyncio.Protocol):
    """One connection: a question, its answer, then nothing until one side has ended."""

    def __init__(self, lines: _Lines) -> None:
        self._lines, self._data, self._answered = lines, b"", False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        _add(self._transport, self._lines.unproved, MOST)
        self._patience = asyncio.get_running_loop().call_later(LINE_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._data += data
        line, end, rest = self._data.partition(b"\n")
        answer = self._lines.presence.answer(line) if end and not rest else None
        if self._answered or len(self._data) > _LINE or (end and answer is None):
            self._transport.abort()
        elif answer is not None:
            self._patience.cancel()
            self._answered, self._data = True, b""
            self._lines.unproved.pop(self._transport, None)
            _add(self._transport, self._lines.kept, KEPT)
            self._transport.write(answer)

    def connection_lost(self, _error: Exception | None) -> None:
        self._lines.unproved.pop(self._transport, None)
        self._lines.kept.pop(self._transport, None)
        self._patience.cancel()
