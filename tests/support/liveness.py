"""Drivers that do nothing but show that they live, and other programs at their ports."""

from __future__ import annotations

import contextlib
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator

from tests.support.job import ROOT

_DRIVER = """
import sys
from elastic_driver.runtime.endpoint import LivenessPort
token, began, port, host = sys.argv[1:]
liveness = LivenessPort(host, 1, token, (int(port),))
liveness.open(float(began))
print(liveness.address, flush=True)
sys.stdin.read()
"""


class Driver:
    """A process with a liveness port."""

    def __init__(self, token: str, began: float, port: int, host: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, token, str(began), str(port), host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        with self.process:
            self.process.kill()


@contextlib.contextmanager
def driver(token: str, began: float, port: int = 0, host: str = "127.0.0.1") -> Iterator[Driver]:
    """A driver for a while; `port` 0: any."""
    found = Driver(token, began, port, host)
    try:
        yield found
    finally:
        found.kill()


class _Port(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    says = heard = b""
    ends = False
    relays_to: tuple[str, int] | None = None
    asked = 0

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Stranger(socketserver.BaseRequestHandler):
    server: _Port

    def handle(self) -> None:
        self.server.asked += 1
        if self.server.relays_to is None:
            self.request.sendall(self.server.says)
            while not self.server.ends and (data := self.request.recv(4096)):
                self.server.heard += data
            return
        with socket.create_connection(self.server.relays_to) as other:
            back = threading.Thread(target=_pass_on, args=(other, self.request), daemon=True)
            back.start()
            _pass_on(self.request, other)
            back.join(10)


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(4096):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def stranger(
    port: int, says: bytes = b"", relays_to: int = 0, *, ends: bool = False
) -> Iterator[_Port]:
    """A program at a port of loopback: silent, or it says something, or it passes all on."""
    with _Port(("127.0.0.1", port), _Stranger) as server:
        server.says, server.ends = says, ends
        server.relays_to = ("127.0.0.1", relays_to) if relays_to else None
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)
