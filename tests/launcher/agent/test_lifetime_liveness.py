"""Heartbeats: what they promise, and what an agent does when nobody answers them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from elastic_driver.runtime.api import job_access
from launcher.agent import lifetime
from launcher.agent.lifetime import CutOffError, Heartbeats, Promise
from rendezvous.client import RendezvousClient
from rendezvous.errors import RendezvousError
from rendezvous.server import Callbacks, RendezvousServer
from rendezvous.wire import DeletePrefix

KEY = "agents/a.1/heartbeat"


def test_on_a_quiet_network_the_next_heartbeat_is_promised_within_a_second() -> None:
    promise = Promise(0.4, 30.0)
    for _ in range(60):
        promise.learn(0.005)
    assert promise.seconds == pytest.approx(1.0)


def test_a_promise_is_longer_after_a_late_heartbeat_and_shrinks_again() -> None:
    promise = Promise(0.4, 30.0)
    promise.learn(0.5)
    assert promise.seconds == pytest.approx(2.4)
    lengths = []
    for _ in range(100):
        promise.learn(0.005)
        lengths.append(promise.seconds)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == pytest.approx(1.0)


def test_no_promise_is_longer_than_the_heartbeat_timeout() -> None:
    promise = Promise(0.4, 3.0)
    promise.learn(20.0)
    assert promise.seconds == 3.0


@contextlib.contextmanager
def heartbeats(url: str, promise: Promise) -> Iterator[Heartbeats]:
    client = RendezvousClient(url, "t")
    try:
        yield Heartbeats(client, KEY, promise)
    finally:
        client.abort()


def beat(work: Heartbeats, until: Callable[[], bool], within: float = 10.0) -> None:
    """Send heartbeats until this is true; raises what they raise."""

    async def main() -> None:
        running = asyncio.create_task(work.run())
        deadline = time.monotonic() + within
        while not until() and not running.done() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if running.done():
            running.result()
        running.cancel()
        work.client.abort()
        assert until()

    asyncio.run(main())


def test_heartbeats_renew_a_lease_that_expires_without_them() -> None:
    expired: list[str] = []
    with (
        RendezvousServer(
            token="t", access=job_access(), callbacks=Callbacks(on_lease_expired=expired.append)
        ) as server,
        RendezvousClient(server.url, "t") as reader,
        heartbeats(server.url, Promise(0.05, 0.3)) as work,
    ):
        beat(work, lambda: (e := reader.get(KEY)) is not None and e.revision > 10)
        assert expired == []
        deadline = time.monotonic() + 5.0
        while not expired and time.monotonic() < deadline:
            time.sleep(0.01)
        assert expired == [KEY]


def test_a_heartbeat_takes_a_new_sample_of_the_host_along() -> None:
    samples = [b"first", b"second"]
    with (
        RendezvousServer(token="t", access=job_access()) as server,
        RendezvousClient(server.url, "t") as reader,
        heartbeats(server.url, Promise(0.05, 30.0)) as work,
    ):
        work.usage_key = "agents/a.1/usage"
        work.usage = lambda: samples.pop(0) if samples else None
        beat(work, lambda: (e := reader.get(KEY)) is not None and e.revision > 6)
        entry = reader.get("agents/a.1/usage")
        assert entry is not None
        assert entry.value == b"second"


def test_an_agent_that_was_given_up_learns_it_from_its_heartbeat() -> None:
    with RendezvousServer(token="t", access=job_access()) as server:
        server.apply([DeletePrefix("agents/a.1/", seal=True)])
        with (
            heartbeats(server.url, Promise(0.05, 0.3)) as work,
            pytest.raises(RendezvousError, match="it has given this agent up"),
        ):
            beat(work, lambda: False)


def test_an_agent_waits_for_a_driver_that_is_stopped_on_a_machine_that_answers() -> None:
    """Its kernel accepts connections. The length of the stop is no reason to promise more."""
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        url = f"http://127.0.0.1:{stopped.getsockname()[1]}"
        began = time.monotonic()
        promise = Promise(0.05, 0.2, lateness=0.01)
        with heartbeats(url, promise) as work:
            beat(work, lambda: time.monotonic() > began + 2.0)
        assert promise.lateness == 0.01


def test_an_agent_that_reaches_no_machine_there_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifetime, "CONNECT_S", 0.2)
    with (
        full_listener() as port,
        heartbeats(f"http://127.0.0.1:{port}", Promise(0.05, 0.2)) as work,
    ):
        began = time.monotonic()
        with pytest.raises(CutOffError, match="cut off"):
            beat(work, lambda: False)
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(
    ("reached", "silent", "goes_on"),
    [(0, 0, True), (2, 0, True), (1, 1, True), (1, 2, False), (0, 1, False), (2, 2, True)],
)
def test_an_agent_goes_on_without_the_driver_s_machine_if_it_reaches_more_than_half_of_the_hosts(
    monkeypatch: pytest.MonkeyPatch, reached: int, silent: int, goes_on: bool
) -> None:
    """It counts itself, and half is not enough."""
    monkeypatch.setattr(lifetime, "CONNECT_S", 0.2)
    with contextlib.ExitStack() as stack:
        lost = [stack.enter_context(full_listener()) for _ in range(1 + silent)]
        peers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(reached)
        ]
        work = stack.enter_context(heartbeats(f"http://127.0.0.1:{lost[0]}", Promise(0.05, 0.2)))
        work.peers = [("127.0.0.1", peer.getsockname()[1]) for peer in peers]
        work.peers += [("127.0.0.1", port) for port in lost[1:]]
        began = time.monotonic()
        if goes_on:
            beat(work, lambda: time.monotonic() > began + 2.0)
        else:
            with pytest.raises(CutOffError):
                beat(work, lambda: False)


@pytest.mark.parametrize("waits", [False, True])
def test_without_a_round_an_agent_goes_on_only_for_the_next_driver(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    monkeypatch.setattr(lifetime, "CONNECT_S", 0.2)
    with (
        full_listener() as port,
        heartbeats(f"http://127.0.0.1:{port}", Promise(0.05, 0.2)) as work,
    ):
        work.waits = waits
        began = time.monotonic()
        if waits:
            beat(work, lambda: time.monotonic() > began + 2.0)
        else:
            with pytest.raises(CutOffError):
                beat(work, lambda: False)


@contextlib.contextmanager
def full_listener() -> Iterator[int]:
    """A port whose queue is full: further SYNs get no answer, as if packets were lost."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = listener.getsockname()[1]
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(("127.0.0.1", port))
        yield port
