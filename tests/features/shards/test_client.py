"""ShardClient against a driver's real routes: waits, outages, disagreement."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import elastic_driver as elastic
from elastic_driver.features.shards.machine import DataSets
from elastic_driver.features.shards.messages import Granted, ShardAccepted, Wait
from rendezvous.auth import write_token_file
from rendezvous.errors import RequestError
from rendezvous.server import RendezvousServer
from tests.support.machines import serve

Connect = Callable[..., elastic.ShardClient]


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with serve(DataSets(), "secret") as running:
        yield running


@pytest.fixture
def connect(
    server: RendezvousServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Connect]:
    write_token_file(tmp_path / "token", "secret")
    monkeypatch.setenv("ELASTIC_RENDEZVOUS", server.url)
    monkeypatch.setenv("ELASTIC_TOKEN_FILE", str(tmp_path / "token"))

    def as_worker(name: str, records: int = 20) -> elastic.ShardClient:
        monkeypatch.setenv("ELASTIC_WORKER_ID", name)
        client = elastic.ShardClient("d", records=records, shard_records=10)
        return opened.enter_context(client)

    with contextlib.ExitStack() as opened:
        yield as_worker


def in_background(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def test_who_asks_while_others_hold_the_last_shards_waits_for_the_end(connect: Connect) -> None:
    a, b = connect("a.0.1"), connect("b.0.1")
    first, second = a.next(), a.next()
    assert first is not None
    assert second is not None
    assert isinstance(b.poll(), Wait)
    thread, results = in_background(b.next)
    assert isinstance(a.done(first), ShardAccepted)
    assert isinstance(a.done(second), ShardAccepted)
    thread.join(10)
    assert results == [None], "the end, not an error and not a shard"


def test_a_driver_that_is_away_is_waited_for(connect: Connect, server: RendezvousServer) -> None:
    client = connect("a.0.1")
    assert client.next() is not None
    port = server.port
    server.stop()
    thread, results = in_background(client.next)
    with serve(DataSets(), "secret", port):
        thread.join(20)
    assert isinstance(results[0], Granted)


def test_workers_that_describe_the_data_otherwise_are_told(connect: Connect) -> None:
    connect("a.0.1").poll()
    with pytest.raises(RequestError, match="describe it alike on every worker"):
        connect("b.0.1", records=21).poll()


def test_a_checkpoint_goes_to_the_driver_and_back(connect: Connect) -> None:
    client = connect("a.0.1")
    saved = client.checkpoint()
    granted = client.next()
    assert granted is not None
    client.done(granted)
    client.restore(saved)
    assert client.checkpoint().state.done == 0
    again = [client.next(), client.next()]
    assert {g.shard.start for g in again if g is not None} == {0, 10}
