"""A probe port that has connections which say nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from launcher.agent.lifetime import ProbePort


@contextlib.asynccontextmanager
async def probe_port_beside_idle(
    answer: Callable[[bytes], bytes | None], hear: Callable[[bytes], object], idle: int
) -> AsyncIterator[int]:
    """Yield the number of the port; it is closed when the `idle` connections have ended."""
    listener = ProbePort(answer, hear)
    port = await listener.listen("127.0.0.1")
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(idle)]
    yield port
    for _, writer in connections:
        writer.close()
        with contextlib.suppress(OSError):  # it had to make room
            await writer.wait_closed()
    while listener.open:
        await asyncio.sleep(0)
    listener.close()
