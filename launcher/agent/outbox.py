"""What the agent tells the driver: events, in the order in which they happened.

One at a time, so that none overtakes another; each is repeated until the driver answers or is
taken for gone. An event that the driver refuses is a bug of ours: it is named and dropped, so
that it cannot hold up those behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from elastic_driver.core.events import (
    AgentReady,
    HostLeaving,
    WorkerExited,
    WorkerStack,
    WorkerStarted,
)
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError
from rendezvous.wire import EVENTS_PATH

AgentEvent = AgentReady | WorkerStarted | WorkerExited | WorkerStack | HostLeaving


class Outbox:
    """A queue of events on their way to the driver.

    Args:
        client: where to.
        patience: seconds after which a driver that does not answer is gone.
        on_refused: told a sentence about an event that the driver did not take.
    """

    def __init__(
        self, client: RendezvousClient, patience: float, on_refused: Callable[[str], None]
    ) -> None:
        self._client, self._patience, self._on_refused = client, patience, on_refused
        self._queue: asyncio.Queue[AgentEvent] = asyncio.Queue()

    def put(self, event: AgentEvent) -> None:
        """Have an event delivered after all that were put before."""
        self._queue.put_nowait(event)

    async def deliver(self) -> None:
        """Deliver for ever; raises `UnreachableError` or `UnauthorizedError` for a driver gone."""
        while True:
            event = await self._queue.get()
            try:
                body = msgspec.json.encode(event)
                await asyncio.to_thread(self._client.post_json, EVENTS_PATH, body, self._patience)
            except RequestError as error:
                self._on_refused(f"the driver did not take {type(event).__name__}: {error}")
            finally:
                self._queue.task_done()

    async def emptied(self, timeout: float) -> None:
        """Wait until everything is delivered, at most `timeout` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._queue.join(), timeout)
