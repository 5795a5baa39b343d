"""Programs that hold a port: they accept connections, and are no server of ours."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator

NONSENSE = b"\x16\x03\x01 220 mail.example ESMTP\r\n{}\n+\n\x00\xff"


@contextlib.contextmanager
def holding(port: int, says: bytes, host: str = "127.0.0.1") -> Iterator[list[bytes]]:
    """Hold a port, which may still be of a process that has just ended; yield what was heard.

    `says`: what each connection gets; nothing: it stays open in silence.
    """
    until = time.monotonic() + 10.0
    while True:
        try:
            listener = socket.create_server((host, port))
            break
        except OSError:
            if time.monotonic() > until:
                raise
    heard, open_ = list[bytes](), list[socket.socket]()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                open_.append(connection)
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while got := connection.recv(65536):
                heard.append(got)
                if says:
                    connection.sendall(says)
                    connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield heard
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        for connection in open_:
            connection.close()


def main() -> None:
    """Hold the port that the arguments name, at an address, until stdin ends."""
    with holding(int(sys.argv[2]), NONSENSE, sys.argv[1]):
        print("held", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
