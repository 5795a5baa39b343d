"""Free TCP ports on this host, for torch's stores and for servers that workers start.

They lie outside the range from which the kernel takes ports for outgoing connections. So the kernel
gives none of them away between the test here and the moment when a worker listens on it.
"""

import contextlib
import random
import socket
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_RANGE = (32768, 60999)  # Linux's own default
_USABLE = range(10240, 65536)  # below it many services have their registered ports


def first_free(ports: Sequence[int], wanted: int) -> tuple[int, ...]:
    """Return up to `wanted` of these ports that can be bound right now, in random order."""
    shuffled = random.SystemRandom().sample(ports, len(ports))
    return tuple(islice(filter(_can_bind, shuffled), wanted))


def free_ports(wanted: int, range_file: Path = _RANGE_FILE) -> tuple[int, ...]:
    """Return up to `wanted` distinct ports that can be bound right now, in random order.

    The order is random because agents of several jobs on one machine ask at the same time. There
    are fewer than `wanted` (or none) if the host has no more.
    """
    low, high = _DEFAULT_RANGE
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, range_file.read_text().split())
    # If no port lies outside the range, any port is better than none.
    candidates = [port for port in _USABLE if not low <= port <= high] or list(_USABLE)
    return first_free(candidates, wanted)


def _can_bind(port: int) -> bool:
    """Return whether the port is free on every interface, for IPv4 and, if there is one, IPv6."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError:
        return False
    return True
