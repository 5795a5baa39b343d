"""TLS between clients and the server: who is trusted, and what goes over a connection."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rendezvous import tls
from rendezvous.auth import Credentials, read_credentials, read_token_file, write_token_file
from rendezvous.client import RendezvousClient
from rendezvous.connections import HANDSHAKE_WAIT_S, Connections
from rendezvous.errors import (
    AbortedError,
    CertificateError,
    TokenError,
    UnreachableError,
    WokenError,
)
from rendezvous.limits import Hits, Limits
from rendezvous.server import RendezvousServer, ServerTls
from rendezvous.tls import ServerCertificate, make_certificate
from rendezvous.wire import Get, Set
from tests.rendezvous.common import TOKEN, eventually, waiting


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> ServerCertificate:
    return made(tmp_path_factory.mktemp("certificate"))


def made(folder: Path) -> ServerCertificate:
    files = tls.certificate_in(folder)
    make_certificate(files)
    return files


@pytest.fixture
def server(certificate: ServerCertificate) -> Iterator[RendezvousServer]:
    with RendezvousServer(token=TOKEN, tls=ServerTls(certificate=certificate)) as server:
        yield server


@pytest.fixture
def client(server: RendezvousServer) -> Iterator[RendezvousClient]:
    with RendezvousClient(server.url, TOKEN, fingerprint=server.known_by) as client:
        yield client


# ---- files -------------------------------------------------------------------------------


def test_a_token_file_tells_how_the_server_is_known(tmp_path: Path) -> None:
    path = write_token_file(tmp_path / "token", "secret", "sha256:ab")
    assert path.read_text() == "secret\nsha256:ab\n"
    assert read_credentials(path) == Credentials("secret", "sha256:ab")
    assert read_token_file(path) == "secret"
    assert read_credentials(write_token_file(path, "secret")) == Credentials("secret", "")


def test_certificate_and_key_are_readable_by_their_owner_alone(
    certificate: ServerCertificate,
) -> None:
    assert {path.stat().st_mode & 0o777 for path in certificate} == {0o600}
    assert certificate.exist


def test_files_that_do_not_fit_are_named(tmp_path: Path, certificate: ServerCertificate) -> None:
    (tmp_path / "a").mkdir()
    other, empty = made(tmp_path / "a"), tmp_path / "empty"
    empty.touch()
    with pytest.raises(CertificateError, match="is not that of the certificate in"):
        certificate._replace(key=other.key).context()
    with pytest.raises(CertificateError, match="are no certificate and its key"):
        certificate._replace(cert=empty).context()
    with pytest.raises(CertificateError, match="holds no certificate"):
        certificate._replace(cert=empty).fingerprint()
    with pytest.raises(CertificateError, match=r"cannot read .*: No such file"):
        certificate._replace(key=tmp_path / "none").context()


# ---- who is trusted ----------------------------------------------------------------------


def test_a_client_that_knows_the_fingerprint_is_served(
    server: RendezvousServer, client: RendezvousClient, certificate: ServerCertificate
) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    client.set("a/b", b"x")
    found = client.get("a/b")
    assert found is not None
    assert found.value == b"x"
    assert client.peer_fingerprint == server.fingerprint == certificate.fingerprint()
    assert client.get_bytes("/healthz") == b'{"status":"ok"}'  # handed to aiohttp


def test_a_server_with_another_certificate_gets_no_byte_of_the_request(
    server: RendezvousServer, tmp_path: Path
) -> None:
    expected = made(tmp_path).fingerprint()
    with (
        RendezvousClient(server.url, TOKEN, repeats=False, fingerprint=expected) as client,
        pytest.raises(UnreachableError, match="certificate of another server") as refused,
    ):
        client.get("a/b")
    assert isinstance(refused.value.cause, tls.WrongServerError)


def test_the_first_certificate_seen_is_the_only_one_taken(
    server: RendezvousServer, tmp_path: Path
) -> None:
    client = RendezvousClient(server.url, TOKEN, repeats=False, fingerprint=tls.FIRST_SEEN)
    assert client.peer_fingerprint == ""
    client.get("a/b")
    assert client.peer_fingerprint == server.fingerprint
    port = server.port
    server.stop()
    with RendezvousServer(port=port, token=TOKEN, tls=ServerTls(certificate=made(tmp_path))):
        for later in (client, client.clone()):
            with pytest.raises(UnreachableError, match="certificate of another server"):
                later.get("a/b")


def test_a_server_without_tls_is_recognised() -> None:
    with RendezvousServer(token=TOKEN) as plain:
        url = plain.url.replace("http:", "https:")
        client = RendezvousClient(url, TOKEN, repeats=False, fingerprint=tls.FIRST_SEEN)
        with pytest.raises(UnreachableError, match="speaks no TLS") as refused:
            client.get("a/b")
    assert isinstance(refused.value.cause, tls.NotTlsError)


def test_an_address_goes_with_the_token_file() -> None:
    with pytest.raises(TokenError, match="no fingerprint of its certificate"):
        RendezvousClient("https://127.0.0.1:1", TOKEN)
    with pytest.raises(TokenError, match="is plain, and by its token file the job speaks TLS"):
        RendezvousClient("http://10.0.0.1:1", TOKEN, fingerprint="sha256:ab")
    with pytest.raises(TokenError, match="the token file is damaged"):
        RendezvousClient("https://127.0.0.1:1", TOKEN, fingerprint="nonsense")
    with pytest.raises(ValueError, match="is not https"):  # a driver never goes back to plain
        RendezvousClient("https://127.0.0.1:1", TOKEN, fingerprint="sha256:ab").move("http://a:1")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "[::1]", "localhost"])
def test_on_loopback_http_is_spoken_over_tls_by_who_knows_the_certificate(host: str) -> None:
    for url in (f"http://{host}:1", f"https://{host}:1"):
        client = RendezvousClient(url, TOKEN, fingerprint="sha256:ab")
        client.move(f"{url}2")
        assert client.url == f"{url}2"
        with pytest.raises(ValueError, match="is not http"):
            client.move("http://10.0.0.1:1")


@pytest.fixture
def both(certificate: ServerCertificate) -> Iterator[RendezvousServer]:
    with RendezvousServer(
        token=TOKEN, tls=ServerTls(certificate=certificate, also_plain=True)
    ) as server:
        yield server


def test_a_server_on_loopback_answers_tls_and_plain_at_one_port(both: RendezvousServer) -> None:
    assert both.url.startswith("http://127.0.0.1:")
    with (
        RendezvousClient(both.url, TOKEN, fingerprint=both.known_by) as secured,
        RendezvousClient(both.url, TOKEN) as plain,
    ):
        value = bytes(range(256)) * 3500
        secured.set("a/b", value)
        found = plain.get("a/b")
        assert found is not None
        assert found.value == value
        assert [client.get_bytes("/healthz") for client in (secured, plain)] == [
            b'{"status":"ok"}'
        ] * 2
        assert (secured.peer_fingerprint, plain.peer_fingerprint) == (both.fingerprint, "")
        (kept,) = secured._connections.idle
        assert isinstance(kept.sock, ssl.SSLSocket)


def test_the_first_bytes_of_a_handshake_may_come_one_by_one(both: RendezvousServer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    arrives, leaves = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(arrives, leaves)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    with socket.create_connection(("127.0.0.1", both.port), 20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in leaves.read():
            connection.sendall(bytes((byte,)))
        while True:
            arrives.write(connection.recv(65536))
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                continue
    assert client.version() == "TLSv1.3"


def test_only_loopback_answers_plain_requests(certificate: ServerCertificate) -> None:
    with (
        RendezvousServer(
            "0.0.0.0",  # noqa: S104
            token=TOKEN,
            tls=ServerTls(certificate=certificate, also_plain=True),
        ) as server,
        RendezvousClient(server.url.replace("https", "http"), TOKEN, 2.0, repeats=False) as plain,
    ):
        assert server.url.startswith("https://")
        with pytest.raises(UnreachableError):
            plain.get("a/b")


class Heard:
    """A program at a port that was a server's; keeps what arrives, and answers nothing."""

    def __init__(self, port: int) -> None:
        self.bytes = b""
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            with accepted:
                accepted.settimeout(20)
                self.bytes += accepted.recv(65536)
                accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_a_port_that_is_another_programs_by_now_gets_no_request(both: RendezvousServer) -> None:
    with RendezvousClient(both.url, TOKEN, repeats=False, fingerprint=both.known_by) as client:
        client.set("a/b", b"x")
        port = both.port
        both.stop()
        other = Heard(port)
        try:
            with pytest.raises(UnreachableError, match="it speaks no TLS"):
                client.set("secret/key", b"x")
        finally:
            other.close()
    assert other.bytes[0] == 0x16
    for word in (TOKEN.encode(), b"HTTP", b"secret"):
        assert word not in other.bytes


