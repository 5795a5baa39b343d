"""Work that takes long leaves room for other work in each turn of the loop."""

from __future__ import annotations

import asyncio
import itertools
import time

from rendezvous.fairness import SLICE_S, Queue, Turns


def test_between_two_pieces_of_long_work_the_loop_does_everything_else() -> None:
    seen: list[str] = []

    def long() -> None:
        seen.append("long")
        time.sleep(2 * SLICE_S)

    async def main() -> None:
        turns = Turns()
        for _ in range(5):
            turns.add(Queue.NEW, long)
        while seen.count("long") < 5:
            await asyncio.sleep(0)
            seen.append("other")

    asyncio.run(main())
    assert [a for a, b in itertools.pairwise(seen) if a == b == "long"] == []


def test_quick_work_shares_a_turn_and_keeps_its_order() -> None:
    seen: list[int] = []

    async def main() -> None:
        turns = Turns()
        for number in range(20):
            turns.add(Queue.NEW, lambda number=number: seen.append(number))
        while len(seen) < 20:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert seen == list(range(20))


def test_callers_that_wait_go_on_one_in_each_turn_and_those_that_left_are_skipped() -> None:
    async def main() -> None:
        turns, order = Turns(), list[int]()

        async def caller(number: int) -> None:
            await turns.wait(Queue.GENERAL)
            order.append(number)
            await asyncio.sleep(0)
            assert order[-1] == number

        callers = [asyncio.create_task(caller(number)) for number in range(6)]
        await asyncio.sleep(0)
        callers[3].cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        assert order == [0, 1, 2, 4, 5]
        await asyncio.gather(*callers[:3], *callers[4:])

    asyncio.run(main())


def test_work_that_fails_does_not_stop_the_queue() -> None:
    async def main() -> list[int]:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        turns, done = Turns(), list[int]()
        turns.add(Queue.NEW, lambda: 1 // 0)
        turns.add(Queue.NEW, lambda: done.append(1))
        await turns.wait(Queue.GENERAL)
        return done

    assert asyncio.run(main()) == [1]


def test_the_queues_take_turns() -> None:
    seen: list[str] = []

    async def main() -> None:
        turns = Turns()
        for _ in range(3):
            turns.add(Queue.COSTLY, lambda: seen.append("costly"))
        turns.add(Queue.NEW, lambda: seen.append("new"))
        turns.add(Queue.ANSWER, lambda: seen.append("answer"))
        await turns.wait(Queue.GENERAL)
        await turns.wait(Queue.GENERAL)

    asyncio.run(main())
    assert sorted(seen[:3]) == ["answer", "costly", "new"]
    assert seen[3:] == ["costly"] * 2
