"""A request that is sent twice is carried out once, and deadlines come true."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import pytest

from rendezvous.answers import AnswerMemory
from rendezvous.service import REJOIN_S, Results, StoreService
from rendezvous.wire import Add, CompareSet, Delete, Get, Number, Set


def play(scene: Callable[[StoreService], Awaitable[None]], **limits: float) -> None:
    """Play a scene on a loop with a store of its own."""

    async def main() -> None:
        memory: AnswerMemory[Results] = AnswerMemory(**limits)  # type: ignore[arg-type]
        service = StoreService(memory=memory)
        try:
            await asyncio.wait_for(scene(service), 20)
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
    async def scene(service: StoreService) -> None:
        first = await service.carry_out([Add("n", 1)], "id")
        await service.carry_out([Add("n", 10)])
        assert await service.carry_out([Add("n", 1)], "id") == first
        assert await service.carry_out([Add("n", 1)], "other") != first
        assert await total(service) == 12

    play(scene)


def test_a_repeat_joins_the_first_while_that_one_waits() -> None:
    async def scene(service: StoreService) -> None:
        operations = [Add("n", 1), Get(("go",), wait=20), Add("n", 1)]
        both = [asyncio.create_task(service.carry_out(operations, "id")) for _ in range(2)]
        await until(lambda: service.waiting == 1)
        await service.carry_out([Set("go")])
        one, other = await asyncio.gather(*both)
        assert one == other
        assert await total(service) == 2

    play(scene)


def test_a_request_whose_client_left_goes_on_where_it_stopped() -> None:
    async def scene(service: StoreService) -> None:
        operations = [Add("n", 1), Get(("go",), wait=20), Add("n", 10)]
        first = asyncio.create_task(service.carry_out(operations, "id"))
        await until(lambda: service.waiting == 1)
        first.cancel()
        await asyncio.wait((first,))
        assert service.waiting == 0
        repeat = asyncio.create_task(service.carry_out(operations, "id"))
        await until(lambda: service.waiting == 1)
        assert await total(service) == 1
        await service.carry_out([Set("go")])
        results = await repeat
        assert (results[0], results[2]) == (Number(1), Number(11))

    play(scene)


def test_a_client_that_cannot_be_answered_costs_the_others_nothing() -> None:
    async def scene(service: StoreService) -> None:
        def broken(_results: Results | None) -> None:
            raise ValueError("nobody takes this answer")

        question = [Get(("go",), wait=20)]
        answers = [asyncio.create_task(service.carry_out(question)) for _ in range(2)]
        await until(lambda: service.waiting == 2)
        service.ask(question, broken)
        service.ask(question, broken, "id")
        answers += [asyncio.create_task(service.carry_out(question, i)) for i in ("", "id")]
        await until(lambda: service.waiting == 5)
        await service.carry_out([Set("go")])
        found = await asyncio.gather(*answers)
        assert found == [found[0]] * 4

    play(scene)


def test_one_of_two_clients_leaving_ends_nothing() -> None:
    async def scene(service: StoreService) -> None:
        operations = [Add("n", 1), Get(("go",), wait=20)]
        stays, leaves = (asyncio.create_task(service.carry_out(operations, "id")) for _ in range(2))
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
    async def scene(service: StoreService) -> None:
        for n in range(50):
            await service.carry_out([Add("n", 1)], f"id{n}")
        assert len(service._memory._kept) <= 5
        await service.carry_out([Add("n", 1)], "id0")  # forgotten, so carried out anew
        assert await total(service) == 51

    play(scene, **limits)


def test_a_request_that_waits_is_not_forgotten() -> None:
    async def scene(service: StoreService) -> None:
        operations = [Add("n", 1), Get(("go",), wait=20)]
        first = asyncio.create_task(service.carry_out(operations, "id"))
        await until(lambda: service.waiting == 1)
        for n in range(10):
            await service.carry_out([Set("other")], f"id{n}")
        repeat = asyncio.create_task(service.carry_out(operations, "id"))
        await asyncio.sleep(0)
        await service.carry_out([Set("go")])
        assert await first == await repeat
        assert await total(service) == 1

    play(scene, count=3)


def with_leases(scene: Callable[[StoreService, asyncio.Queue[str]], Awaitable[None]]) -> None:
    """Play a scene with a service, and a queue of the leases that expired."""

    async def main() -> None:
        expired: asyncio.Queue[str] = asyncio.Queue()
        service = StoreService(expired.put_nowait)
        await asyncio.wait_for(scene(service, expired), 20)
        service.close()

    asyncio.run(main())


def test_the_earliest_deadline_comes_first_whatever_was_set_before_and_after_it() -> None:
    async def scene(service: StoreService, expired: asyncio.Queue[str]) -> None:
        for key, lease in (("late", 600.0), ("early", 0.02), ("later", 900.0), ("next", 0.04)):
            await service.carry_out([Set(key, lease=lease)])
        assert [await expired.get(), await expired.get()] == ["early", "next"]
        await service.carry_out([Set("again", lease=0.01)])
        assert await expired.get() == "again"
        assert expired.empty()

    with_leases(scene)


def test_no_lease_expires_once_the_service_is_closed() -> None:
    async def scene(service: StoreService, expired: asyncio.Queue[str]) -> None:
        await service.carry_out([Set("a", lease=0.001)])
        service.close()
        await asyncio.sleep(0.01)
        assert expired.empty()

    with_leases(scene)


def test_leases_are_postponed_when_the_loop_stood_still(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rendezvous")

    async def scene(service: StoreService, expired: asyncio.Queue[str]) -> None:
        await service.carry_out([Set("a", lease=0.01)])
        time.sleep(0.6)
        await asyncio.sleep(0.01)
        assert expired.empty()
        (told,) = caplog.records
        assert "held up for 0." in told.message
        assert told.levelno == logging.INFO  # a busy machine does it for a moment
        await service.carry_out([Set("a", lease=0.01)])
        assert await expired.get() == "a"

    with_leases(scene)


def with_clients(scene: Callable[[StoreService, list[str]], Awaitable[None]]) -> None:
    """Play a scene with a service, and a list of the leases whose clients went away."""

    async def main() -> None:
        left: list[str] = []
        service = StoreService(on_client_left=left.append)
        await asyncio.wait_for(scene(service, left), 20)
        service.close()

    asyncio.run(main())


WAITS = (Set("a/lease", lease=60.0), Get(("go",), wait=20))


async def go_away(service: StoreService, request_id: str) -> None:
    waiting = asyncio.create_task(service.carry_out(WAITS, request_id))
    await until(lambda: service.waiting == 1)
    waiting.cancel()
    await asyncio.wait((waiting,))


def test_the_leases_of_a_client_that_goes_away_while_it_waits_are_named() -> None:
    async def scene(service: StoreService, left: list[str]) -> None:
        await go_away(service, "id")
        assert left == []  # it may come back
        await until_true(lambda: left == ["a/lease"])

    with_clients(scene)


def test_a_client_that_comes_back_on_another_connection_has_not_left() -> None:
    async def scene(service: StoreService, left: list[str]) -> None:
        await go_away(service, "id")
        again = asyncio.create_task(service.carry_out(WAITS, "id"))  # the same request
        await until(lambda: service.waiting == 1)
        await asyncio.sleep(2 * REJOIN_S)
        await service.carry_out([Set("go")])
        await again
        await service.carry_out([Delete("go")])
        await go_away(service, "next")
        renewed = await service.carry_out([Set("a/lease", lease=60.0)], "another")  # or another one
        assert renewed
        await asyncio.sleep(2 * REJOIN_S)
        assert left == []

    with_clients(scene)


async def until_true(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_values_that_compare_set_answers_with_count_in_the_memory_of_answers() -> None:
    async def scene(service: StoreService) -> None:
        await service.carry_out([Set("large", b"x" * 20_000)], "set")
        for n in range(20):
            await service.carry_out([CompareSet("large", b"wrong", b"")] * 10, f"id{n}")
        assert len(service._memory._kept) < 10

    play(scene, size=1_000_000)
