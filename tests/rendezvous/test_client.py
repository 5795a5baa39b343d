from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterable
from http.client import HTTPConnection
from pathlib import Path

import pytest
from aiohttp import web

from rendezvous.client import RendezvousClient
from rendezvous.client_connections import CONNECT_S, MOST_OWING
from rendezvous.errors import (
    AbortedError,
    RefusedError,
    RendezvousError,
    RequestError,
    SealedError,
    UnauthorizedError,
    UnreachableError,
    WokenError,
)
from rendezvous.routes import Problem
from rendezvous.server import RendezvousServer, Succession
from rendezvous.wire import (
    Add,
    Append,
    Compared,
    CompareSet,
    Delete,
    DeletePrefix,
    Entries,
    Entry,
    Get,
    Number,
    Set,
    Watch,
    Written,
)
from tests.rendezvous.common import TOKEN, LossyProxy, eventually, waiting
from tests.support.ports import free_port


def test_operations_return_their_results_or_what_most_callers_want(
    client: RendezvousClient,
) -> None:
    assert client.get("p/a") is None
    assert client.set("p/a", b"1") == 1
    assert client.one(Append("p/a", b"\xff"), Written) == Written(2)
    assert client.get("p/a") == Entry(b"1\xff", 2)
    assert client.get("p/a", wait=0.01, after=2) is None
    watch = Watch({"p/a": 1, "p/b": 0}, wait=1)
    assert client.one(watch, Entries) == Entries({"p/a": Entry(b"1\xff", 2)})
    assert client.one(Watch({"p/b": 0}, wait=0.01), Entries) == Entries({}, timed_out=True)
    assert client.one(Add("p/n", 3), Number) == Number(3)
    assert client.one(CompareSet("p/c", None, b"x"), Compared) == Compared(True, b"x")
    assert client.one(CompareSet("p/c", b"y", b"z"), Compared) == Compared(False, b"x")
    assert client.one(Delete("p/c"), Number) == Number(1)
    assert client.one(Delete("p/c"), Number) == Number(0)
    assert client.one(DeletePrefix("p/"), Number) == Number(2)
    with pytest.raises(RendezvousError, match="not Written"):
        client.one(Add("p/n", 3), Written)


def test_a_clone_speaks_to_the_same_server_on_a_connection_of_its_own(
    client: RendezvousClient,
) -> None:
    client.set("a", b"1")
    with client.clone(timeout=3) as twin:
        assert twin.get("a") == Entry(b"1", 1)
        assert twin._connections.idle[0] is not client._connections.idle[0]
        assert (twin.timeout, client.timeout) == (3, 10)


def test_a_batch_is_one_request(client: RendezvousClient) -> None:
    results = client.batch(Set("a", b"1"), Add("n", 1), Get(("a",)))
    assert results == (Written(1), Number(1), Entries({"a": Entry(b"1", 1)}))
    assert client.requests == 1


def test_a_wait_ends_when_its_descriptor_can_be_read_and_the_client_goes_on(
    server: RendezvousServer, client: RendezvousClient
) -> None:
    reads, writes = socket.socketpair()
    with reads, writes:
        assert client.batch(Set("a", b"1"), wake=reads.fileno()) == (Written(1),)

        def wake() -> None:
            eventually(lambda: waiting(server) == 1, "the client waits")
            writes.send(b"!")

        waker = threading.Thread(target=wake)
        waker.start()
        with pytest.raises(WokenError):
            client.batch(Watch({"a": 1}, wait=30.0), wake=reads.fileno())
        waker.join(10)
        assert client.set("a", b"2") == 2
        eventually(lambda: waiting(server) == 0, "the waiter is gone")


def woken(client: RendezvousClient, key: str) -> None:
    """Wait for a key until a descriptor can be read, which is at once."""
    reads, writes = socket.socketpair()
    with reads, writes:
        writes.send(b"!")
        with pytest.raises(WokenError):
            client.batch(Watch({key: client.set(key, b"")}, wait=30.0), wake=reads.fileno())


def own_ports(connections: Iterable[HTTPConnection]) -> set[int]:
    return {connection.sock.getsockname()[1] for connection in connections}


def test_a_connection_that_owes_an_answer_is_used_again_once_it_has_come(
    server: RendezvousServer, client: RendezvousClient
) -> None:
    woken(client, "a")
    (first,) = client._connections.owing
    first_port = own_ports([first])
    woken(client, "b")
    assert len(client._connections.owing) == 2, "the second call had a connection of its own"
    client.set("a", b"now")
    eventually(lambda: waiting(server) == 1, "the first answer has been sent")
    both = own_ports((*client._connections.owing, *client._connections.idle))
    woken(client, "c")
    assert client.get("a") == Entry(b"now", 3)
    known = client._connections
    assert own_ports((*known.owing, *known.idle)) == both, "no further connection was made"
    assert first_port < both


