"""Ports that nobody has at this moment."""

from __future__ import annotations

import os
import random
import socket


def free_range(count: int) -> tuple[int, int]:
    """The first and the last of `count` neighbouring ports, outside of the kernel's range."""
    here = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8  # tests at once: parts apart
    while True:
        low = 12000 + 2000 * here + random.randrange(2000 - count)
        try:
            for port in range(low, low + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return low, low + count - 1
