"""What goes over a cable of a cluster: every frame, as it is on the wire.

    with captured(NAMESPACE, INTERFACE, tmp_path / "frames") as frames: …
    frames.read_bytes()

Run as a program it is the process that captures: `python capture.py INTERFACE FILE`.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_ALL_FRAMES = 0x0003  # ETH_P_ALL
_MOST_BYTES = 1 << 17


@contextlib.contextmanager
def captured(namespace: str, interface: str, file: Path) -> Iterator[Path]:
    """Write all frames of an interface in a network namespace to a file while this lasts."""
    argv = ["ip", "netns", "exec", namespace, sys.executable, __file__, interface, str(file)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin, process.stdout:
        assert process.stdout.readline() == b"captures\n"
        try:
            yield file
        finally:
            process.terminate()


def main(interface: str, file: str) -> None:
    """Write frames until a signal ends this process."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_FRAMES)) as source:
        source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
        source.bind((interface, 0))
        print("captures", flush=True)
        with open(file, "wb", buffering=0) as frames:
            while True:
                frames.write(source.recv(_MOST_BYTES))


if __name__ == "__main__":
    main(*sys.argv[1:])
