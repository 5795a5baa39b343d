from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from rendezvous.repeats import Limits, Repeats
from rendezvous.server import RendezvousServer
from rendezvous.service import StoreService
from rendezvous.wire import Add, Get, Number, Set
from tests.rendezvous.common import TOKEN, eventually, request


def play(scene: Callable[[StoreService, Repeats], Awaitable[None]], **limits: float) -> None:
    """Play a scene on a loop with a store of its own."""

    async def main() -> None:
        service = StoreService()
        repeats = Repeats(service, Limits(**limits))  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(scene(service, repeats), 20)
        finally:
            service.close()

    asyncio.run(main())


async def total(service: StoreService) -> int:
    (result,) = await service.carry_out([Add("n", 0)])
    assert isinstance(result, Number)
    return result.number


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_a_repeat_gets_the_first_answer_and_changes_nothing() -> None:
    async def scene(service: StoreService, repeats: Repeats) -> None:
        first = await repeats.results("id", [Add("n", 1)])
        await service.carry_out([Add("n", 10)])
        assert await repeats.results("id", [Add("n", 1)]) == first
        assert await repeats.results("other", [Add("n", 1)]) != first
        assert await total(service) == 12

    play(scene)


def test_a_repeat_joins_the_first_while_that_one_waits() -> None:
    async def scene(service: StoreService, repeats: Repeats) -> None:
        operations = [Add("n", 1), Get(("go",), wait=20), Add("n", 1)]
        both = [asyncio.create_task(repeats.results("id", operations)) for _ in range(2)]
        await until(lambda: service.waiting == 1)
        await service.carry_out([Set("go")])
        one, other = await asyncio.gather(*both)
        assert one == other
        assert await total(service) == 2

    play(scene)


def test_a_request_whose_client_left_goes_on_where_it_stopped() -> None:
    async def scene(service: StoreService, repeats: Repeats) -> None:
        operations = [Add("n", 1), Get(("go",), wait=20), Add("n", 10)]
        first = asyncio.create_task(repeats.results("id", operations))
        await until(lambda: service.waiting == 1)
        first.cancel()
        await asyncio.wait((first,))
        assert service.waiting == 0
        repeat = asyncio.create_task(repeats.results("id", operations))
        await until(lambda: service.waiting == 1)
        assert await total(service) == 1
        await service.carry_out([Set("go")])
        results = await repeat
        assert (results[0], results[2]) == (Number(1), Number(11))

    play(scene)


def test_one_of_two_clients_leaving_ends_nothing() -> None:
    async def scene(service: StoreService, repeats: Repeats) -> None:
        operations = [Add("n", 1), Get(("go",), wait=20)]
        stays, leaves = (asyncio.create_task(repeats.results("id", operations)) for _ in range(2))
        await until(lambda: service.waiting == 1)
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.wait((leaves,))
        assert service.waiting == 1
        await service.carry_out([Set("go")])
        assert (await stays)[0] == Number(1)

    play(scene)


@pytest.mark.parametrize("limits", [{"count": 3}, {"size": 100}, {"seconds": 0.0}])
def test_only_so_much_is_remembered(limits: dict[str, float]) -> None:
    async def scene(service: StoreService, repeats: Repeats) -> None:
        for n in range(50):
            await repeats.results(f"id{n}", [Add("n", 1)])
        assert len(repeats) <= 5
        await repeats.results("id0", [Add("n", 1)])  # forgotten, so carried out anew
        assert await total(service) == 51

    play(scene, **limits)


def test_a_request_that_waits_is_not_forgotten() -> None:
    async def scene(service: StoreService, repeats: Repeats) -> None:
        operations = [Add("n", 1), Get(("go",), wait=20)]
        first = asyncio.create_task(repeats.results("id", operations))
        await until(lambda: service.waiting == 1)
        for n in range(10):
            await repeats.results(f"id{n}", [Set("other")])
        repeat = asyncio.create_task(repeats.results("id", operations))
        await asyncio.sleep(0)
        await service.carry_out([Set("go")])
        assert await first == await repeat
        assert await total(service) == 1

    play(scene, count=3)


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
