"""TLS between clients and the server: who is trusted, and what goes over a connection."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rendezvous import tls
from rendezvous.auth import Credentials, read_credentials, read_token_file, write_token_file
from rendezvous.client import RendezvousClient
from rendezvous.connections import Connections
from rendezvous.errors import (
    AbortedError,
    CertificateError,
    TokenError,
    UnreachableError,
    WokenError,
)
from rendezvous.limits import Hits, Limits
from rendezvous.server import RendezvousServer
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
    with RendezvousServer(token=TOKEN, certificate=certificate) as server:
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
    with RendezvousServer(port=port, token=TOKEN, certificate=made(tmp_path)):
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
        RendezvousClient("http://127.0.0.1:1", TOKEN, fingerprint="sha256:ab")
    with pytest.raises(TokenError, match="the token file is damaged"):
        RendezvousClient("https://127.0.0.1:1", TOKEN, fingerprint="nonsense")
    with pytest.raises(ValueError, match="is not https"):  # a driver never goes back to plain
        RendezvousClient("https://127.0.0.1:1", TOKEN, fingerprint="sha256:ab").move("http://a:1")


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
