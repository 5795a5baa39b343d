"""Evidence about agents reaches the job, and probes tell agents that live from others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from elastic_driver import contract
from elastic_driver.job.decisions import ProbeAgent
from elastic_driver.job.events import AgentHeard, AgentProbed, AgentSuspected
from elastic_driver.reachability import Presence, Result, probe
from elastic_driver.runtime.api import job_access
from elastic_driver.runtime.probes import Suspects
from elastic_driver.token_roles import agent_token
from launcher.agent.lifetime import MOST, ProbePort
from rendezvous.server import RendezvousServer
from rendezvous.wire import DeletePrefix, Set
from tests.runtime.waiting import until
from tests.support.idle import probe_port_beside_idle
from tests.support.ports import free_port

PATIENCE_S = 0.4
TOKEN = "a-driver-s-token"
AGENT = Presence(agent_token(TOKEN, "a"), "a", 1)
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


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_agent_answers_at_once(address: str) -> None:
    async def scene() -> tuple[Result, float]:
        listener = ProbePort(AGENT.answer, pytest.fail)
        port = await listener.listen(address)
        if not port:
            pytest.skip(f"this machine has no {address}")
        began = time.monotonic()
        found = await probe(address, port, 10.0, AGENT.ask())
        listener.close()
        return found, time.monotonic() - began

    result, seconds = play(scene)
    assert result == "answered"
    assert seconds < 2.0


def test_a_closed_port_refuses_at_once() -> None:
    began = time.monotonic()
    assert play(lambda: probe("127.0.0.1", free_port(), 10.0, AGENT.ask())) == "refused"
    assert time.monotonic() - began < 2.0


def test_a_stopped_process_is_silent_for_all_of_the_time() -> None:
    with stopped_process() as port:
        began = time.monotonic()
        assert play(lambda: probe("127.0.0.1", port, PATIENCE_S, AGENT.ask())) == "silent"
        assert time.monotonic() - began >= PATIENCE_S * 0.99


@pytest.mark.parametrize("says", [b"+", b"+\n" * 40, b"0" * 64 + b"\n", b"", None])
def test_a_stranger_at_the_port_of_an_agent_is_not_the_agent(says: bytes | None) -> None:
    """The first byte was enough for an earlier version: a dead agent lived as long as its lease."""

    async def strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if says:
            writer.write(says)
        elif says is None:
            writer.write(await reader.readline())  # the question comes back
        await writer.drain()
        writer.close()

    async def scene() -> Result:
        async with await asyncio.start_server(strange, "127.0.0.1", 0) as stranger:
            port = stranger.sockets[0].getsockname()[1]
            return await probe("127.0.0.1", port, PATIENCE_S, AGENT.ask())

    assert play(scene) == ("silent" if says == b"" else "refused")


@pytest.mark.parametrize(
    "other",
    [
        Presence(AGENT.token, "a", 2),  # an agent that was started later
        Presence(AGENT.token, "b", 1),
        Presence(agent_token("another-job-s", "a"), "a", 1),
    ],
)
def test_another_agent_at_the_port_of_an_agent_is_not_the_agent(other: Presence) -> None:
    found: list[object] = []

    async def listen(port: ProbePort) -> int:
        return await port.listen("127.0.0.1")

    with RendezvousServer(token="t", access=job_access()) as server:
        suspects = Suspects(found.append, server, TOKEN)
        for number, agent in enumerate((AGENT, other)):
            listener = ProbePort(agent.answer, pytest.fail)
            port = asyncio.run_coroutine_threadsafe(listen(listener), server._running()[1])
            asked = ProbeAgent("a", 1, "127.0.0.1", port.result(10), 10.0, number, "a test")
            suspects.probe(asked)
            until(lambda n=number: len(found) == n + 1, "the probe has a result")  # type: ignore[misc]
            server._running()[1].call_soon_threadsafe(listener.close)
    assert [e.result for e in found if isinstance(e, AgentProbed)] == ["answered", "refused"]


def test_connections_that_say_nothing_keep_no_probe_out() -> None:
    async def scene() -> Result:
        async with probe_port_beside_idle(AGENT.answer, pytest.fail, MOST + 50) as port:
            return await probe("127.0.0.1", port, 10.0, AGENT.ask())

    assert play(scene) == "answered"


# Connects as fast as it can, as another user, and holds as many as the port has places.
_FLOOD = """
import encodings.idna, os, socket, sys
os.setuid(65534)
held = []
print("on", flush=True)
while True:
    made = socket.socket()
    made.setblocking(False)
    try:
        made.connect(("127.0.0.1", int(sys.argv[1])))
    except BlockingIOError:
        pass
    held.append(made)
    if len(held) > 500:
        held.pop(0).close()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may be somebody else")
