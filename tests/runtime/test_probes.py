"""Probes tell an agent that lives from one that is gone, and from one that does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from elastic_driver.core.decisions import ProbeAgent
from elastic_driver.core.events import AgentProbed
from elastic_driver.reachability import Result, probe
from elastic_driver.runtime.suspects import Suspects
from launcher.agent.liveness import answer_probes
from rendezvous.server import RendezvousServer
from tests.runtime.waiting import until

PATIENCE_S = 0.4
T = TypeVar("T")


def play(scene: Callable[[], Awaitable[T]]) -> T:
    async def main() -> T:
        return await asyncio.wait_for(scene(), 20)

    return asyncio.run(main())


@contextlib.contextmanager
def stopped_process() -> Iterator[int]:
    """A port on which the kernel accepts connections and nobody reads them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_agent_answers_at_once(address: str) -> None:
    async def scene() -> tuple[Result, float]:
        server, port = await answer_probes(address)
        if server is None:
            pytest.skip(f"this machine has no {address}")
        began = time.monotonic()
        found = await probe(address, port, 10.0)
        server.close()
        return found, time.monotonic() - began

    result, seconds = play(scene)
    assert result == "answered"
    assert seconds < 2.0


def test_a_closed_port_refuses_at_once() -> None:
    began = time.monotonic()
    assert play(lambda: probe("127.0.0.1", free_port(), 10.0)) == "refused"
    assert time.monotonic() - began < 2.0


def test_a_stopped_process_is_silent_for_all_of_the_time() -> None:
    with stopped_process() as port:
        began = time.monotonic()
        assert play(lambda: probe("127.0.0.1", port, PATIENCE_S)) == "silent"
        assert time.monotonic() - began >= PATIENCE_S * 0.99


def test_an_answer_to_a_late_attempt_counts() -> None:
    """The first attempts meet a process that does not answer, and nothing after the third."""

    async def scene() -> Result:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            port, loop = listener.getsockname()[1], asyncio.get_running_loop()
            probing = asyncio.create_task(probe("127.0.0.1", port, PATIENCE_S))
            unanswered = [(await loop.sock_accept(listener))[0] for _ in range(2)]
            third, _ = await loop.sock_accept(listener)
            await loop.sock_sendall(third, b"+")
            result = await probing
            for connection in (*unanswered, third):
                connection.close()
            return result

    assert play(scene) == "answered"


def test_an_agent_that_nothing_can_listen_for_says_so() -> None:
    assert play(lambda: answer_probes("192.0.2.1")) == (None, 0)  # not an address of this machine


def test_a_thousand_hosts_are_probed_at_once_beside_other_work() -> None:
    found: list[object] = []
    with RendezvousServer(token="t") as server, stopped_process() as silent:
        refused, suspects = free_port(), Suspects(found.append, server)
        began = time.monotonic()
        for n in range(1000):
            port = silent if n == 0 else refused
            asked = ProbeAgent(f"h{n}", 1, "127.0.0.1", port, PATIENCE_S, n, "a test")
            suspects.probe(asked)
        until(lambda: len(found) == 1000, "all probes have a result")
        took = time.monotonic() - began
    results = {e.host: e.result for e in found if isinstance(e, AgentProbed)}
    assert results.pop("h0") == "silent"
    assert set(results.values()) == {"refused"}
    assert took < 5.0, took
    print(f"1000 probes took {took:.2f} s")
