"""Lines that wait for the next driver: their order, their numbers, and the bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from elastic_driver.console import HIGH_WATER
from elastic_driver.words.progress import MAX_OUTPUT_LINES, OutputLines
from launcher.agent import driver_link
from launcher.agent.driver_link import PostedOutput
from rendezvous.errors import RequestError


class Driver:
    """Takes what is posted while it is `up`."""

    def __init__(self) -> None:
        self.batches: list[OutputLines] = []
        self.up = asyncio.Event()
        self.refuses = False

    async def post(self, path: str, body: bytes) -> None:
        assert path == "/v1/output"
        await self.up.wait()
        if self.refuses:
            raise RequestError("http://driver", 413, "too_large", "too much")
        self.batches.append(msgspec.json.decode(body, type=OutputLines))

    def lines(self) -> list[tuple[int, str]]:
        return [(line.stream, line.text) for batch in self.batches for line in batch.lines]


def play(scene: Callable[[Driver, PostedOutput], Coroutine[Any, Any, None]]) -> list[bool]:
    """Run a scene with an output that is being posted; return the calls of `flow`."""
    flows: list[bool] = []

    async def main() -> None:
        driver = Driver()
        output = PostedOutput("a", 1, driver.post, flows.append)
        running = asyncio.create_task(output.run())
        try:
            await asyncio.wait_for(scene(driver, output), 20.0)
        finally:
            running.cancel()

    asyncio.run(main())
    return flows


def test_lines_of_both_streams_arrive_in_their_order_with_numbers_from_1() -> None:
    async def scene(driver: Driver, output: PostedOutput) -> None:
        output.take(1, b"one\n\ntwo\n")
        output.take(2, b"three \xff\n")
        driver.up.set()
        await output.drained()
        output.take(1, b"four\n")
        await output.drained()
        wanted = [(1, "one"), (1, ""), (1, "two"), (2, "three \ufffd"), (1, "four")]
        assert driver.lines() == wanted
        numbers = [batch.first + n for batch in driver.batches for n in range(len(batch.lines))]
        assert numbers == [1, 2, 3, 4, 5]

    play(scene)


def test_many_lines_go_in_several_requests() -> None:
    async def scene(driver: Driver, output: PostedOutput) -> None:
        driver.up.set()
        output.take(1, b"\n" * (2 * MAX_OUTPUT_LINES + 1))
        await output.drained()
        assert [len(batch.lines) for batch in driver.batches] == [MAX_OUTPUT_LINES] * 2 + [1]

    play(scene)


def test_the_oldest_lines_beyond_the_bound_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_link, "MAX_BYTES", 40)

    async def scene(driver: Driver, output: PostedOutput) -> None:
        for n in range(10, 30):
            output.take(1, b"line %d\n" % n)
        driver.up.set()
        await output.drained()
        (_, told), *kept = driver.lines()
        assert "15 lines of output dropped" in told
        assert kept == [(1, f"line {n}") for n in range(25, 30)]

    play(scene)


def test_writers_are_held_up_while_much_waits() -> None:
    async def scene(driver: Driver, output: PostedOutput) -> None:
        output.take(1, b"x" * 100 + b"\n")
        await asyncio.sleep(0)
        output.take(1, b"x" * HIGH_WATER + b"\n")
        driver.up.set()
        await output.drained()

    flows = play(scene)
    assert False in flows
    assert flows[-1] is True


def test_what_the_driver_refuses_does_not_hold_up_what_follows() -> None:
    async def scene(driver: Driver, output: PostedOutput) -> None:
        driver.refuses = True
        driver.up.set()
        output.take(1, b"one\ntwo\n")
        await output.drained()
        driver.refuses = False
        output.take(1, b"three\n")
        await output.drained()
        (_, told), line = driver.lines()
        assert "2 lines of output dropped" in told
        assert line == (1, "three")

    play(scene)


def test_what_no_driver_takes_is_given_back() -> None:
    async def scene(_driver: Driver, output: PostedOutput) -> None:
        output.take(1, b"one\n")
        await asyncio.sleep(0.01)  # it is on its way
        output.take(1, b"two\nthree\n")
        output.take(2, b"four\n")
        assert output.give_back() == [(1, b"one\n"), (1, b"two\nthree\n"), (2, b"four\n")]
        assert output.give_back() == []

    play(scene)
