"""The address a job's rendezvous listens on, so that all of its hosts reach it."""

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.runtime.discovery import Hosts
from launcher.launch.hosts import ANYWHERE
from launcher.network import address_of, addresses_of, find_address, is_this_machine
from rendezvous.client_connections import is_loopback

_LOOKUPS_AT_ONCE = 32


def choose_bind_host(
    bind: str, hosts: Hosts, interfaces: Sequence[str], look_up: Callable[[str], str]
) -> str:
    """Return the numeric address to listen on; a wildcard if the hosts are on several networks.

    Args:
        bind: the host of --rdzv-endpoint. Loopback, the default, is replaced if there are
            hosts that could not reach it.
        hosts: the known hosts.
        interfaces: --network-interfaces; the hosts have them, this machine may have others.
        look_up: returns the name by which the network knows a host.

    Raises:
        UsageError: `bind` has no address here.
        ClusterError: none of the hosts could reach the job.
    """
    given = numeric_address(bind)
    # A machine's own name may be loopback (Debian's 127.0.1.1), which other hosts cannot use.
    remote = [host for host, slots in hosts if slots and not is_this_machine(host)]
    if not ipaddress.ip_address(given).is_loopback or not remote:
        return given
    if (named := address_of(interfaces)) is not None:
        return named[0]
    with ThreadPoolExecutor(_LOOKUPS_AT_ONCE) as pool:
        found = set(filter(None, pool.map(lambda host: find_address(host, look_up), remote)))
    if not found:
        raise ClusterError(
            f"no way to {', '.join(remote)}: no name has an address here, and there is no default "
            "route; say at which address of this machine they reach the job, with --rdzv-endpoint "
            "ADDRESS"
        )
    if len(found) == 1:
        return found.pop()
    return "::" if any(":" in address for address in found) else "0.0.0.0"  # noqa: S104


def bind_again(chosen: str, url: str) -> str:
    """Return the address for a driver that goes on with a job: one where agents look for it.

    Args:
        chosen: the address that a new job would have, with the hosts of now.
        url: the address of the last driver, with loopback in place of a wildcard; "": unknown.
    """
    before = urlsplit(url).hostname
    now = ipaddress.ip_address(chosen)
    if before is None or now.is_unspecified:
        return chosen
    if not ipaddress.ip_address(before).is_loopback:
        return before if is_this_machine(before) else chosen
    if now.is_loopback:
        return chosen
    return "::" if now.version == 6 else "0.0.0.0"  # noqa: S104


def numeric_address(host: str) -> str:
    """Return the numeric address to bind for a host's name; raises UsageError if it has none."""
    for address in addresses_of(host):
        return address
    raise UsageError(f"--rdzv-endpoint: the name {host} has no address here")


# ---- the server of nodes that join -------------------------------------------------------


def names_this_machine(host: str) -> bool:
    """Return whether a name or address is this machine's; this may ask a name server."""
    return is_this_machine(host) or any(map(is_this_machine, addresses_of(host)))


def can_serve(host: str, port: int) -> bool:
    """Return whether a name or address is this machine's, and the port is free here now.

    This may ask a name server.
    """
    if not names_this_machine(host):
        return False
    address = bind_address(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.create_server((address, port), family=family):
        return True
    return False


def bind_address(host: str) -> str:
    """Return the numeric address to listen on for nodes that know the server by this name.

    It is the wildcard for a name that belongs to another machine (a service's name), and for a name
    with a loopback address other than `localhost` (Debian gives a machine's own name 127.0.1.1).
    """
    if host in ANYWHERE or is_loopback(host):
        return "127.0.0.1" if host == "localhost" else host
    own = [a for a in addresses_of(host) if is_this_machine(a) and not is_loopback(a)]
    return own[0] if own else ANYWHERE[0]