def test_a_connection_that_ended_while_it_owed_an_answer_is_replaced(
    server: RendezvousServer, client: RendezvousClient
) -> None:
    woken(client, "a")
    (owing,) = client._connections.owing
    socket.socket.shutdown(owing.sock, socket.SHUT_RDWR)
    assert client.get("a") is not None
    assert client._connections.owing == []
    assert client._connections.idle == [owing], "it is connected anew"


def test_few_connections_owe_an_answer(server: RendezvousServer, client: RendezvousClient) -> None:
    for number in range(3 * MOST_OWING):
        woken(client, f"k{number}")
    assert len(client._connections.owing) == MOST_OWING
    eventually(lambda: waiting(server) == MOST_OWING, "the server has no more waiters than that")
    client.close()
    eventually(lambda: waiting(server) == 0, "the waiters are gone")


def test_a_wait_for_a_server_that_is_gone_ends_likewise() -> None:
    reads, writes = socket.socketpair()
    with reads, writes, RendezvousClient(f"http://127.0.0.1:{free_port()}", TOKEN) as client:
        writes.send(b"!")
        with pytest.raises(WokenError):
            client.batch(Set("a", b"1"), wake=reads.fileno())


def test_calls_share_one_connection(server: RendezvousServer, client: RendezvousClient) -> None:
    client.set("a", b"")
    (connection,) = client._connections.idle
    for _ in range(20):
        client.get("a")
    assert client._connections.idle == [connection]
    assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_threads_call_at_once_on_connections_that_are_used_again(
    server: RendezvousServer, client: RendezvousClient
) -> None:
    def wait(found: list[Entry | None]) -> None:
        found.append(client.get("go", wait=20))

    for revision in (1, 2):
        found: list[Entry | None] = []
        threads = [threading.Thread(target=wait, args=(found,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually(lambda: waiting(server) == 3, "all wait")
        assert client.set("go", b"") == revision
        for thread in threads:
            thread.join(10)
        assert found == [Entry(b"", revision)] * 3
        assert client.one(Delete("go"), Number) == Number(1)
        assert len(client._connections.idle) == 4


def test_refusals_are_errors_of_the_helpers_and_results_of_a_batch(
    client: RendezvousClient,
) -> None:
    client.set("p/a", b"x")
    with pytest.raises(RefusedError, match="no number") as caught:
        client.one(Add("p/a", 1), Number)
    assert caught.value.code == "not_a_number"
    client.one(DeletePrefix("p/", seal=True), Number)
    with pytest.raises(SealedError, match="over and sealed"):
        client.set("p/a", b"")
    with pytest.raises(SealedError):
        client.get("p/a", wait=20)
    (refused,) = client.batch(Set("p/a", b""))
    assert refused.code == "sealed"  # type: ignore[union-attr]


def test_a_wrong_token_is_named_but_not_shown(server: RendezvousServer) -> None:
    with (
        RendezvousClient(server.url, "some-old-token") as client,
        pytest.raises(UnauthorizedError, match="refused our token") as caught,
    ):
        client.set("a", b"")
    assert "some-old-token" not in str(caught.value)
    assert "some-old-token" not in repr(client)


def test_a_request_the_server_finds_fault_with_is_not_repeated(client: RendezvousClient) -> None:
    with pytest.raises(RequestError, match="422 invalid") as caught:
        client.set("k" * 513, b"")
    assert (caught.value.status, caught.value.code) == (422, "invalid")
    assert client.requests == 1


def test_nobody_there_is_said_at_the_deadline_with_the_address() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    started = time.monotonic()
    with (
        RendezvousClient(url, TOKEN, timeout=0.3) as client,
        pytest.raises(UnreachableError, match=rf"{url} within .*refused.*driver still running"),
    ):
        client.get("a")
    assert time.monotonic() - started < 2


def test_what_kept_a_call_from_its_answer_is_told_though_the_last_attempt_was_short() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_for_a_while() -> None:
            until = None
            while until is None or time.monotonic() < until:
                listener.accept()[0].close()  # whoever connects later is kept waiting
                until = until or time.monotonic() + 1.0

        closer = threading.Thread(target=close_for_a_while)
        closer.start()
        port = listener.getsockname()[1]
        with (
            RendezvousClient(f"http://127.0.0.1:{port}", TOKEN, timeout=1.5) as client,
            pytest.raises(UnreachableError) as refused,
        ):
            client.get("a")
        closer.join(10)
    assert "timed out" not in str(refused.value)


def test_a_server_that_accepts_and_says_nothing_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        started = time.monotonic()
        with (
            RendezvousClient(url, TOKEN) as client,
            pytest.raises(UnreachableError, match="timed out"),
        ):
            client.batch(Set("a", b""), deadline=0.3)
        assert 0.2 < time.monotonic() - started < 3


def test_a_client_that_does_not_repeat_says_at_once_that_nobody_is_there() -> None:
    started = time.monotonic()
    url = f"http://127.0.0.1:{free_port()}"
    with (
        RendezvousClient(url, TOKEN, repeats=False) as client,
        pytest.raises(UnreachableError, match="refused"),
    ):
        client.get("a")
    assert time.monotonic() - started < 2


def test_a_client_that_does_not_repeat_still_replaces_a_connection_that_was_closed(
    server: RendezvousServer,
) -> None:
    with RendezvousClient(server.url, TOKEN, repeats=False) as client:
        client.set("a", b"")
        client._connections.idle[0].sock.shutdown(socket.SHUT_RDWR)
        assert client.get("a") == Entry(b"", 1)


def streamed(*pieces: bytes, breaks: bool = False) -> RendezvousServer:
    """A server with a stream of these pieces, which goes on until the server stops."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if breaks:
            assert request.transport is not None
            request.transport.abort()
        return response

    return RendezvousServer(
        token=TOKEN, routes=lambda app: app.router.add_get("/events", handler) and None
    )


def test_the_events_of_a_stream_are_given_as_they_come_until_its_end() -> None:
    with (
        streamed(b"id: 1\nda", b"ta: one\n\n: comment\n\ndata: two\r\n\r\n") as server,
        RendezvousClient(server.url, TOKEN) as client,
    ):
        assert list(client.follow("/events", silence=10)) == [b"one", b"two"]
        with pytest.raises(RequestError, match="404 not_found"):
            list(client.follow("/nothing", silence=10))


def test_a_stream_that_breaks_is_named() -> None:
    with (
        streamed(b"data: one\n", breaks=True) as server,
        RendezvousClient(server.url, TOKEN) as client,
    ):
        events = client.follow("/events", silence=10)
        assert next(events) == b"one"
        with pytest.raises(UnreachableError):
            next(events)


def test_a_server_that_comes_up_late_is_found() -> None:
    server = RendezvousServer(port=free_port(), token=TOKEN)
    found: list[int] = []

    def call() -> None:
        with RendezvousClient(f"http://127.0.0.1:{server._wanted_port}", TOKEN) as client:
            found.append(client.set("a", b""))
            found.append(client.requests)

    thread = threading.Thread(target=call)
    thread.start()
    with server:
        thread.join(10)
    assert found[0] == 1


def test_a_lost_answer_is_asked_for_again_and_nothing_is_done_twice(
    server: RendezvousServer,
) -> None:
    with LossyProxy(server, losses=3) as proxy, RendezvousClient(proxy.url, TOKEN) as client:
        assert client.one(Add("n", 1), Number) == Number(1)
        assert client.requests == 4
        client.close()
    assert server.apply([Add("n", 0)]) == (Number(1),)


def test_a_lost_answer_to_a_posted_event_does_not_post_it_twice() -> None:
    posted: list[bytes] = []

    async def handler(request: web.Request) -> web.Response:
        posted.append(await request.read())
        return web.json_response({"taken": len(posted)})

    def routes(app: web.Application) -> None:
        app.router.add_post("/v1/events", handler)
        app.router.add_get("/v1/events", handler)

    with (
        RendezvousServer(token=TOKEN, routes=routes) as server,
        LossyProxy(server, losses=2) as proxy,
        RendezvousClient(proxy.url, TOKEN) as client,
    ):
        assert client.post_json("/v1/events", b'{"type":"x"}') == b'{"taken": 1}'
        client.close()
        assert posted == [b'{"type":"x"}']
        assert client.get_bytes("/v1/events") == b'{"taken": 2}'
        client.close()


def test_a_connection_the_server_closed_meanwhile_is_opened_anew(
    server: RendezvousServer, client: RendezvousClient
) -> None:
    client.set("a", b"")
    client._connections.idle[0].sock.shutdown(socket.SHUT_RDWR)
    assert client.get("a") == Entry(b"", 1)


def test_a_successor_on_the_same_port_is_found_while_a_call_waits() -> None:
    first = RendezvousServer(token=TOKEN).start()
    found: list[Entry | None] = []

    def wait() -> None:
        with RendezvousClient(first.url, TOKEN) as client:
            found.append(client.get("a", wait=20))

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: waiting(first) == 1, "the client waits")
    first.stop()
    with RendezvousServer(port=first.port, token=TOKEN) as second:
        eventually(lambda: waiting(second) == 1, "the client waits again")
        second.post([Set("a", b"new")])
        thread.join(10)
    assert found == [Entry(b"new", 1)]


def test_a_driver_at_another_address_is_found_in_the_file_once_nobody_answers(
    tmp_path: Path,
) -> None:
    file = tmp_path / "driver"
    first = RendezvousServer(token=TOKEN).start()
    with RendezvousClient(first.url, TOKEN, url_file=file) as client:
        client.set("a/k", b"1")
        with RendezvousServer(token=TOKEN, succession=Succession(first_revision=1 << 40)) as second:
            file.write_text(second.url)
            assert client.set("a/k", b"2") == 2  # the first one still answers
            first.stop()
            assert client.set("a/k", b"3") > 1 << 40
            assert (client.url, client.silent_since) == (second.url, None)
            assert RendezvousClient(first.url, TOKEN, url_file=file).url == second.url


@pytest.mark.parametrize("with_wake", [False, True])
def test_a_request_that_waits_finds_the_new_driver_though_the_old_connection_stays_open(
    server: RendezvousServer, tmp_path: Path, with_wake: bool
) -> None:
    file = tmp_path / "driver"
    reader, writer = os.pipe()
    with (
        RendezvousServer(token=TOKEN) as second,
        RendezvousClient(server.url, TOKEN, timeout=20, url_file=file) as client,
    ):
        found: list[object] = []
        watch, wake = Watch({"a/k": 0}, wait=20), reader if with_wake else None
        waiter = threading.Thread(target=lambda: found.extend(client.batch(watch, wake=wake)))
        waiter.start()
        eventually(lambda: waiting(server) == 1, "the request waits")
        file.write_text(second.url)
        eventually(lambda: waiting(second) == 1, "the request waits at the new driver")
        second.apply([Set("a/k", b"here")])
        waiter.join(5)
        assert found == [Entries({"a/k": Entry(b"here", 1)})]
    os.close(reader)
    os.close(writer)


def test_a_client_that_connects_to_a_dead_machine_finds_the_new_driver_at_once(
    server: RendezvousServer, tmp_path: Path
) -> None:
    file = tmp_path / "driver"
    with contextlib.ExitStack() as stack:
        # The kernel drops what comes to a full queue, as a machine without power does.
        dead = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(dead.getsockname())
        url = f"http://127.0.0.1:{dead.getsockname()[1]}"
        client = stack.enter_context(RendezvousClient(url, TOKEN, timeout=20, url_file=file))
        writing = threading.Thread(target=client.set, args=("a/k", b"here"))
        began = time.monotonic()
        writing.start()
        eventually(lambda: client._connections.busy, "it connects")
        file.write_text(server.url)
        writing.join(20)
        assert time.monotonic() - began < CONNECT_S  # of the attempt that leads nowhere
        assert server.apply([Get(("a/k",))]) == (Entries({"a/k": Entry(b"here", 1)}),)


def test_an_attempt_that_looks_at_the_file_ends_in_time_though_nobody_answers(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as a machine without power
        url, patience = f"http://127.0.0.1:{silent.getsockname()[1]}", 3.0
        file = tmp_path / "driver"
        with RendezvousClient(url, TOKEN, patience, repeats=False, url_file=file) as client:
            began = time.monotonic()
            with pytest.raises(UnreachableError):
                client.get("a/k")
            assert time.monotonic() - began < 1.8 * patience, "it has waited once, not twice"


@pytest.mark.parametrize("content", ["", "no address", "http://127.0.0.1", "\xff"])
def test_a_file_without_an_address_changes_nothing(tmp_path: Path, content: str) -> None:
    file = tmp_path / "driver"
    file.write_text(content)
    client = RendezvousClient("http://127.0.0.1:9", TOKEN, repeats=False, url_file=file)
    with pytest.raises(UnreachableError):
        client.get("a/k")
    assert client.url == "http://127.0.0.1:9"
    assert client.silent_since is not None


def test_a_client_that_is_moved_takes_pending_calls_along(server: RendezvousServer) -> None:
    with (
        RendezvousServer(token=TOKEN) as second,
        RendezvousClient(server.url, TOKEN, timeout=20) as client,
    ):
        found: list[Entry | None] = []
        waiter = threading.Thread(target=lambda: found.append(client.get("a/k", wait=20)))
        waiter.start()
        eventually(lambda: waiting(server) == 1, "the call waits")
        second.apply([Set("a/k", b"here")])
        client.move(second.url)
        waiter.join(5)
        assert [entry and entry.value for entry in found] == [b"here"]


def test_abort_ends_a_call_that_blocks_another_thread(server: RendezvousServer) -> None:
    client = RendezvousClient(server.url, TOKEN)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            client.one(Watch({"never": 0}, wait=60), Entries)
        except AbortedError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: waiting(server) == 1, "the client waits")
    started = time.monotonic()
    client.abort()
    thread.join(10)
    assert len(caught) == 1
    assert time.monotonic() - started < 2
    with pytest.raises(AbortedError):
        client.get("a")
    client.close()
    eventually(lambda: waiting(server) == 0, "the waiter is gone")


class AbortedCall(threading.Thread):
    """A call in a thread of its own, which `abort` is to end."""

    def __init__(self, client: RendezvousClient) -> None:
        super().__init__()
        self.client, self.aborted = client, False
        self.start()

    def run(self) -> None:
        try:
            self.client.get("a")
        except AbortedError:
            self.aborted = True


def test_a_search_for_the_server_takes_no_random_numbers_of_the_script() -> None:
    """A worker's threads search while the script trains, which may have seeded the generator."""
    random.seed(7)
    before = random.getstate()
    client = RendezvousClient(f"http://127.0.0.1:{free_port()}", TOKEN, timeout=0.3)
    with pytest.raises(UnreachableError):
        client.get("key")
    assert random.getstate() == before


def test_abort_ends_the_search_for_a_server_that_is_not_there() -> None:
    client = RendezvousClient(f"http://127.0.0.1:{free_port()}", TOKEN, timeout=60)
    call = AbortedCall(client)
    eventually(lambda: client.requests == 0 and call.is_alive(), "the search goes on")
    client.abort()
    call.join(10)
    assert call.aborted


def test_abort_ends_a_connect_that_hangs() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for one in (first, second):  # they fill the backlog, so that later ones are not accepted
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        client = RendezvousClient(f"http://127.0.0.1:{full.getsockname()[1]}", TOKEN, timeout=60)
        call = AbortedCall(client)
        eventually(lambda: any(c.sock for c in client._connections.busy), "the client connects")
        time.sleep(0.1)
        started = time.monotonic()
        client.abort()
        call.join(10)
        assert call.aborted
        assert time.monotonic() - started < CONNECT_S / 2


def test_a_forked_child_opens_a_connection_of_its_own(
    server: RendezvousServer, client: RendezvousClient
) -> None:
    client.set("a", b"1")
    mine = client._connections.idle[0].sock.getsockname()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        # Nothing of the test runner may run here, whatever happens.
        try:
            client.one(Add("n", 1), Number)
            os.write(write_end, str(client._connections.idle[0].sock.getsockname()).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        theirs = pipe.read().decode()
    os.waitpid(child, 0)
    assert theirs
    assert theirs != str(mine)
    assert client.get("n") == Entry(b"1", 2)
    assert client._connections.idle[0].sock.getsockname() == mine


@pytest.mark.parametrize(
    "url", ["127.0.0.1:80", "ftp://a:1", "http://a", "https://a", "", "http://:80"]
)
def test_what_is_no_address_is_refused_when_the_client_is_made(url: str) -> None:
    with pytest.raises(ValueError, match="no rendezvous address"):
        RendezvousClient(url, TOKEN)


def test_a_request_over_a_limit_is_repeated_and_the_limit_is_named_at_the_deadline() -> None:
    tries = []

    async def handler(request: web.Request) -> web.Response:
        tries.append(request.path)
        if len(tries) < 3 or request.path == "/never":
            raise Problem(429 if len(tries) % 2 else 503, "busy", "it is full", "ask again")
        return web.Response(body=b"done")

    def routes(app: web.Application) -> None:
        app.router.add_get("/soon", handler)
        app.router.add_get("/never", handler)

    with (
        RendezvousServer(token=TOKEN, routes=routes) as server,
        RendezvousClient(server.url, TOKEN) as client,
    ):
        assert client.get_bytes("/soon") == b"done"
        assert len(tries) == 3
        with pytest.raises(RequestError, match="busy: it is full; ask again"):
            client.get_bytes("/never", deadline=0.2)
