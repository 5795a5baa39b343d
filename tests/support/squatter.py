"""A program of another user that takes a port which was a driver's, and plays the driver.

It keeps all that it hears. To agents it gives the order to end.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

_REVISION = 2**60
_AGENT = re.compile(r"agents/(.*)/orders/1$")


class Squatter:
    """The program at `port`; with `context` it speaks TLS, with a certificate of its own."""

    def __init__(self, port: int, context: ssl.SSLContext | None) -> None:
        self.heard: list[bytes] = []  # on each connection, without TLS
        self._port, self._context = port, context
        self._listener = _take(port)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                threading.Thread(target=self._talk, args=(accepted,), daemon=True).start()

    def _talk(self, accepted: socket.socket) -> None:
        number = len(self.heard)
        self.heard.append(b"")
        with contextlib.suppress(OSError), accepted:
            accepted.settimeout(10)
            if self._context is None:
                self._answer_all(accepted, number)
            else:
                with self._context.wrap_socket(accepted, server_side=True) as inside:
                    self._answer_all(inside, number)

    def _answer_all(self, connection: socket.socket, number: int) -> None:
        arrived = b""
        while True:
            while not (found := re.match(rb"(.*?)\r\n\r\n", arrived, re.DOTALL)):
                if not (piece := connection.recv(65536)):
                    return
                self.heard[number] += piece
                arrived += piece
                if arrived[0] == 0x16:  # a handshake, which it does not understand
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                    return
            length = re.search(rb"(?i)content-length: *(\d+)", found[1])
            size = int(length[1]) if length else 0
            arrived = arrived[found.end() :]
            while len(arrived) < size:
                arrived += connection.recv(65536)
            body, arrived = arrived[:size], arrived[size:]
            answer = json.dumps(self._answer(found[1].split()[1].decode(), body)).encode()
            head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer)
            connection.sendall(head + answer)

    def _answer(self, path: str, body: bytes) -> Any:
        if not path.endswith("kv:batch"):
            return {"accepted": True}
        return {"results": [self._result(each) for each in json.loads(body)["operations"]]}

    def _result(self, operation: dict[str, Any]) -> dict[str, Any]:
        if operation["type"] in ("get", "watch"):
            found = {key: self._value(key) for key in operation["keys"]}
            entries = {
                key: {
                    "value": base64.b64encode(json.dumps(value).encode()).decode(),
                    "revision": _REVISION,
                }
                for key, value in found.items()
                if value is not None
            }
            return {"type": "entries", "entries": entries, "timed_out": not entries}
        return {"type": "written", "revision": _REVISION}

    def _value(self, key: str) -> Any:
        if key == "job/driver":
            return {"term": 9, "url": f"http://127.0.0.1:{self._port}"}
        if _AGENT.match(key):
            return {"type": "shutdown", "grace": 0.0, "reason": "the squatter says so"}
        return None


def _take(port: int) -> socket.socket:
    """Return a listener at the port as soon as its owner has died."""
    until = time.monotonic() + 20
    while True:
        try:
            return socket.create_server(("127.0.0.1", port), backlog=128)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.002)


@contextlib.contextmanager
def squatting(port: int, context: ssl.SSLContext | None = None) -> Iterator[Squatter]:
    """A squatter at this port, until the end of the block."""
    squatter = Squatter(port, context)
    try:
        yield squatter
    finally:
        squatter.close()
