"""Signs of life of an agent: it answers probes and sends heartbeats. Times are seconds."""

import asyncio
from typing import cast

ANSWER = b"+"
_PROBES_AT_ONCE = 64


class ProbeAnswer(asyncio.Protocol):
    """Sends one byte to whoever connects, and closes the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer."""
        connection = cast("asyncio.Transport", transport)
        connection.write(ANSWER)
        connection.close()


async def answer_probes(address: str) -> tuple[asyncio.Server | None, int]:
    """Answer probes from now on; return the server and its port, or None and 0.

    Without it the driver notices the loss of this host later; that is no reason to end.
    """
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(ProbeAnswer, address, 0, backlog=_PROBES_AT_ONCE)
    except OSError:
        return None, 0
    return server, server.sockets[0].getsockname()[1]
