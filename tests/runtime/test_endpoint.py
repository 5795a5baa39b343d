"""The port of a driver: a user's, that of the driver before, or another one."""

from __future__ import annotations

import socket
import threading

import pytest

from elastic_driver.errors import ClusterError
from elastic_driver.job.fleet import AgentState, HostAgent
from elastic_driver.job.job import Job
from elastic_driver.runtime.endpoint import all_hear, await_port, listen, ports_to_try
from elastic_driver.settings import Settings
from rendezvous.errors import AddressError
from rendezvous.server import RendezvousServer

HERE = "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "before", "resumed", "all_hear", "wanted"),
    [
        (0, 0, False, True, (0,)),
        (7, 0, False, True, (7,)),  # the user's port, and no other
        (0, 5, True, True, (5, 0)),
        (7, 7, True, True, (7, 0)),
        (7, 5, True, True, (7, 5, 0)),  # 7 was held when the last driver began
        (7, 0, True, True, (7, 0)),  # a standby
        (0, 0, True, True, (0,)),
        (7, 5, True, False, (5,)),  # an agent looks there, and cannot be called
        (7, 0, True, False, (7, 0)),
    ],
)
def test_the_ports_in_their_order(
    given: int, before: int, resumed: bool, all_hear: bool, wanted: tuple[int, ...]
) -> None:
    assert ports_to_try(given, before, (0,), resumed=resumed, all_hear=all_hear) == wanted


def test_a_port_that_becomes_free_in_a_moment_is_awaited() -> None:
    holder = socket.create_server((HERE, 0))
    port = holder.getsockname()[1]
    assert not await_port(HERE, port)
    threading.Timer(0.2, holder.close).start()
    assert await_port(HERE, port)
    assert await_port(HERE, 0)
    assert await_port("192.0.2.1", 9), "that this is no address of ours is for the server to say"


def test_a_held_port_is_told_in_a_line_or_refused() -> None:
    said: list[str] = []
    with socket.create_server((HERE, 0)) as holder:
        held = holder.getsockname()[1]
        for ports in ((held,), (held, held)):
            server = RendezvousServer(HERE, ports, token="t" * 32)
            with pytest.raises(ClusterError, match=r"cannot resume: .* that cannot be called look"):
                listen(server, ports, "r", pytest.fail)
        first = RendezvousServer(HERE, (held,), token="t" * 32)
        with pytest.raises(AddressError):
            listen(first, (held,), "r", None)
        with RendezvousServer(HERE, 0, token="t" * 32) as free:
            other = free.port
        server = RendezvousServer(HERE, (held, other), token="t" * 32)
        try:
            listen(server, (held, other), "r", said.append)
        finally:
            server.stop()
        (told,) = said
        assert f"another program holds port {held}, so the driver of run r listens" in told
        assert server.port == other
    server = RendezvousServer(HERE, (other, 0), token="t" * 32)
    listen(server, (other, 0), "r", pytest.fail)
    server.stop()


def test_agents_that_no_call_has_reached_hear_nothing() -> None:
    job = Job(Settings())
    assert all_hear(job)
    job.fleet.agents["a"] = HostAgent("a", 1, 0.0, AgentState.READY, HERE, probe_port=9)
    assert all_hear(job)
    job.suspicion.unreached.add("a")
    assert not all_hear(job)
    job.suspicion.unreached.clear()
    job.fleet.agents["a"].probe_port = 0
    assert not all_hear(job)
    job.fleet.agents["a"] = HostAgent("a", 1, 0.0)  # it is being started, and so started anew
    assert all_hear(job)
