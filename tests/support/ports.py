"""Ports that nobody has at this moment."""

from __future__ import annotations

import random
import socket


def free_range(count: int) -> tuple[int, int]:
    """The first and the last of `count` neighbouring ports, outside of the kernel's range."""
    while True:
        low = random.randrange(12000, 30000)
        try:
            for port in range(low, low + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return low, low + count - 1
