"""A program that has taken a port, accepts connections and says nothing, before a TLS handshake."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rendezvous import tls
from rendezvous.client import RendezvousClient
from rendezvous.errors import UnreachableError
from rendezvous.server import RendezvousServer, ServerTls
from rendezvous.wire import Entries, Entry, Get
from tests.rendezvous.common import TOKEN


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RendezvousServer]:
    certificate = tls.certificate_in(tmp_path)
    tls.make_certificate(certificate)
    with RendezvousServer(token=TOKEN, tls=ServerTls(certificate=certificate)) as server:
        yield server


def test_a_stranger_who_says_nothing_holds_up_no_client_that_reads_of_another_driver(
    server: RendezvousServer, tmp_path: Path
) -> None:
    """The stranger has taken the port of the last driver; the next one has another port."""
    file = tmp_path / "driver"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        with RendezvousClient(
            url, TOKEN, 20.0, url_file=file, fingerprint=server.known_by
        ) as client:
            writing = threading.Thread(target=client.set, args=("a/k", b"here"))
            writing.start()
            stranger, _ = silent.accept()
            with stranger:
                assert stranger.recv(1) == b"\x16", "the client has begun a handshake"
                began = time.monotonic()
                file.write_text(server.url)
                writing.join(30)
            assert time.monotonic() - began < 5.0
            assert server.apply([Get(("a/k",))]) == (Entries({"a/k": Entry(b"here", 1)}),)


def test_a_stranger_who_says_nothing_costs_a_client_its_deadline_and_no_more(
    server: RendezvousServer,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        with RendezvousClient(
            url, TOKEN, 0.5, repeats=False, fingerprint=server.known_by
        ) as client:
            began = time.monotonic()
            with pytest.raises(UnreachableError):
                client.get("a/k")
            assert 0.5 <= time.monotonic() - began < 3.0