@pytest.mark.parametrize("site", [False, True], ids=["pinned", "of a site"])
def test_a_connection_that_the_server_resets_before_the_handshake_is_closed_at_once(
    certificate: ServerCertificate, site: bool
) -> None:
    known = tls.known_by_ca(certificate.cert, "a") if site else certificate.fingerprint()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connected = socket.create_connection(listener.getsockname(), 20)
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()  # with a reset
        poll = select.poll()
        poll.register(connected, 0)
        assert poll.poll(20_000), "the reset has arrived"
        descriptor = connected.fileno()
        with pytest.raises(ConnectionError) as met, connected:
            tls.ServerIdentity(known).wrap(connected)
        assert met.tb is not None, "nothing is left to the garbage collector"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_older_versions_of_tls_are_refused(server: RendezvousServer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", server.port), 20) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain)


# ---- connections -------------------------------------------------------------------------


def test_connections_are_kept_and_large_values_pass(client: RendezvousClient) -> None:
    value = bytes(range(256)) * 3500
    client.set("a/large", value)
    for _ in range(3):
        found = client.get("a/large")
        assert found is not None
        assert found.value == value
    (kept,) = client._connections.idle
    assert isinstance(kept.sock, ssl.SSLSocket)


def test_a_client_that_borrows_makes_no_connection_where_one_rests(
    server: RendezvousServer, client: RendezvousClient
) -> None:
    client.set("a/b", b"x")
    (first,) = client._connections.idle
    borrower = client.clone(borrows=True)
    with borrower._connections.for_call() as lent:
        assert lent is first
        assert client.get("a/b") is not None, "it has another one meanwhile"
    assert len(client._connections.idle) == 2
    assert borrower.get("a/b") is not None
    assert client.get("a/b") is not None
    borrower.abort()
    assert len(client._connections.idle) == 2, "they are the lender's"
    late = client.clone(borrows=True)
    client.abort()
    assert late.get("a/b") is not None
    late.close()
    assert (first.sock, client._connections.idle) == (None, []), "nobody needs it any more"


def test_what_a_borrower_aborts_is_not_given_back(
    server: RendezvousServer, client: RendezvousClient
) -> None:
    client.set("a/b", b"x")
    (first,) = client._connections.idle
    borrower = client.clone(borrows=True)

    def wait() -> None:
        with pytest.raises(AbortedError):
            borrower.get("w/never", wait=60.0)

    thread = threading.Thread(target=wait, daemon=True)
    before = waiting(server)
    thread.start()
    eventually(lambda: waiting(server) > before, "the wait has begun", 30)
    borrower.abort()
    thread.join(30)
    assert not thread.is_alive()
    assert first.sock is None
    assert client._connections.idle == []
    assert client.get("a/b") is not None


def test_waits_end_by_a_write_a_wake_up_or_an_abort(
    server: RendezvousServer, client: RendezvousClient
) -> None:
    ours, theirs = socket.socketpair()
    found: list[object] = []

    def wait(key: str, wake: int | None) -> None:
        try:
            found.append(client.batch(Get((key,), 60.0), wake=wake))
        except (WokenError, AbortedError) as error:
            found.append(type(error))

    def begin(key: str, wake: int | None = None) -> threading.Thread:
        before = waiting(server)
        thread = threading.Thread(target=wait, args=(key, wake), daemon=True)
        thread.start()
        eventually(lambda: waiting(server) > before, "the wait has begun", 30)
        return thread

    with ours, theirs:
        threads = begin("w/written"), begin("w/woken", theirs.fileno())
        server.apply([Set("w/written", b"x")])
        threads[0].join(30)
        ours.send(b"!")
        threads[1].join(30)
        client.close()  # and with it the connection on which the answer is still to come
        eventually(lambda: waiting(server) == 0, "the server has seen the woken client leave", 30)
        last = begin("w/aborted")
        client.abort()
        last.join(30)
    assert [str(type(each)) if isinstance(each, tuple) else each for each in found] == [
        str(tuple),
        WokenError,
        AbortedError,
    ]


def test_clients_that_shake_hands_are_not_closed_to_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rendezvous.connections.YOUNG_S", 0.0)

    async def closes_one(handshake: float) -> bool:
        connections = Connections(Limits(unproven=1), Hits(), 1000, 10, handshake)
        connections.opened()
        try:
            return connections.may_open()
        finally:
            connections.close()

    assert asyncio.run(closes_one(0.0))
    assert not asyncio.run(closes_one(60.0))


def test_on_loopback_only_those_that_have_begun_a_handshake_get_time_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rendezvous.connections.YOUNG_S", 0.0)

    async def closed(shakes: bool) -> tuple[bool, bool]:
        connections = Connections(Limits(unproven=1, unproven_s=0.05), Hits(), 1000, 10)
        client = connections.opened()
        if shakes:
            connections.shakes_hands(client, 60.0)
        try:
            return connections.may_open(), connections.has_room(20)
        finally:
            connections.close()

    assert asyncio.run(closed(shakes=False)) == (True, True)
    assert asyncio.run(closed(shakes=True)) == (False, True)


def test_on_loopback_silent_connections_end_as_before(
    certificate: ServerCertificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rendezvous.connections.SWEEP_S", 0.05)
    limits = Limits(unproven_s=0.2)
    with (
        RendezvousServer(
            token=TOKEN, tls=ServerTls(certificate=certificate, also_plain=True), limits=limits
        ) as server,
        socket.create_connection(("127.0.0.1", server.port), 20) as silent,
    ):
        began = time.monotonic()
        assert silent.recv(1) == b""
        assert time.monotonic() - began < HANDSHAKE_WAIT_S
        assert server.hits.snapshot()["unproven_time"] == 1


def test_no_request_waits_for_ever_however_the_pieces_arrive(server: RendezvousServer) -> None:
    """With asyncio's TLS, a limit of 0 bytes to be sent pauses connections with nothing to send."""

    def use(number: int) -> None:
        with RendezvousClient(
            server.url, TOKEN, 10.0, repeats=False, fingerprint=server.known_by
        ) as client:
            for _ in range(5):
                client.set(f"user/{number}", b"x")
                assert client.get(f"user/{number}") is not None
                client.get(f"user/none-{number}", wait=0.02)  # answered later than it was read

    for _ in range(3):
        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(use, range(12))) == [None] * 12