def test_a_user_who_connects_without_end_keeps_no_probe_out() -> None:
    async def scene() -> list[Result]:
        listener = ProbePort(AGENT.answer, pytest.fail)
        port = await listener.listen("127.0.0.1")
        argv = [sys.executable, "-c", _FLOOD, str(port)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as flood:
            try:
                assert flood.stdout is not None
                assert flood.stdout.readline() == b"on\n"
                return [await probe("127.0.0.1", port, 2.0, AGENT.ask()) for _ in range(10)]
            finally:
                flood.kill()
                listener.close()

    assert play(scene) == ["answered"] * 10


def test_an_answer_to_a_late_attempt_counts() -> None:
    """The first attempts meet a process that does not answer, and nothing after the third."""

    async def scene() -> Result:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            port, loop = listener.getsockname()[1], asyncio.get_running_loop()
            asked = AGENT.ask()
            probing = asyncio.create_task(probe("127.0.0.1", port, PATIENCE_S, asked))
            unanswered = [(await loop.sock_accept(listener))[0] for _ in range(2)]
            third, _ = await loop.sock_accept(listener)
            await loop.sock_sendall(third, asked.answer)
            result = await probing
            for connection in (*unanswered, third):
                connection.close()
            return result

    assert play(scene) == "answered"


def test_an_agent_that_nothing_can_listen_for_says_so() -> None:
    nowhere = "192.0.2.1"  # not an address of this machine
    assert play(lambda: ProbePort(AGENT.answer, pytest.fail).listen(nowhere)) == 0


def test_a_thousand_hosts_are_probed_at_once_beside_other_work() -> None:
    found: list[object] = []
    with RendezvousServer(token="t", access=job_access()) as server, stopped_process() as silent:
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


HEARTBEAT = contract.agent_heartbeat("a", 1)
LOST = "its heartbeat did not come in time"


def test_an_agent_that_was_silent_is_heard_at_its_next_heartbeat() -> None:
    told: list[object] = []
    with RendezvousServer(token="t", access=job_access()) as server:
        suspects = Suspects(told.append, server)
        suspects.found("silent", "a", 1)
        suspects.found("backend", "a", 1, "ssh: connection reset")
        server.apply([Set(HEARTBEAT, lease=60.0)])
        until(lambda: len(told) == 3, f"it is heard once: {told}")
        assert told[:2] == [
            AgentSuspected("a", 1, "silent", LOST),
            AgentSuspected("a", 1, "backend", "ssh: connection reset"),
        ]
        assert told[2] == AgentHeard("a", 1)
        suspects.found("disconnected", "a", 1)  # a heartbeat that came before proves nothing
        server.apply([Set("another")])
        assert told[3:] == [
            AgentSuspected("a", 1, "disconnected", "its connection to the driver has closed")
        ]
        server.apply([Set(HEARTBEAT, lease=60.0)])
        until(lambda: told[4:] == [AgentHeard("a", 1)], "it is heard again")


def test_nobody_waits_for_the_heartbeat_of_an_agent_that_was_given_up() -> None:
    told: list[object] = []
    with RendezvousServer(token="t", access=job_access()) as server:
        suspects = Suspects(told.append, server)
        suspects.found("silent", "a", 1)
        server.apply([DeletePrefix(contract.agent_prefix("a", 1), seal=True)])
        until(lambda: not suspects._awaited, "the wait has ended")
        assert told == [AgentSuspected("a", 1, "silent", LOST)]


def test_evidence_about_agents_of_a_node_check_is_dropped_and_after_the_end_nothing_happens() -> (
    None
):
    told: list[object] = []
    server = RendezvousServer(token="t", access=job_access()).start()
    suspects = Suspects(told.append, server)
    suspects.found("silent", "a", contract.FIRST_OF_CHECKS)
    assert told == []
    server.stop()
    suspects.found("silent", "a", 1)
    suspects.probe(ProbeAgent("a", 1, "127.0.0.1", 1, 0.1, 1, "a test"))
