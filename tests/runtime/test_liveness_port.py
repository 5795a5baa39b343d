"""The port at which a driver proves that it lives."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from elastic_driver.reachability import DriverPresence
from elastic_driver.runtime import endpoint
from elastic_driver.runtime.endpoint import KEPT, MOST, LivenessPort
from tests.support.job import eventually
from tests.support.liveness import driver

TOKEN, BEGAN = "job:j:a token", 5.0


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=5.0)


def asked(address: str, began: float = BEGAN, token: str = TOKEN) -> tuple[socket.socket, bytes]:
    """Ask as the Brain does; return the connection and what was answered, b"" at its end."""
    question, answer = DriverPresence(token, began, address).ask()
    connection, found = connected(address), b""
    connection.sendall(question)
    with contextlib.suppress(ConnectionResetError):
        while len(found) < len(answer) and (more := connection.recv(len(answer))):
            found += more
    assert found in (b"", answer)
    return connection, found


def has_ended(connection: socket.socket) -> bool:
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture(params=["127.0.0.1", "::1"])
def port(request: pytest.FixtureRequest) -> Iterator[LivenessPort]:
    found = LivenessPort(request.param, 1, TOKEN)
    assert found.address == ""
    found.open(BEGAN)
    yield found
    found.close()


def test_a_driver_proves_itself_to_the_brain_and_keeps_the_connection(port: LivenessPort) -> None:
    address = port.address
    connection, answer = asked(address)
    assert answer
    port.open(BEGAN)
    assert port.address == address, "open is done once"
    connection.settimeout(endpoint.LINE_S + 0.5)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    connection.settimeout(5.0)
    port.close()
    assert has_ended(connection)
    assert port.address == ""
    with pytest.raises(ConnectionRefusedError):
        connected(address)
    port.close()


def test_a_process_that_is_stopped_keeps_the_connection_and_one_that_was_killed_does_not() -> None:
    with driver(TOKEN, BEGAN) as process:
        connection, answer = asked(process.address)
        assert answer
        process.stop()
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        process.kill()
        connection.settimeout(5.0)
        assert has_ended(connection)


@pytest.mark.parametrize("kind", ["token", "run", "place", "garbage", "more", "long"])
def test_nothing_is_said_to_who_is_not_the_brain(port: LivenessPort, kind: str) -> None:
    place = "127.0.0.1:1" if kind == "place" else port.address
    token = "job:other:a token" if kind == "token" else TOKEN
    question = DriverPresence(token, 6.0 if kind == "run" else BEGAN, place).ask().question
    if kind == "garbage":
        question = b"?" + b"0" * 64 + b" " + b"0" * 64 + b"\n"
    with connected(port.address) as connection:
        connection.sendall(question + b"x" * (kind == "more") if kind != "long" else b"x" * 4096)
        assert has_ended(connection)


def test_silent_strangers_are_sent_away_and_keep_the_brain_out_no_longer(
    port: LivenessPort,
) -> None:
    kept, answer = asked(port.address)
    assert answer
    strangers = [connected(port.address) for _ in range(3 * MOST)]
    again, answer = asked(port.address)
    assert answer, "they keep nobody out"
    assert all(has_ended(stranger) for stranger in strangers)
    for connection in (kept, again):
        connection.settimeout(0.1)
        with connection, pytest.raises(TimeoutError):
            connection.recv(1)


def test_of_connections_with_a_proof_the_newest_stay(port: LivenessPort) -> None:
    connections = [asked(port.address)[0] for _ in range(KEPT + 1)]
    assert has_ended(connections[0])
    for connection in connections[1:]:
        connection.settimeout(0.1)
        with connection, pytest.raises(TimeoutError):
            connection.recv(1)


def test_a_port_has_one_thread_which_ends_with_it() -> None:
    before = threading.active_count()
    found = LivenessPort("127.0.0.1", 1, TOKEN)
    found.open(BEGAN)
    connections = [asked(found.address)[0] for _ in range(3)]
    assert threading.active_count() == before + 1
    found.close()
    eventually(lambda: threading.active_count() == before, within=5, what="the thread ends")
    for connection in connections:
        assert has_ended(connection)


def test_without_a_way_to_the_other_machine_there_is_no_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_name(*_: object, **__: object) -> None:
        raise OSError("no such name")

    liveness = LivenessPort("brain.invalid", 1, TOKEN)
    monkeypatch.setattr("socket.getaddrinfo", no_name)
    liveness.open(BEGAN)
    assert liveness.address == ""
    monkeypatch.undo()
    liveness._towards = "127.0.0.1"
    liveness.open(BEGAN)
    assert liveness.address
    liveness.close()
