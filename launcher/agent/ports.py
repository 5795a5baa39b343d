"""Free TCP ports on this host, for torch's stores and for servers of the workers' own.

They lie outside the range from which the kernel takes ports for outgoing connections, so that
none is taken away between the test here and the moment when a worker listens on it.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_RANGE = (32768, 60999)  # Linux's own default
_LOWEST = 10240  # below it many services have their registered ports
_HIGHEST = 65535
_TAKEN = (errno.EADDRINUSE, errno.EACCES)


def free_ports(wanted: int, range_file: Path = _RANGE_FILE) -> tuple[int, ...]:
    """Up to `wanted` distinct ports that can be bound right now, in random order.

    Random, because agents of several jobs on one machine ask at the same time. Fewer than
    `wanted` (or none) where the host has no more.
    """
    candidates = _outside(_ephemeral_range(range_file))
    random.shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == wanted:
            break
        if _can_bind(port):
            found.append(port)
    return tuple(found)


def _ephemeral_range(range_file: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, range_file.read_text().split())
        return low, high
    return _DEFAULT_RANGE


def _outside(ephemeral: tuple[int, int]) -> list[int]:
    """Ports outside the range; where it leaves none, all of it (better than no store)."""
    low, high = ephemeral
    outside = [*range(_LOWEST, low), *range(max(high + 1, _LOWEST), _HIGHEST + 1)]
    return outside or list(range(_LOWEST, _HIGHEST + 1))


def _can_bind(port: int) -> bool:
    """Whether the port is free on every interface, for IPv4 and, where there is one, IPv6."""
    with socket.socket(socket.AF_INET) as four:
        try:
            four.bind(("", port))
        except OSError:
            return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as six:
        six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            six.bind(("::", port))
        except OSError as error:
            return error.errno not in _TAKEN
    return True
