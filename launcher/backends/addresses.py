"""Names of this machine, and the address at which each host finds the rendezvous.

A name server that does not answer would delay the job. So a name is compared only with what the
machine itself knows: loopback, its own name, the addresses of its interfaces, and its hosts file.
Other names are resolved only when an address is needed.
"""

import contextlib
import ipaddress
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from elastic_driver.errors import ClusterError
from launcher import network
from rendezvous.client_connections import is_loopback

_HOSTS_FILE = Path("/etc/hosts")
LOOPBACK = "127.0.0.1"


def is_this_machine(host: str, hosts_file: Path = _HOSTS_FILE) -> bool:
    """Return whether a host name or address means this machine."""
    name, own = host.lower().rstrip("."), socket.gethostname().lower()
    addresses = (name, *_addresses_in(hosts_file, name))
    return name in (own, own.partition(".")[0]) or any(
        is_loopback(a) or network.interface_of(a) is not None for a in addresses
    )


def meeting_address(host: str) -> str:
    """Return the address at which processes of this machine reach one on `host`."""
    return host if is_loopback(host) and host != "localhost" else LOOPBACK


def own_address(bind_host: str | None) -> str | None:
    """Return the address at which other hosts reach this one; None: the job has no other hosts.

    `bind_host` is the numeric address that the rendezvous listens on.
    """
    bound = ipaddress.ip_address(bind_host or LOOPBACK)
    if bound.is_loopback:
        return None
    return network.default_address() if bound.is_unspecified else bind_host


def find_address(host: str, look_up: Callable[[str], str]) -> str | None:
    """Return our address on the way to a host; None if there is no way.

    `look_up` gives the name by which the network knows the host.
    """
    towards = network.address_towards(look_up(host))
    # The name of a host behind a jump host may have no address here: take the default route.
    return towards or network.address_towards(network.SOMEWHERE)


def endpoint_for(host: str, url: str, bind_host: str | None, look_up: Callable[[str], str]) -> str:
    """Return the rendezvous' URL for `host`; this machine reaches it at `url`.

    `bind_host` is the address it listens on; None: that is not decided yet, and `url` stands.
    Raises ClusterError if the host cannot reach it.
    """
    if bind_host is None:
        return url
    bound = ipaddress.ip_address(bind_host)
    here = is_this_machine(host)
    if bound.is_loopback and not here:
        raise ClusterError(
            f"{host} cannot reach the rendezvous, which listens on this machine only "
            f"({bind_host}); say where with --rdzv-endpoint HOST[:PORT]"
        )
    if not bound.is_unspecified:
        return url
    address = (own_address(bind_host) if here else None) or find_address(host, look_up)
    if address is None:
        raise ClusterError(
            f"no way to {host}: its name has no address here, and there is no default route; "
            "give the rendezvous an address with --rdzv-endpoint"
        )
    parts = urlsplit(url)
    return f"{parts.scheme}://{network.bracketed(address)}:{parts.port}"


def _addresses_in(hosts_file: Path, name: str) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for line in hosts_file.read_text(errors="replace").splitlines():
            address, *names = line.partition("#")[0].split() or [""]
            if name in (n.lower() for n in names):
                found.append(address)
    return found
