"""Turns at measuring, with a real rendezvous."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from elastic_driver.features.checks.worker import task_process as serve
from elastic_driver.features.checks.worker.task_process import (
    is_shared,
    lock_key,
    lock_machines,
    register_host,
    this_machine,
    this_stack,
)
from rendezvous.client import RendezvousClient
from rendezvous.server import RendezvousServer

TOKEN = "t" * 32


@pytest.fixture
def server() -> object:
    with contextlib.closing(_Closing(RendezvousServer("127.0.0.1", 0, token=TOKEN).start())) as it:
        yield it.server


class _Closing:
    def __init__(self, server: RendezvousServer) -> None:
        self.server = server

    def close(self) -> None:
        self.server.stop()


def test_on_one_machine_nobody_measures_at_the_same_time(server: RendezvousServer) -> None:
    inside: list[str] = []
    most: list[int] = []

    def run(name: str) -> None:
        with RendezvousClient(server.url, TOKEN) as client:
            for _ in range(3):
                with lock_machines(client, name, ["m"]):
                    inside.append(name)
                    most.append(len(inside))
                    time.sleep(0.02)
                    inside.remove(name)

    threads = [threading.Thread(target=run, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [1] * 9


def test_pairs_that_cross_do_not_block_each_other(server: RendezvousServer) -> None:
    done: list[str] = []

    def run(name: str, machines: list[str]) -> None:
        with RendezvousClient(server.url, TOKEN) as client:
            for _ in range(5):
                with lock_machines(client, name, machines):
                    done.append(name)

    threads = [
        threading.Thread(target=run, args=("a", ["m", "n"])),
        threading.Thread(target=run, args=("b", ["n", "m"])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(done) == ["a"] * 5 + ["b"] * 5


def test_a_turn_is_left_when_what_is_measured_fails(server: RendezvousServer) -> None:
    with RendezvousClient(server.url, TOKEN) as client:
        with pytest.raises(ArithmeticError), lock_machines(client, "a", ["m"]):
            raise ArithmeticError
        entry = client.get(lock_key("m"))
        assert entry is not None
        assert entry.value == b""


def test_nobody_waits_for_ever_for_one_that_does_not_leave(
    server: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "PATIENCE_S", 0.3)
    with RendezvousClient(server.url, TOKEN) as client:
        client.set(lock_key("m"), b"stuck")
        began = time.monotonic()
        with lock_machines(client, "a", ["m"]):
            assert time.monotonic() - began >= 0.3
        entry = client.get(lock_key("m"))
        assert entry is not None
        assert entry.value == b"stuck", "a turn that was not had is not given back"


def test_a_turn_whose_holder_died_ends_with_its_lease(
    server: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RendezvousClient(server.url, TOKEN) as client:
        client.set(lock_key("m"), b"dead", lease=0.2)
        began = time.monotonic()
        with lock_machines(client, "a", ["m"]):
            assert time.monotonic() - began < serve.PATIENCE_S / 2
            entry = client.get(lock_key("m"))
            assert entry is not None
            assert entry.value == b"a"


def test_a_machine_that_is_not_known_has_no_turns(server: RendezvousServer) -> None:
    with RendezvousClient(server.url, TOKEN) as client, lock_machines(client, "a", ["", ""]):
        assert client.get(lock_key("")) is None


def test_a_machine_has_a_name_that_stays() -> None:
    assert this_machine() == this_machine() != ""


def test_a_machine_is_shared_once_a_second_host_has_arrived(server: RendezvousServer) -> None:
    with RendezvousClient(server.url, TOKEN) as client:
        assert not is_shared(client, "m")
        for _ in range(2):
            register_host(client, "m", "a")
        assert not is_shared(client, "m")
        register_host(client, "m", "b")
        assert is_shared(client, "m")
        for host in "ab":
            register_host(client, "", host)
        assert not is_shared(client, ""), "nobody knows which machines those are"


def test_a_network_stack_belongs_to_a_machine() -> None:
    assert this_stack().startswith(f"{this_machine()}/")
