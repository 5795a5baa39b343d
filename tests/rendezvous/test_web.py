from __future__ import annotations

import asyncio
import threading

from aiohttp import web

from rendezvous.server import RendezvousServer
from tests.rendezvous.common import TOKEN, eventually, request


def test_a_repeated_post_reaches_its_handler_once() -> None:
    calls: list[bytes] = []
    release = threading.Event()

    async def handler(received: web.Request) -> web.Response:
        calls.append(await received.read())
        while not release.is_set():
            await asyncio.sleep(0.005)
        return web.Response(text=f"answer {len(calls)}", status=202)

    def routes(app: web.Application) -> None:
        app.router.add_post("/v1/events", handler)

    with RendezvousServer(token=TOKEN, routes=routes) as server:
        answers: list[tuple[int, bytes]] = []

        def post() -> None:
            status, _, body = request(server, "POST", "/v1/events", b"{}", **{"X-Request-Id": "1"})
            answers.append((status, body))

        threads = [threading.Thread(target=post) for _ in range(2)]
        for thread in threads:
            thread.start()
        eventually(lambda: bool(calls), "the handler is called")
        release.set()
        for thread in threads:
            thread.join(10)
        post()
        assert answers == [(202, b"answer 1")] * 3
        request(server, "POST", "/v1/events", b"{}", **{"X-Request-Id": "2"})
        request(server, "POST", "/v1/events", b"{}")
        assert len(calls) == 3


def test_a_post_that_met_a_bug_of_the_server_is_tried_again() -> None:
    calls: list[int] = []

    async def handler(_request: web.Request) -> web.Response:
        calls.append(1)
        return web.Response(status=503 if len(calls) == 1 else 200)

    def routes(app: web.Application) -> None:
        app.router.add_post("/v1/events", handler)

    with RendezvousServer(token=TOKEN, routes=routes) as server:
        statuses = [
            request(server, "POST", "/v1/events", b"{}", **{"X-Request-Id": "1"})[0]
            for _ in range(3)
        ]
    assert statuses == [503, 200, 200]
    assert len(calls) == 2
