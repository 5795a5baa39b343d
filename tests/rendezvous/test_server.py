from __future__ import annotations

import gc
import resource
import socket
import threading
import time

import pytest
from aiohttp import web

from rendezvous.client import RendezvousClient
from rendezvous.errors import AddressError, RendezvousError, StoppedError
from rendezvous.server import Callbacks, RendezvousServer
from rendezvous.wire import Add, Count, Entries, Entry, Get, Number, Set, Watch, Written
from tests.rendezvous.common import TOKEN, eventually, request, waiting


def test_the_driver_reads_and_writes_without_http(server: RendezvousServer) -> None:
    assert server.apply([Set("a", b"1"), Add("n", 2)]) == (Written(1), Number(2))
    server.post([Set("a", b"2")])
    assert server.apply([Get(("a",))]) == (Entries({"a": Entry(b"2", 3)}),)


def test_posted_batches_keep_the_order_of_the_calls(server: RendezvousServer) -> None:
    for n in range(500):
        server.post([Set("a", str(n).encode())])
    assert server.apply([Get(("a",))])[0] == Entries({"a": Entry(b"499", 500)})


def test_what_the_driver_posts_releases_who_waits_over_http(
    server: RendezvousServer, client: RendezvousClient
) -> None:
    found: list[Entry | None] = []
    thread = threading.Thread(target=lambda: found.append(client.get("job/world", wait=20)))
    thread.start()
    eventually(lambda: waiting(server) == 1, "the client waits")
    server.post([Set("job/world", b"w")])
    thread.join(10)
    assert found == [Entry(b"w", 1)]


def test_apply_gives_up_at_its_deadline_and_leaves_no_waiter(server: RendezvousServer) -> None:
    with pytest.raises(RendezvousError, match=r"within 0\.05 s"):
        server.apply([Get(("never",), wait=60)], timeout=0.05)
    eventually(lambda: waiting(server) == 0, "the waiter is gone")


def test_an_expired_lease_is_reported_once() -> None:
    expired: list[str] = []
    with RendezvousServer(
        token=TOKEN, callbacks=Callbacks(on_lease_expired=expired.append)
    ) as server:
        server.apply([Set("workers/a/lease", b"", lease=0.05)])
        eventually(lambda: expired == ["workers/a/lease"], "the lease expires")
        assert server.apply([Count("workers/")]) == (Number(0),)
        assert expired == ["workers/a/lease"]


def test_a_listener_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(key: str) -> None:
        raise RuntimeError(f"cannot take {key}")

    with RendezvousServer(token=TOKEN, callbacks=Callbacks(on_lease_expired=fail)) as server:
        server.apply([Set("lease", b"", lease=0.01)])
        eventually(lambda: server.apply([Count()]) == (Number(0),), "the lease expires")
        assert server.apply([Set("a", b"")])
    assert "lease lease expired, but telling its listener failed" in caplog.text


def test_work_of_others_on_its_loop_that_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("a fault")

    with RendezvousServer(token=TOKEN) as server:
        server.spawn(fail())
        eventually(lambda: "work on the rendezvous server's loop has failed" in caplog.text, "told")
        assert server.apply([Set("a", b"")])


def test_work_that_the_end_of_the_server_ends_has_not_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waits = threading.Event()

    with RendezvousServer(token=TOKEN) as server:

        async def wait() -> None:
            while True:
                waits.set()
                await server.carry_out([Watch({"none": 0}, wait=0.01)])

        server.spawn(wait())
        assert waits.wait(10)
    assert caplog.text == ""


def test_a_server_whose_loop_fails_says_so_to_its_owner(caplog: pytest.LogCaptureFixture) -> None:
    failed: list[Exception] = []
    with RendezvousServer(token=TOKEN, callbacks=Callbacks(on_failed=failed.append)) as server:
        assert server._loop is not None
        server._loop.call_soon_threadsafe(server._loop.stop)  # asyncio.run fails then
        eventually(lambda: failed, "its owner knows")
    assert "ended by an error" in caplog.text


