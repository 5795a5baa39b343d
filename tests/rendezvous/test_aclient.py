from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from rendezvous.aclient import AsyncRendezvousClient
from rendezvous.errors import RequestError, SealedError, UnauthorizedError, UnreachableError
from rendezvous.server import RendezvousServer
from rendezvous.wire import Add, DeletePrefix, Entry, Number, Set, Watch
from tests.rendezvous.common import TOKEN, LossyProxy, eventually, free_port, waiting


def play(
    url: str,
    scene: Callable[[AsyncRendezvousClient], Awaitable[None]],
    token: str = TOKEN,
    timeout: float = 10.0,
) -> None:
    async def main() -> None:
        async with AsyncRendezvousClient(url, token, timeout) as client:
            await asyncio.wait_for(scene(client), 30)

    asyncio.run(main())


def test_calls_run_beside_each_other(server: RendezvousServer) -> None:
    async def scene(client: AsyncRendezvousClient) -> None:
        watching = asyncio.create_task(client.watch({"a": 0}, wait=20))
        while not waiting(server):
            await asyncio.sleep(0.005)
        assert await client.set("a", b"1") == 1
        assert await watching == {"a": Entry(b"1", 1)}
        assert await client.get("a") == Entry(b"1", 1)
        assert await client.get("a", wait=0.01, after=1) is None
        assert await client.watch({"b": 0}, wait=0.01) == {}
        assert await client.get_json("/healthz") == {"status": "ok"}

    play(server.url, scene)


def test_a_lease_is_renewed_and_a_key_watched_in_one_request(server: RendezvousServer) -> None:
    async def scene(client: AsyncRendezvousClient) -> None:
        results = await client.batch(Set("lease", b"", lease=5), Watch({"lease": 0}, wait=5))
        assert len(results) == 2

    play(server.url, scene)


def test_a_cancelled_call_leaves_no_waiter(server: RendezvousServer) -> None:
    async def scene(client: AsyncRendezvousClient) -> None:
        watching = asyncio.create_task(client.watch({"a": 0}, wait=60))
        while not waiting(server):
            await asyncio.sleep(0.005)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching

    play(server.url, scene)
    eventually(lambda: waiting(server) == 0, "the waiter is gone")


def test_a_lost_answer_is_asked_for_again_and_nothing_is_done_twice(
    server: RendezvousServer,
) -> None:
    async def scene(client: AsyncRendezvousClient) -> None:
        assert await client.batch(Add("n", 1)) == (Number(1),)

    with LossyProxy(server, losses=3) as proxy:
        play(proxy.url, scene)
        assert proxy.losses == 0
    assert server.apply([Add("n", 0)]) == (Number(1),)


def test_errors_are_those_of_the_blocking_client(server: RendezvousServer) -> None:
    server.apply([DeletePrefix("over/", seal=True)])

    async def scene(client: AsyncRendezvousClient) -> None:
        with pytest.raises(SealedError):
            await client.set("over/a", b"")
        with pytest.raises(RequestError, match="404 not_found"):
            await client.post_json("/no/such/route", b"{}")

    async def stranger(client: AsyncRendezvousClient) -> None:
        with pytest.raises(UnauthorizedError):
            await client.get("a")

    async def lonely(client: AsyncRendezvousClient) -> None:
        with pytest.raises(UnreachableError, match="driver still running"):
            await client.get("a")

    play(server.url, scene)
    play(server.url, stranger, token="another")
    play(f"http://127.0.0.1:{free_port()}", lonely, timeout=0.3)


def test_a_server_that_is_stopping_is_asked_again() -> None:
    calls: list[int] = []

    async def handler(_request: web.Request) -> web.Response:
        calls.append(1)
        return web.Response(status=503 if len(calls) < 3 else 200, body=b"done")

    def routes(app: web.Application) -> None:
        app.router.add_post("/v1/events", handler)

    async def scene(client: AsyncRendezvousClient) -> None:
        assert await client.post_json("/v1/events", b"{}") == b"done"

    with RendezvousServer(token=TOKEN, routes=routes) as server:
        play(server.url, scene)
    assert len(calls) == 3
