from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from rendezvous.auth import write_token_file
from rendezvous.client import RendezvousClient
from rendezvous.errors import AbortedError, RefusedError, SealedError
from rendezvous.limits import Limits
from rendezvous.server import RendezvousServer
from rendezvous.torch_store import HTTPStore
from rendezvous.wire import Count, DeletePrefix, Get, Number
from tests.rendezvous.common import TOKEN, eventually, waiting

SHORT = timedelta(milliseconds=50)


@pytest.fixture
def store(client: RendezvousClient) -> Iterator[HTTPStore]:
    store = HTTPStore(client, "rounds/7/", timedelta(seconds=20))
    yield store
    store.close()


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run a call beside the test; its result or error lands in the list."""
    landed: list[object] = []

    def run() -> None:
        try:
            landed.append(call())
        except Exception as error:
            landed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, landed


Script = Callable[[dist.Store], list[object]]


def everyday(s: dist.Store) -> list[object]:
    s.set("a", "text")
    s.set("b", b"\x00\xff")
    s.append("b", "!")
    s.multi_set(["c", "d"], ["1", "2"])
    s.wait(["a", "b"])
    s.wait(["a"], timedelta(seconds=5))
    return [s.get("a"), s.get("b"), s.multi_get(["d", "c"]), s.check(["a", "d"]), s.check(["x"])]


def counters(s: dist.Store) -> list[object]:
    return [s.add("n", 5), s.add("n", -2), s.get("n"), s.num_keys()]


def swaps(s: dist.Store) -> list[object]:
    return [
        s.compare_set("k", "other", "1"),  # missing, and something else expected
        s.compare_set("k", "", "1"),  # missing
        s.compare_set("k", "", "2"),  # there, though expected missing
        s.compare_set("k", "1", "2"),
        s.compare_set("k", "1", "3"),
        s.get("k"),
    ]


def deletions(s: dist.Store) -> list[object]:
    s.set("a", "1")
    return [s.delete_key("a"), s.delete_key("a"), s.check(["a"]), s.num_keys()]


@pytest.mark.parametrize("script", [everyday, counters, swaps, deletions])
@pytest.mark.parametrize("wrapped", [False, True])
def test_it_answers_as_torchs_own_store_does(
    store: HTTPStore, script: Script, wrapped: bool
) -> None:
    wrap = (lambda s: dist.PrefixStore("inner", s)) if wrapped else (lambda s: s)
    assert script(wrap(store)) == script(wrap(dist.HashStore()))


def test_its_keys_live_below_its_prefix_and_nowhere_else(
    server: RendezvousServer, store: HTTPStore
) -> None:
    server.apply([DeletePrefix("elsewhere/")])
    store.set("a", "1")
    dist.PrefixStore("inner", store).set("b", "2")
    assert server.apply([Count("rounds/7/"), Count()]) == (Number(2), Number(2))
    (found,) = server.apply([Get(("rounds/7/a", "rounds/7/inner/b"))])
    assert len(found.entries) == 2  # type: ignore[union-attr]


def test_many_keys_are_one_request(store: HTTPStore) -> None:
    keys = [f"k{n}" for n in range(100)]
    store.multi_set(keys, ["v"] * 100)
    assert store.multi_get(keys) == [b"v"] * 100
    assert store._client.requests == 2
    assert store.has_extended_api()


def test_no_keys_at_all_are_there_at_once(store: HTTPStore) -> None:
    assert store.multi_get([]) == []
    assert store.check([])
    store.wait([])
    store.multi_set([], [])


def test_a_get_waits_for_a_key_another_rank_writes(
    server: RendezvousServer, store: HTTPStore
) -> None:
    thread, landed = in_thread(lambda: store.multi_get(["a", "b"]))
    eventually(lambda: waiting(server) == 1, "the rank waits")
    store.set("a", "1")
    store.set("b", "2")  # by the same store: a waiting call holds up no other
    thread.join(10)
    assert landed == [[b"1", b"2"]]


def test_a_wait_that_runs_out_names_the_missing_keys(store: HTTPStore) -> None:
    store.set("here", "")
    with pytest.raises(dist.DistStoreError, match=r"for 1 of 2 keys .rounds/7/gone"):
        store.wait(["here", "gone"], SHORT)
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    with pytest.raises(dist.DistStoreError):
        store.get("gone")
    with pytest.raises(dist.DistStoreError):
        dist.PrefixStore("inner", store).get("gone")


def test_a_wait_longer_than_one_request_goes_on(
    server: RendezvousServer, store: HTTPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rendezvous.torch_store.WAIT_S", 0.02)
    thread, landed = in_thread(lambda: store.get("a"))
    eventually(lambda: store._client.requests > 3, "the wait is asked for in pieces")
    store.set("a", "1")
    thread.join(10)
    assert landed == [b"1"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_when_the_round_is_over_a_blocked_call_ends_at_once(
    server: RendezvousServer, store: HTTPStore, wrapped: bool
) -> None:
    asked = dist.PrefixStore("inner", store) if wrapped else store
    thread, landed = in_thread(lambda: asked.get("never"))
    eventually(lambda: waiting(server) == 1, "the rank waits")
    started = time.monotonic()
    server.post([DeletePrefix("rounds/7/", seal=True)])
    thread.join(10)
    assert isinstance(landed[0], SealedError)
    assert time.monotonic() - started < 2
    with pytest.raises(SealedError):
        store.set("a", "1")
    with pytest.raises(SealedError):
        store.multi_get(["a", "b"])


def test_abort_ends_calls_in_every_thread_and_in_clones(
    server: RendezvousServer, store: HTTPStore
) -> None:
    twin = store.clone()
    calls = [in_thread(lambda s=s: s.get("never")) for s in (store, store, twin)]  # type: ignore[misc]
    eventually(lambda: waiting(server) == 3, "all wait")
    store.close()
    for thread, landed in calls:
        thread.join(10)
        assert isinstance(landed[0], AbortedError)
    with pytest.raises(AbortedError, match="closed"):
        twin.set("a", "1")
    eventually(lambda: waiting(server) == 0, "no waiter is left")


def test_a_store_keeps_no_connection_for_itself(
    server: RendezvousServer, client: RendezvousClient
) -> None:
    store = HTTPStore(client, "rounds/8/")
    store.set("a", "1")
    (connection,) = client._connections.idle
    store.set("b", "1")
    assert store._client._connections.idle == []
    del store
    assert client._connections.idle == [connection]
    assert connection.sock is not None


def test_real_ranks_form_a_group_with_two_requests_each(
    server: RendezvousServer, client: RendezvousClient, tmp_path: Path
) -> None:
    size = 3
    token_file = write_token_file(tmp_path / "token", TOKEN)
    environment = {
        **os.environ,
        "GLOO_ENABLE_STORE_V2_API": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }
    script = Path(__file__).with_name("gloo_member.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), server.url, "rounds/1/", str(rank), str(size),
             str(token_file)],
            env=environment,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        for rank in range(size):
            entry = client.get(f"report/{rank}", wait=60)
            assert entry is not None, f"rank {rank} did not report"
            report = json.loads(entry.value)
            assert report["sum"] == [6.0] * 4
            assert report["requests"] <= 2, "one multi_set or set, one multi_get"
        assert [process.wait(20) for process in ranks] == [0] * size
    finally:
        for process in ranks:
            process.kill()
            process.wait(10)


def test_values_that_are_too_large_together_are_read_in_parts() -> None:
    with (
        RendezvousServer(token=TOKEN, limits=Limits(reply_bytes=10_000)) as server,
        RendezvousClient(server.url, TOKEN) as client,
        contextlib.closing(HTTPStore(client, "rounds/7/", timedelta(seconds=20))) as store,
    ):
        names, values = [f"k{n}" for n in range(16)], [bytes([n]) * 2000 for n in range(16)]
        store.multi_set(names, values)
        assert store.multi_get(names) == values
        store.set("one", bytes(20_000))
        with pytest.raises(RefusedError, match="ask for less"):
            store.get("one")


@pytest.mark.parametrize("key", ["exception_dump", "remote_error:0", "default_pg/remote_error:3"])
def test_an_alarm_of_torchs_watchdog_needs_no_driver(store: HTTPStore, key: str) -> None:
    store.set(key, "rank 3")
    assert store.num_keys() == 0
    store.close()
    store.set(key, "rank 3")
    assert not store.check([key])
    assert not store.check(["other", key])
    with pytest.raises(AbortedError):
        store.check(["other"])