def test_a_server_that_stood_still_does_not_blame_those_who_hold_leases() -> None:
    expired: list[str] = []
    with RendezvousServer(
        token=TOKEN, callbacks=Callbacks(on_lease_expired=expired.append)
    ) as server:
        server.apply([Set("lease", b"", lease=0.3)])
        assert server._loop is not None
        server._loop.call_soon_threadsafe(time.sleep, 1.0)  # as if stopped by a signal
        for _ in range(3):  # the overdue timer has run when these are answered
            assert server.apply([Count("lease")]) == (Number(1),)
        server.apply([Set("lease", b"", lease=60)])  # a renewal that waited in its socket
        assert expired == []


def test_other_rooms_mount_routes_behind_the_same_token() -> None:
    async def hello(_request: web.Request) -> web.Response:
        return web.Response(text="hello")

    def routes(app: web.Application) -> None:
        app.router.add_get("/v1/hello", hello)

    with RendezvousServer(token=TOKEN, routes=routes) as server:
        assert request(server, "GET", "/v1/hello")[::2] == (200, b"hello")
        assert request(server, "GET", "/v1/hello", token=None)[0] == 401


def test_a_port_in_use_is_named_at_once(server: RendezvousServer) -> None:
    with pytest.raises(AddressError, match=f"127.0.0.1:{server.port}.*another program listens"):
        RendezvousServer(port=server.port, token=TOKEN).start()


def test_a_name_is_no_address_to_listen_on() -> None:
    with pytest.raises(AddressError, match="not a numeric address"):
        RendezvousServer("localhost", token=TOKEN).start()


def test_no_address_is_ever_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(host: object, *rest: object, **more: object) -> object:
        assert str(host) == "127.0.0.1", f"{host} was looked up"
        return original(host, *rest, **more)  # type: ignore[arg-type]

    def refuse(*_: object) -> object:
        raise AssertionError("a name was looked up")

    original = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(socket, "gethostbyaddr", refuse)
    monkeypatch.setattr(socket, "getfqdn", refuse)
    with RendezvousServer(token=TOKEN) as server, RendezvousClient(server.url, TOKEN) as client:
        assert client.set("a", b"") == 1


def test_a_server_without_a_token_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="needs a token"):
        RendezvousServer(token="")


def test_stopping_turns_away_who_waits_and_ends_the_thread() -> None:
    server = RendezvousServer(token=TOKEN).start()
    answers: list[int] = []
    thread = threading.Thread(
        target=lambda: answers.append(request(server, "GET", "/v1/kv/a/b?wait=60")[0])
    )
    thread.start()
    eventually(lambda: waiting(server) == 1, "the client waits")
    started = time.monotonic()
    server.stop()
    thread.join(10)
    assert answers == [503]
    assert time.monotonic() - started < 5
    assert not any(t.name == "rendezvous" and t.is_alive() for t in threading.enumerate())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_stopping_twice_or_before_the_start_is_no_error() -> None:
    server = RendezvousServer(token=TOKEN)
    server.stop()
    server.start()
    server.stop()
    server.stop()


def test_stopping_does_not_wait_for_a_handler_that_hangs() -> None:
    entered = threading.Event()

    async def hang(_request: web.Request) -> web.Response:
        entered.set()
        await web.asyncio.sleep(3600)  # type: ignore[attr-defined]
        raise AssertionError

    server = RendezvousServer(
        token=TOKEN, routes=lambda app: app.router.add_get("/hang", hang) and None
    ).start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(
            f"GET /hang HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        assert entered.wait(10)
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 6


def test_more_clients_may_connect_than_a_shell_allows_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
    try:
        with RendezvousServer(token=TOKEN):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == min(hard, 65536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_stopped_server_says_so() -> None:
    server = RendezvousServer(token=TOKEN)
    with pytest.raises(StoppedError, match="not started"):
        _ = server.port
    with pytest.raises(StoppedError, match="not running"):
        server.apply([Count()])
    server.start()
    server.stop()
    with pytest.raises(StoppedError, match="not running"):
        server.post([Set("a")])


def test_a_wildcard_address_is_shown_as_one_that_can_be_reached() -> None:
    with RendezvousServer("0.0.0.0", token=TOKEN) as server:  # noqa: S104 - what is tested
        assert server.url == f"http://127.0.0.1:{server.port}"


def test_a_connection_that_is_made_as_the_server_stops_leaves_no_open_socket() -> None:
    for _ in range(20):
        server = RendezvousServer(token=TOKEN).start()
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        server.stop()
        for client in clients:
            client.close()
    gc.collect()  # what was forgotten warns, and pytest takes that for an error
