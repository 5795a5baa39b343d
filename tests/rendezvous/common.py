"""What the tests of server and clients share: a server, and waiting for a condition."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

from elastic_driver import token_roles
from rendezvous.access import Access
from rendezvous.server import RendezvousServer
from rendezvous.store_routes import plain_store

TOKEN = "the-token-of-this-test"
STORE = plain_store(*token_roles.ALL)  # the rights of a server that knows the roles of a job
ACCESS = Access(STORE)


def eventually(condition: Callable[[], bool], what: str, within: float = 10.0) -> None:
    """Return as soon as the condition holds; fail after `within` seconds."""
    until = time.monotonic() + within
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {within:g} s"
        time.sleep(0.005)


def waiting(server: RendezvousServer) -> int:
    """How many batches wait in the server's store."""
    assert server._service is not None
    return server._service.waiting


def request(
    server: RendezvousServer,
    method: str,
    path: str,
    body: bytes | None = None,
    token: str | None = TOKEN,
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    """One request without any help from our own client: status, headers, body."""
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, dict(response.headers), response.read()
    finally:
        connection.close()


def error_of(body: bytes) -> dict[str, Any]:
    """The error in an answer; fails where it has another shape."""
    document = json.loads(body)
    assert set(document) == {"error"}
    assert set(document["error"]) == {"code", "message", "hint"}
    error: dict[str, Any] = document["error"]
    return error


class LossyProxy:
    """Passes requests on to the server, and loses the answers of the first `losses` of them.

    A lost answer was sent by the server: the request was carried out, and the connection ends.
    """

    def __init__(self, server: RendezvousServer, losses: int) -> None:
        self.losses, self.passed = losses, 0
        self._port = server.port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> LossyProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with socket.create_connection(self._listener.getsockname(), timeout=5):
            self._listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            upstream = socket.create_connection(("127.0.0.1", self._port), timeout=10)
            with client, upstream:
                client.settimeout(10)
                message = _one_message(client)
                if not message:
                    continue  # somebody connected and left
                upstream.sendall(message)
                answer = _one_message(upstream)
                if self.losses:
                    self.losses -= 1
                else:
                    client.sendall(answer)
                    self.passed += 1


def _one_message(source: socket.socket) -> bytes:
    """One HTTP message with a Content-Length, or what came before the connection ended."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = source.recv(65536)
        if not chunk:
            return data
        data += chunk
    head = data.split(b"\r\n\r\n")[0]
    lengths = [
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length")
    ]
    while len(data) < len(head) + 4 + sum(lengths):
        data += source.recv(65536)
    return data
