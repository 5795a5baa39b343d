"""The worker's one daemon thread, against a real rendezvous server."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import msgspec
import pytest
from aiohttp import web

from elastic_driver import contract
from elastic_driver.worker.heartbeat import Heartbeat
from elastic_driver.worker.pulse import Pulse
from elastic_driver.worker.watch import StallWatch
from rendezvous.client import RendezvousClient
from rendezvous.server import RendezvousServer
from rendezvous.wire import EVENTS_PATH, Set

TOKEN = "t" * 32


@pytest.fixture
def events() -> queue.SimpleQueue[dict[str, object]]:
    return queue.SimpleQueue()


@pytest.fixture
def server(events: queue.SimpleQueue[dict[str, object]]) -> Iterator[RendezvousServer]:
    async def receive(request: web.Request) -> web.Response:
        events.put(msgspec.json.decode(await request.read()))
        return web.json_response({})

    def routes(app: web.Application) -> None:
        app.router.add_post(EVENTS_PATH, receive)

    with RendezvousServer(token=TOKEN, routes=routes) as running:
        yield running


def test_the_first_step_of_a_round_is_told_soon_though_the_beat_before_could_wait_longer(
    server: RendezvousServer, events: queue.SimpleQueue[dict[str, object]]
) -> None:
    pulse = Pulse()
    client = RendezvousClient(server.url, TOKEN)
    heart = Heartbeat(
        "a.0.1",
        client,
        pulse,
        timeout=60.0,
        on_notice=lambda _notice: None,
        tend=lambda: None,
        watch=StallWatch("a.0.1", pulse, None),
    )
    heart.start()
    try:
        # The thread has had time to begin a beat that nothing but a new world can end.
        with pytest.raises(queue.Empty):
            events.get(timeout=0.3)
        server.apply((Set(contract.JOB_WORLD, b"{}"),))
        pulse.entered(1, 0)
        pulse.committed(1)
        told = events.get(timeout=1.0)
    finally:
        heart.stop()
    assert told == {"type": "worker_stepped", "worker": "a.0.1", "round": 1, "step": 1}
