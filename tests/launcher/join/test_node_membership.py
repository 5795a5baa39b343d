"""A node's place: it is told of signals while it waits for a driver, whatever it waits for."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from aiohttp import web

from elastic_driver.runtime.api import job_access
from elastic_driver.runtime.endpoint import first_documents
from elastic_driver.words.joining import NODES_PATH, Joined, NodeReport
from elastic_driver.words.orders import JobSpec
from launcher.join.node import Membership
from rendezvous.client import RendezvousClient
from rendezvous.server import RendezvousServer

OFFER = NodeReport("the-name", "the-machine", "the-session", "1.0", 2)
JOINED = Joined("the-name", "the-run", "the node's token", "the agent's token", "", 30.0)
TOKEN = "the token"


class ReportsUnanswered:
    """A driver that takes no report of a node: it has just died, or is stopped."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def add_to(self, app: web.Application) -> None:
        app.router.add_post(NODES_PATH, self._take)

    async def _take(self, request: web.Request) -> web.Response:
        self.asked.set()
        await asyncio.sleep(3600)
        return web.Response()


@contextmanager
def place_with_a_driver_that_has_gone() -> Iterator[tuple[Membership, ReportsUnanswered]]:
    driver = ReportsUnanswered()
    with (
        RendezvousServer(token=TOKEN, access=job_access(), routes=driver.add_to) as server,
        RendezvousClient(server.url, TOKEN) as client,
    ):
        spec = JobSpec("the-run", ("true",), "/", {}, 30.0, 0, driver_timeout=600.0)
        server.post(first_documents(1, spec, {}, server.url))
        place = Membership(client, JOINED, OFFER, print)
        server.post(first_documents(2, spec, {}, server.url))
        yield place, driver


@pytest.mark.timeout(60)
def test_a_signal_ends_the_wait_for_a_driver_that_has_died_while_the_node_came_back() -> None:
    reader, writer = os.pipe()
    with (
        closing(os.fdopen(reader, "rb")),
        closing(os.fdopen(writer, "wb", 0)) as signals,
        place_with_a_driver_that_has_gone() as (place, driver),
    ):

        def interrupt() -> None:
            assert driver.asked.wait(30)
            signals.write(b"\x0f")

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        assert place.await_order(reader) is place.order
        interrupting.join()
        assert driver.asked.is_set()
