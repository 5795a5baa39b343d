"""Requests without a good token: slower and slower, told once, and no trouble for others."""

from __future__ import annotations

import logging
import threading
import time
from http.client import HTTPConnection

import pytest

from elastic_driver import token_roles
from elastic_driver.token_roles import agent_token, worker_token
from rendezvous import auth
from rendezvous.auth import Caller
from rendezvous.client import RendezvousClient
from rendezvous.server import RendezvousServer
from rendezvous.sessions import (
    FIRST_PAUSE_S,
    FORGET_S,
    FREE,
    LONGEST_PAUSE_S,
    MOST_PAUSED,
    MOST_PEERS,
    OF_CONNECTION,
    Refusals,
)
from tests.rendezvous.common import TOKEN, error_of, eventually, request


def test_a_peer_waits_longer_and_longer_and_others_do_not() -> None:
    refusals = Refusals()
    pauses = []
    for second in range(FREE + 8):
        pauses.append(refusals.unauthorized("peer", float(second)))
        refusals.answered("peer")
    assert pauses[: FREE + 3] == [*[0.0] * FREE, *(FIRST_PAUSE_S * n for n in (1, 2, 4))]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert refusals.unauthorized("other", 1.0) == 0.0
    assert refusals.unauthorized("peer", 100.0 + FORGET_S) == 0.0, "it is forgotten in the end"
    assert refusals.snapshot() == {"unauthorized": FREE + 10, "forbidden": 0}


def test_few_requests_of_a_peer_wait_at_the_same_time() -> None:
    refusals = Refusals()
    pauses = [refusals.unauthorized("peer", 0.0) for _ in range(FREE + MOST_PAUSED + 2)]
    assert pauses[-2:] == [None, None]
    assert None not in pauses[:-2]
    refusals.answered("peer")
    assert refusals.unauthorized("peer", 0.0) == LONGEST_PAUSE_S
    for number in range(2 * MOST_PEERS):
        refusals.unauthorized(f"peer {number}", 0.0)
    refusals.answered("peer")
    assert refusals.unauthorized("peer", 0.0) == 0.0, "memory has a bound"


def test_each_peer_and_each_caller_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    refusals, worker = Refusals(), Caller(token_roles.WORKER, "a.0.1")
    for _ in range(FREE):
        refusals.unauthorized("10.0.0.7", 0.0)
        refusals.unauthorized("10.0.0.8", 0.0)
        refusals.forbidden(worker, "no")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3
    assert [name in caplog.text for name in ("10.0.0.7", "10.0.0.8", "worker a.0.1")] == [True] * 3
    assert refusals.snapshot() == {"unauthorized": 2 * FREE, "forbidden": FREE}


# ---- over HTTP ---------------------------------------------------------------------------


def test_a_connection_is_closed_after_a_few_bad_tokens(
    server: RendezvousServer, caplog: pytest.LogCaptureFixture
) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    for number in range(1, OF_CONNECTION + 1):
        connection.request("GET", "/v1/kv/a/b", headers={"Authorization": f"Bearer x{number}"})
        answer = connection.getresponse()
        assert (answer.status, error_of(answer.read())["code"]) == (401, "unauthorized")
        assert answer.will_close == (number == OF_CONNECTION)
    connection.close()
    assert caplog.text.count("had no token of this job") == 1
    assert "Bearer" not in caplog.text
    assert not any(f"x{n}" in caplog.text for n in range(OF_CONNECTION))


def test_guessing_is_slow_while_good_tokens_of_the_same_address_are_served(
    server: RendezvousServer, client: RendezvousClient
) -> None:
    guesses, over = [], threading.Event()

    def guess() -> None:
        while not over.is_set():
            try:
                guesses.append(request(server, "GET", "/v1/kv/a/b", token="guess")[0])
            except OSError:  # it was cut off
                guesses.append(0)

    threads = [threading.Thread(target=guess) for _ in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(guesses) > FREE + 4, "the first guesses", within=30)
    client.set("a/b", b"1")
    began, before = time.monotonic(), len(guesses)
    for _ in range(50):
        client.set("a/b", b"1")
    assert client.get("a/b") is not None
    took, made = time.monotonic() - began, len(guesses) - before
    over.set()
    for thread in threads:
        thread.join(30)
    # Each of the threads waits for its answer, and each pause lasts 0.8 s or longer by now.
    assert made <= len(threads) * (1 + took / (4 * FIRST_PAUSE_S))
    assert set(guesses) == {401}
    assert server.refusals.snapshot()["unauthorized"] >= FREE + 4


def test_forbidden_requests_are_counted_too(server: RendezvousServer) -> None:
    reader = auth.reader_token(TOKEN)
    assert request(server, "PUT", "/v1/kv/a/b", b"", token=reader)[0] == 403
    worker = worker_token(agent_token(TOKEN, "a"), "a.0.1")
    seals = b'{"operations":[{"type":"delete_prefix","prefix":"a/","seal":true}],"request_id":"x"}'
    assert request(server, "POST", "/v1/kv:batch", seals, token=worker)[0] == 403
    assert server.refusals.snapshot() == {"unauthorized": 0, "forbidden": 2}
