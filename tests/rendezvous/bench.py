"""What the tests of server and clients share: a server, and waiting for a condition."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

from rendezvous.server import RendezvousServer

TOKEN = "the-token-of-this-test"


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


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
