"""A rendezvous server that keeps the events it gets, and a heartbeat towards it."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from elastic_driver.contract import EVENTS_PATH
from elastic_driver.words.orders import Notice
from elastic_driver.worker.context import WorkerContext
from elastic_driver.worker.heartbeat.driver_connection import DriverConnection
from elastic_driver.worker.heartbeat.training_progress import TrainingProgress
from rendezvous.auth import write_token_file
from rendezvous.server import RendezvousServer

TOKEN = "t" * 32


@pytest.fixture
def events() -> queue.SimpleQueue[dict[str, Any]]:
    return queue.SimpleQueue()


@pytest.fixture
def server(events: queue.SimpleQueue[dict[str, Any]]) -> Iterator[RendezvousServer]:
    async def receive(request: web.Request) -> web.Response:
        events.put(msgspec.json.decode(await request.read()))
        return web.json_response({})

    def routes(app: web.Application) -> None:
        app.router.add_post(EVENTS_PATH, receive)

    with RendezvousServer(token=TOKEN, routes=routes) as running:
        yield running


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    return str(write_token_file(tmp_path / "token", TOKEN))


@contextlib.contextmanager
def sending_heartbeats(
    server: RendezvousServer,
    token_file: str,
    progress: TrainingProgress,
    leave_notice: float = 0.0,
    heartbeat_timeout: float = 60.0,
    on_notice: Callable[[Notice], None] = lambda _notice: None,
) -> Iterator[None]:
    """The heartbeats of a worker with this progress that has got a world."""
    born = WorkerContext(
        worker="a.0.1",
        endpoint=server.url,
        token_file=token_file,
        heartbeat_timeout=heartbeat_timeout,
        leave_notice=leave_notice,
    )
    connection = DriverConnection(born, progress, on_notice, lambda: None)
    connection.preemption.listen()
    connection.start()
    connection._heartbeat.begin()
    try:
        yield
    finally:
        connection.stop()
