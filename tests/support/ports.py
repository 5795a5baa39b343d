"""Ports of loopback that nobody has at this moment, and that no other test takes meanwhile.

They are outside of the range from which the kernel takes ports of connections, and of servers that
ask for any port: one from there may be somebody else's before it is used.
"""

from __future__ import annotations

import itertools
import os
import random
import socket

_COUNT = 2000  # of the ports of one process of tests
_FIRST = 12000 + _COUNT * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8)
_START = random.randrange(_COUNT)
_ports = itertools.cycle(_FIRST + (_START + number) % _COUNT for number in range(_COUNT))


def free_range(count: int) -> tuple[int, int]:
    """The first and the last of `count` neighbouring ports; the next call returns other ones."""
    found: list[int] = []
    while len(found) < count:
        port = next(_ports)
        follows = not found or port == found[-1] + 1
        found = [*(found if follows else ()), port] if _is_free(port) else []
    return found[0], found[-1]


def free_port() -> int:
    """One such port."""
    return free_range(1)[0]


def free_ports(count: int) -> list[int]:
    """So many such ports."""
    low, high = free_range(count)
    return list(range(low, high + 1))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
