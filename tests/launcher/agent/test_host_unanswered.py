"""Connections of workers that nobody answers are found in the kernel's tables."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from launcher.agent import host as unanswered
from launcher.agent.host import CONNECT_PATIENCE_S, REPORT_AGAIN_S, Unanswered


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    at = [1000.0]
    monkeypatch.setattr(unanswered.time, "monotonic", lambda: at[0])
    return at


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """A port whose queue is full: the kernel answers no further connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.socket() as first:
        first.connect(server.getsockname())
        yield server.getsockname()


def test_a_connection_that_waits_is_reported_again_and_again(
    clock: list[float], silent: tuple[str, int]
) -> None:
    watch, me = Unanswered(), {"a.0.1": os.getpid()}
    with socket.socket() as late:
        late.setblocking(False)
        late.connect_ex(silent)
        assert watch.look(me) == []
        clock[0] += CONNECT_PATIENCE_S
        assert watch.look(me) == [("a.0.1", *silent, CONNECT_PATIENCE_S)]
        clock[0] += 1.0
        assert watch.look(me) == []
        clock[0] += REPORT_AGAIN_S
        assert [found.seconds for found in watch.look(me)] == [
            CONNECT_PATIENCE_S + 1.0 + REPORT_AGAIN_S
        ]
    clock[0] += REPORT_AGAIN_S
    assert watch.look(me) == []


def test_addresses_are_read_as_the_kernel_writes_them() -> None:
    assert unanswered._address_in("0100007F:1F90") == ("127.0.0.1", 8080)
    assert unanswered._address_in("0000000000000000FFFF00000100007F:0016") == ("127.0.0.1", 22)
    assert unanswered._address_in("000080FE00000000000000000100000A:0001")[0].startswith("fe80::")
