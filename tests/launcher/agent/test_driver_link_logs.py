"""The lines of workers on their way to the driver: their order, their pace, and the bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from elastic_driver.words.progress import MAX_OUTPUT_LINES, LogsTaken, WorkerLines
from launcher.agent import driver_link
from launcher.agent.driver_link import RecordedOutput
from rendezvous.errors import RequestError, UnreachableError


class Driver:
    """Takes what is posted while it is `up`."""

    def __init__(self) -> None:
        self.batches: list[WorkerLines] = []
        self.up = asyncio.Event()
        self.error: Exception | None = None
        self.wait = 0.0

    async def post(self, path: str, body: bytes) -> bytes:
        assert path == "/v1/logs"
        await self.up.wait()
        if self.error is not None:
            raise self.error
        self.batches.append(msgspec.json.decode(body, type=WorkerLines))
        return msgspec.json.encode(LogsTaken(self.wait))

    def texts(self) -> list[str]:
        return [line.text for batch in self.batches for line in batch.lines]


def play(scene: Callable[[Driver, RecordedOutput], Coroutine[Any, Any, None]]) -> None:
    """Run a scene with lines that are being sent."""

    async def main() -> None:
        driver = Driver()
        output = RecordedOutput("a", 1, driver.post)
        running = asyncio.create_task(output.run())
        try:
            await asyncio.wait_for(scene(driver, output), 30.0)
            assert not running.done()
        finally:
            running.cancel()

    asyncio.run(main())


def test_lines_arrive_in_their_order_with_the_rank_that_the_worker_had() -> None:
    async def scene(driver: Driver, output: RecordedOutput) -> None:
        driver.up.set()
        output.take("a.0.1", 3, 1, [b"one", b"two \xff"])
        output.take("a.0.1", 2, 2, [b"three"])
        await output.drain(30.0)
        lines = [line for batch in driver.batches for line in batch.lines]
        assert [(x.worker, x.rank, x.stream) for x in lines] == [
            ("a.0.1", 3, 1),
            ("a.0.1", 3, 1),
            ("a.0.1", 2, 2),
        ]
        assert driver.texts() == ["one", "two �", "three"]
        output.take("a.0.1", 2, 1, [b"four"])
        await output.drain(30.0)
        assert [batch.first for batch in driver.batches][-1] == 4

    play(scene)


def test_while_there_is_no_driver_lines_wait_and_the_oldest_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_link, "MOST_RECORDED_BYTES", 10 * (100 + 1))

    async def scene(driver: Driver, output: RecordedOutput) -> None:
        for number in range(30):
            output.take("a.0.1", 0, 1, [b"%d" % (number % 10)])
        driver.up.set()
        await output.drain(30.0)
        assert driver.texts() == [str(number) for number in range(10)]
        assert driver.batches[0].dropped == 20
        output.take("a.0.1", 0, 1, [b"later"])
        await output.drain(30.0)
        assert driver.batches[-1].dropped == 0

    play(scene)


@pytest.mark.parametrize("line", ["ä" * 50, "\U0001f642" * 25], ids=["two", "four"])
def test_what_waits_is_counted_in_bytes_whatever_the_alphabet(
    monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Bytes came in and characters went out: the count ran away until nothing was left to drop."""
    monkeypatch.setattr(driver_link, "MOST_RECORDED_BYTES", 10 * (100 + 100))

    async def scene(driver: Driver, output: RecordedOutput) -> None:
        for number in range(200):
            output.take("a.0.1", 0, 1, [f"{number % 10}{line}".encode()[:100]])
        driver.up.set()
        await output.drain(30.0)
        assert [text[0] for text in driver.texts()] == [str(number) for number in range(10)]
        assert driver.batches[0].dropped == 190

    play(scene)


@pytest.mark.parametrize(
    "error",
    [
        RequestError("http://driver", 503, "busy", "later"),
        UnreachableError("http://driver", 1.0, "x"),
    ],
)
def test_what_the_driver_does_not_take_is_left_out_and_the_agent_goes_on(error: Exception) -> None:
    async def scene(driver: Driver, output: RecordedOutput) -> None:
        driver.up.set()
        driver.error = error
        output.take("a.0.1", 0, 1, [b"lost"])
        await output.drain(30.0)
        driver.error = None
        output.take("a.0.1", 0, 1, [b"kept"])
        await output.drain(30.0)
        assert driver.texts() == ["kept"]
        assert driver.batches[0].dropped == 1

    play(scene)


def test_one_request_has_a_bounded_number_of_lines() -> None:
    async def scene(driver: Driver, output: RecordedOutput) -> None:
        driver.up.set()
        output.take("a.0.1", 0, 1, [b""] * (MAX_OUTPUT_LINES + 1))
        await output.drain(30.0)
        assert [len(batch.lines) for batch in driver.batches] == [
            driver_link.RECORDED_BATCH_BYTES // 100 + 1,
            MAX_OUTPUT_LINES + 1 - (driver_link.RECORDED_BATCH_BYTES // 100 + 1),
        ]

    play(scene)
