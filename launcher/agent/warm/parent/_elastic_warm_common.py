"""What both ends of the conversation, and all processes of a warm parent, do in the same way.

Messages are lines of JSON over a stream socket. Like everything in this folder it uses the
standard library only; unlike the rest, the agent's side imports it too.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
from typing import Any, cast

_PR_SET_PDEATHSIG = 1


def send_line(line: socket.socket, message: dict[str, Any]) -> None:
    """Say one message."""
    line.sendall(json.dumps(message).encode("ascii") + b"\n")


def receive_line(line: socket.socket) -> dict[str, Any]:
    """Hear one message; EOFError where the other end closes before it is complete."""
    heard = bytearray()
    while not heard.endswith(b"\n"):
        piece = line.recv(65536)
        if not piece:
            raise EOFError("it ended while it was asked")
        heard += piece
    return cast("dict[str, Any]", json.loads(heard))


def die_with_parent() -> None:
    """Ask the kernel to kill us when the thread that is our parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def fork_apart() -> int | None:
    """Fork twice, so that the second child becomes our own parent's, which adopts orphans.

    None in that child, once its first parent has been collected: then it has been handed on
    already, and what it asks for its parent's death concerns the new one. For us, the status with
    which the process between has ended: not 0 where it could not fork.
    """
    gate, opener = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork():
            os._exit(0)
        os.close(opener)
        os.read(gate, 1)
        os.close(gate)
        return None
    _, ended = os.waitpid(between, 0)
    os.close(opener)
    os.close(gate)
    return ended
