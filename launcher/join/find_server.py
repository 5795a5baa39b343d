"""Whether this machine is the one that nodes know as the server, and where it then listens."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

import psutil

from launcher.backends.addresses import is_this_machine
from launcher.network import SOMEWHERE, address_towards, is_loopback
from launcher.plan.role import ANYWHERE, Look


def look() -> Look:
    """This machine, as deciding about its role wants to know it."""
    return Look(is_here, can_bind)


def is_here(host: str) -> bool:
    """Whether a name or address is this machine's, also by a name server's word."""
    return is_this_machine(host) or any(map(is_this_machine, _addresses(host)))


def can_bind(host: str, port: int) -> bool:
    """Whether this machine could serve there now."""
    address = bind_address(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        probe.listen()
        return True
    return False


def bind_address(host: str) -> str:
    """The numeric address to listen on for nodes that know the server by this name.

    A name that leads elsewhere (a service's), or to loopback though it is not `localhost` (Debian
    gives a machine's own name 127.0.1.1), does not say which: then it is every address.
    """
    if host in ANYWHERE or is_loopback(host):
        return "127.0.0.1" if host == "localhost" else host
    own = [a for a in _addresses(host) if is_this_machine(a) and not is_loopback(a)]
    return own[0] if own else ANYWHERE[0]


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def own_address(bound: str) -> str | None:
    """Where workers of other nodes reach those of the server's; None: there is only loopback."""
    if not ipaddress.ip_address(bound).is_unspecified:
        return None if is_loopback(bound) else bound
    found = address_towards(SOMEWHERE)
    if found is not None:
        return found
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and not is_loopback(entry.address):
                return str(entry.address)
    return None
