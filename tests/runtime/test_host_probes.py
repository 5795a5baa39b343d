"""Probes of hosts, with real sockets: a port that listens, one that does not, and silence."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from elastic_driver.job.decisions import ProbeHosts
from elastic_driver.job.events import HostProbed
from elastic_driver.runtime.probes import HostProbes

PATIENCE_S = 0.3


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def probe(
    places: dict[str, tuple[str, int] | None], *, times: int = 1, patience: float = PATIENCE_S
) -> tuple[list[HostProbed], list[str]]:
    """Probe these hosts, several times after each other; the events, and the names looked up."""
    found, looked = list[HostProbed](), list[str]()

    def look_up(host: str) -> tuple[str, int] | None:
        looked.append(host)
        return places[host]

    async def run() -> None:
        probes = HostProbes(look_up, found.append)
        for number in range(times):
            await probes.carry_out(ProbeHosts(tuple(places), patience, number + 1, "a test"))

    asyncio.run(run())
    return found, looked


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def test_a_port_that_listens_answers(listener: socket.socket) -> None:
    found, _ = probe({"a": ("127.0.0.1", port_of(listener))})
    assert found == [HostProbed("a", 1, answered=True)]


def test_a_port_that_refuses_and_an_address_that_is_silent_do_not_answer(
    listener: socket.socket,
) -> None:
    port = port_of(listener)
    listener.close()
    with socket.socket() as full:  # a queue of connections that is full: the kernel is silent
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        held = [socket.socket() for _ in range(3)]
        for one in held:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        began = time.monotonic()
        found, _ = probe({"a": ("127.0.0.1", port), "b": ("127.0.0.1", port_of(full))})
        for one in held:
            one.close()
    assert found == []
    assert time.monotonic() - began >= PATIENCE_S


def test_a_host_that_cannot_be_probed_is_told_so() -> None:
    found, _ = probe({"a": None, "b": ("no-such-name.invalid", 22)})
    assert sorted(found, key=lambda event: event.host) == [
        HostProbed("a", 1, answered=False),
        HostProbed("b", 1, answered=False),
    ]


def test_an_address_is_looked_up_once(listener: socket.socket) -> None:
    found, looked = probe({"a": ("localhost", port_of(listener)), "b": None}, times=3)
    assert sorted(looked) == ["a", "b"]
    assert [e.number for e in found if e.host == "a"] == [1, 2, 3]


def test_a_round_of_probes_of_a_thousand_hosts_costs_little(listener: socket.socket) -> None:
    port = port_of(listener)
    listener.close()
    before = resource.getrusage(resource.RUSAGE_SELF)
    probe({f"h{n}": ("127.0.0.1", port) for n in range(200)}, times=11)
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent = sum(getattr(after, t) - getattr(before, t) for t in ("ru_utime", "ru_stime"))
    assert spent / (200 * 10) * 330 < 0.2  # of a core, with 330 probes a second
