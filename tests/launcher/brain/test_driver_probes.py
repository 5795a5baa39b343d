"""What a look at the address of a driver shows, and the connection that stays."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from elastic_driver.brain.messages import DriverProbed, ProbeDriver
from elastic_driver.reachability import DriverPresence
from elastic_driver.token_roles import job_token
from launcher.brain import driver_probes as probes
from launcher.brain.driver_probes import Drivers
from rendezvous.auth import make_token
from tests.support.liveness import driver, stranger

TOKEN, BEGAN = make_token(), 5.0
pytestmark = pytest.mark.timeout(60)


def token_of(job: str) -> str:
    return job_token(TOKEN, job)


class Looks:
    """What was posted, and who is looked at."""

    def __init__(self) -> None:
        self.posted: list[DriverProbed] = []
        self.drivers = Drivers(TOKEN, self.posted.append)

    async def at(self, place: str, job: str = "j", began: float = BEGAN) -> str:
        """Look once; return the result."""
        before = len(self.posted)
        await self.drivers.look(ProbeDriver(job, began, place, "a test wants to know"))
        answer = self.posted[before]
        assert (answer.job, answer.began, answer.liveness) == (job, began, place)
        return answer.result

    async def at_once(self, job: str, place: str) -> str:
        """Look while others do; return the result."""
        await self.drivers.look(ProbeDriver(job, BEGAN, place, "a test wants to know"))
        return next(each.result for each in self.posted if each.job == job)

    async def until_lost(self, job: str = "j") -> None:
        await with_limit(lambda: (self.posted[-1].job, self.posted[-1].result) == (job, "lost"))


async def with_limit(look: Callable[[], bool], within: float = 10.0) -> None:
    for _ in range(int(within / 0.02)):
        if look():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {within} s")


@contextlib.asynccontextmanager
async def played(count: int = 1) -> AsyncIterator[list[DriverPresence]]:
    """So many drivers in this process, each with a port."""
    servers, found = [], list[DriverPresence]()
    lines = set[asyncio.StreamWriter]()
    for number in range(count):
        listener = socket.create_server(("127.0.0.1", 0))
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        presence = DriverPresence(token_of(f"j{number}" if number else "j"), BEGAN, place)

        async def answer(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            presence: DriverPresence = presence,
        ) -> None:
            lines.add(writer)
            writer.write(presence.answer((await reader.readline())[:-1]) or b"")

        servers.append(await asyncio.start_server(answer, sock=listener))
        found.append(presence)
    try:
        yield found
    finally:
        for server in servers:
            server.close()
        for line in lines:
            line.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_driver_is_watched_on_one_connection_until_it_has_ended(host: str) -> None:
    async def play() -> None:
        looks = Looks()
        with driver(token_of("j"), BEGAN, host=host) as process:
            assert await looks.at(process.address) == "answered"
            (first,) = looks.drivers.kept.values()
            process.stop()
            assert await looks.at(process.address) == "answered", "its kernel holds the connection"
            assert list(looks.drivers.kept.values()) == [first]
            process.kill()
            await looks.until_lost()
            assert not looks.drivers.kept
            assert await looks.at(process.address) == "refused"

    asyncio.run(play())


@pytest.mark.parametrize("kind", ["silent", "garbage", "long garbage", "end"])
def test_a_stranger_at_its_port_proves_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LOOK_S", 1.0)
    says = {"garbage": b"0" * 64 + b"\n", "long garbage": b"x" * 2**16}.get(kind, b"")

    async def play() -> None:
        looks = Looks()
        with stranger(0, says, ends=kind == "end") as server:
            assert await looks.at(server.place) == "unproved"
            assert not looks.drivers.kept

    asyncio.run(play())


@pytest.mark.parametrize("whose", ["another job", "another run", "the same run elsewhere"])
def test_a_stranger_that_passes_questions_on_proves_nothing(whose: str) -> None:
    token = token_of("other" if whose == "another job" else "j")
    began = BEGAN + 1 if whose == "another run" else BEGAN

    async def play() -> None:
        looks = Looks()
        with driver(token, began) as living, stranger(0, relays_to=living.port) as server:
            assert await looks.at(server.place) == "unproved"
            job = "other" if whose == "another job" else "j"
            assert await looks.at(living.address, job, began) == "answered", "it lives"

    asyncio.run(play())


def test_who_listens_in_vain_for_a_question_is_told_nothing_of_the_token() -> None:
    with stranger(0) as server:
        looks = Looks()
        asyncio.run(looks.drivers.look(ProbeDriver("j", BEGAN, server.place, "a test")))
    heard = server.heard.decode()
    assert heard.startswith("?")
    assert len(heard) == len("?") + 64 + len(" ") + 64 + len("\n")
    assert token_of("j").rpartition(":")[2] not in heard


def test_a_thousand_drivers_cost_no_thread_and_end_with_their_jobs() -> None:
    async def play() -> None:
        looks, count = Looks(), 1000
        before = threading.active_count()
        async with played(count) as found:
            jobs = ["j", *(f"j{number}" for number in range(1, count))]
            each = zip(jobs, found, strict=True)
            results = await asyncio.gather(*(looks.at_once(j, p.place) for j, p in each))
            assert set(results) == {"answered"}
            assert len(looks.drivers.kept) == count
            assert threading.active_count() == before
            await looks.drivers.keep_only({("j", BEGAN): found[0].place})
            assert list(looks.drivers.kept) == [("j", BEGAN)]
            await asyncio.sleep(0.1)
            assert "lost" not in {each.result for each in looks.posted}
            await looks.drivers.keep_only({})

    asyncio.run(play())


def test_a_driver_at_another_port_takes_the_place_of_the_one_before() -> None:
    async def play() -> None:
        looks = Looks()
        with driver(token_of("j"), BEGAN) as before, driver(token_of("j"), BEGAN) as later:
            assert await looks.at(before.address) == "answered"
            assert await looks.at(later.address) == "answered"
            (kept,) = looks.drivers.kept.values()
            assert kept.asked.liveness == later.address
            before.kill()
            await asyncio.sleep(0.1)
            assert looks.posted[-1].result == "answered"
            later.kill()
            await looks.until_lost()

    asyncio.run(play())


def test_a_machine_that_has_gone_without_a_word_is_noticed_by_the_kernel() -> None:
    async def play() -> None:
        looks = Looks()
        async with played() as (presence,):
            assert await looks.at(presence.place) == "answered"
            (kept,) = looks.drivers.kept.values()
            own = kept._transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
            idle, each, times = (own.getsockopt(socket.IPPROTO_TCP, name) for name in options)
            assert idle + each * times <= 30
            await looks.drivers.keep_only({})

    asyncio.run(play())


@pytest.mark.parametrize("liveness", ["", "nonsense", "127.0.0.1:x", "host:80", "127.0.0.1:99999"])
def test_what_is_no_address_shows_nothing(liveness: str) -> None:
    assert asyncio.run(Looks().at(liveness)) == "silent"
