"""PostgreSQL has to prove itself before it learns anything, on this machine as elsewhere."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.brain.store.address import read_address, safe_parameters
from elastic_driver.errors import UsageError
from launcher.launch.checks import check_database
from tests.support.certificates import CertificateAuthority
from tests.support.ports import free_range
from tests.support.postgres import PASSWORD, Postgres, why_not

SAFE = {"sslmode": "verify-full", "require_auth": "scram-sha-256"}
psycopg = pytest.importorskip("psycopg")


@pytest.mark.parametrize(
    ("url", "environ", "told"),
    [
        ("postgresql://ann@head/stats", {}, SAFE),
        ("postgresql://ann@127.0.0.1/stats", {}, SAFE),
        ("postgresql://ann@[::1]:5433/stats", {}, SAFE),
        ("postgresql://ann@localhost/stats", {}, SAFE),
        ("postgresql://ann@/stats", {"PGHOST": "head"}, SAFE),
        ("postgresql://ann@/stats?host=head", {}, SAFE),
        ("postgresql://ann@/stats?host=/run/pg,head", {}, SAFE),
        ("postgresql://ann@/stats?host=/run/pg&hostaddr=10.0.0.1", {}, SAFE),
        ("postgresql://ann@/stats?service=stats", {}, SAFE),
        ("postgresql://ann@/stats", {"PGHOSTADDR": "10.0.0.1"}, SAFE),
        ("postgresql://ann@/stats", {}, {}),
        ("postgresql://ann@/stats", {"PGHOST": "/run/pg"}, {}),
        ("postgresql://ann@/stats?host=/run/pg", {}, {}),
        ("postgresql://ann@%2Frun%2Fpg/stats", {}, {}),
        (
            "postgresql://ann@head/stats?sslmode=require",
            {},
            {"require_auth": "scram-sha-256"},
        ),
        ("postgresql://ann@head/stats?require_auth=none", {}, {"sslmode": "verify-full"}),
    ],
)
def test_what_libpq_is_told(url: str, environ: dict[str, str], told: dict[str, str]) -> None:
    assert safe_parameters(url, 180_000, environ) == told


def test_an_old_libpq_is_told_in_its_own_words() -> None:
    bound = {"sslmode": "verify-full", "channel_binding": "require"}
    assert safe_parameters("postgresql://ann@head/stats", 150_000, {}) == bound
    assert safe_parameters("postgresql://ann@head/stats?sslmode=disable", 150_000, {}) == {}


class FalseServer:
    """Another user's program at PostgreSQL's port: it asks for the password in clear."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.startups: list[bytes] = []
        self.passwords: list[bytes] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            with client:
                client.settimeout(5)
                try:
                    self._talk(client)
                except (OSError, struct.error):
                    continue

    def _talk(self, client: socket.socket) -> None:
        while True:
            (length,) = struct.unpack("!I", client.recv(4))
            said = client.recv(length - 4)
            if struct.unpack("!I", said[:4])[0] not in (80877103, 80877104):
                break
            client.sendall(b"N")  # neither TLS nor GSS
        self.startups.append(said)
        client.sendall(b"R" + struct.pack("!II", 8, 3))  # AuthenticationCleartextPassword
        if client.recv(1) == b"p":
            self.passwords.append(client.recv(100))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def false_server() -> Iterator[FalseServer]:
    server = FalseServer()
    yield server
    server.close()


@pytest.mark.parametrize(
    ("rest", "said", "startups"),
    [
        ("?sslrootcert={ca}", "it speaks no TLS; give ?sslrootcert=FILE", 0),
        ("?sslmode=disable", "it does not prove that it knows the password", 1),
        ("?sslmode=prefer", "it does not prove that it knows the password", 1),
    ],
)
def test_a_false_server_does_not_get_the_password(
    rest: str, said: str, startups: int, false_server: FalseServer, tmp_path: Path
) -> None:
    ca = CertificateAuthority(tmp_path).ca
    place = f"127.0.0.1:{false_server.port}/stats{rest.format(ca=ca)}"
    with pytest.raises(UsageError) as refused:
        check_database(read_address(f"postgresql://ann:{PASSWORD}@{place}"))
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert PASSWORD not in str(refused.value)
    assert false_server.passwords == []
    assert (len(false_server.startups) > 0) is bool(startups), "no user's name goes in clear"


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Postgres, CertificateAuthority, int]]:
    """A PostgreSQL with a certificate of a site's CA, for the name localhost."""
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    folder.chmod(0o755)
    port = free_range(1)[0]
    authority = CertificateAuthority(folder / "ca")
    files = authority.certificate("localhost")
    server = Postgres(folder, *_options(files.cert, files.key), port=port)
    for path in (files.cert, files.key):
        owner = server.folder.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
        path.chmod(0o600)
    try:
        server.create()
        server.start()
        yield server, authority, port
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _options(cert: Path, key: Path) -> list[str]:
    told = {
        "listen_addresses": "127.0.0.1",
        "ssl": "on",
        "ssl_cert_file": cert,
        "ssl_key_file": key,
    }
    return [word for name, value in told.items() for word in ("-c", f"{name}={value}")]


def test_the_right_server_is_believed_by_its_ca(
    site: tuple[Postgres, CertificateAuthority, int], tmp_path: Path
) -> None:
    _server, authority, port = site
    whole = f"postgresql://elastic:{PASSWORD}@localhost:{port}/postgres"
    check_database(read_address(f"{whole}?sslrootcert={authority.ca}"))
    check_database(read_address(f"{whole}?sslmode=require"))
    other = CertificateAuthority(tmp_path / "other").ca
    missing = tmp_path / "none.pem"
    for rest, said in (
        (f"?sslrootcert={other}", "another CA has signed its certificate"),
        (f"?sslrootcert={missing}", "its certificate cannot be checked"),
    ):
        with pytest.raises(UsageError) as refused:
            check_database(read_address(f"{whole}{rest}"))
        assert said in str(refused.value)
    elsewhere = whole.replace("localhost", "127.0.0.1")
    with pytest.raises(UsageError, match="its certificate is another host's"):
        check_database(read_address(f"{elsewhere}?sslrootcert={authority.ca}"))
