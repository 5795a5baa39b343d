"""The address of a server that nodes join: is it this machine's, and what to bind there."""

import contextlib
import ipaddress
import itertools
import socket

import psutil

from launcher.backends.addresses import is_this_machine
from launcher.network import SOMEWHERE, address_towards, is_loopback
from launcher.plan.hosts import ANYWHERE


def can_serve(host: str, port: int) -> bool:
    """Return whether a name or address is this machine's, and the port is free here now.

    A name server is asked too.
    """
    if not is_this_machine(host) and not any(map(is_this_machine, _addresses(host))):
        return False
    address = bind_address(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.create_server((address, port), family=family):
        return True
    return False


def bind_address(host: str) -> str:
    """Return the numeric address to listen on for nodes that know the server by this name.

    That is every address for a name that leads elsewhere (a service's), or to loopback though it
    is not `localhost` (Debian gives a machine's own name 127.0.1.1).
    """
    if host in ANYWHERE or is_loopback(host):
        return "127.0.0.1" if host == "localhost" else host
    own = [a for a in _addresses(host) if is_this_machine(a) and not is_loopback(a)]
    return own[0] if own else ANYWHERE[0]


def own_address(bound: str) -> str | None:
    """Return where workers of other nodes reach the server's; None: there is only loopback."""
    if not ipaddress.ip_address(bound).is_unspecified:
        return None if is_loopback(bound) else bound
    found = address_towards(SOMEWHERE)
    if found is None:  # no default route
        entries = itertools.chain(*psutil.net_if_addrs().values())
        four = (str(entry.address) for entry in entries if entry.family == socket.AF_INET)
        found = next((address for address in four if not is_loopback(address)), None)
    return found


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
