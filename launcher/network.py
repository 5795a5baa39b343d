"""Addresses and names of this machine, and the address at which other hosts reach it.

The kernel's routing table tells it: a UDP socket that is connected towards a host (no packet is
sent) has the address that the host will see. The launcher finds the address of the rendezvous in
this way, and each agent finds the address and the interface of its workers.

A name server that does not answer would delay the job. So a name is compared only with what the
machine itself knows: loopback, its own name, the addresses of its interfaces, and its hosts file.
Other names are resolved only when an address is needed.
"""

import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from elastic_driver.errors import ClusterError
from rendezvous.client_connections import is_loopback

# ---- names --------------------------------------------------------------------------------


def own_name() -> str:
    """Return this machine's name with only the characters of a host name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:150].lstrip("._-") or "node"


def machine_id() -> str:
    """Return an id that tells machines of the same name apart (machine-id(5))."""
    for path in (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id")):
        with contextlib.suppress(OSError):
            if text := path.read_text(errors="replace").strip():
                return text[:64]
    return own_name()[:64]


# ---- addresses and interfaces -------------------------------------------------------------


_ANY_PORT = 9  # of the discard service; nothing is sent there
SOMEWHERE = "192.0.2.1"  # RFC 5737: an address of no host, to ask for the default route


def address_towards(address: str, port: int = _ANY_PORT) -> str | None:
    """Return our address on the way to a host's name or address; None if there is no way."""
    with contextlib.suppress(OSError):
        for family, _, _, _, target in socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return None


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a host's name in the resolver's order; empty if it has none."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return []


def default_address() -> str | None:
    """Return our address on the default route; without such a route our first IPv4 address."""
    entries = [entry for found in psutil.net_if_addrs().values() for entry in found]
    four = [entry.address for entry in entries if entry.family == socket.AF_INET]
    return address_towards(SOMEWHERE) or next((a for a in four if not is_loopback(a)), None)


def interface_of(address: str) -> str | None:
    """Return the interface that has this address; None for loopback or if none has."""
    wanted = _parse(address)
    if wanted is None or wanted.is_loopback:
        return None
    for name, entries in psutil.net_if_addrs().items():
        if any(_parse(entry.address) == wanted for entry in entries):
            return name
    return None


def address_of(interfaces: Iterable[str]) -> tuple[str, str] | None:
    """Return the address (IPv4 if it has one) and the name of the first interface that is here."""
    known = psutil.net_if_addrs()
    for name in interfaces:
        entries = [e for e in known.get(name, ()) if e.family in (socket.AF_INET, socket.AF_INET6)]
        parsed = [_parse(entry.address) for entry in entries]
        if usable := [found for found in parsed if found and not found.is_link_local]:
            return str(min(usable, key=lambda found: found.version)), name
    return None


def interfaces_with_addresses() -> list[str]:
    """Return the names of the interfaces that have an IP address."""
    families = (socket.AF_INET, socket.AF_INET6)
    known = psutil.net_if_addrs().items()
    return [name for name, entries in known if any(e.family in families for e in entries)]


def meeting_point(endpoint: str, wanted: Sequence[str]) -> tuple[str | None, str | None]:
    """Return (address, interface) at which workers of other hosts reach those of this one.

    It is the first of the `wanted` interfaces that this host has, or else the interface on the way
    to the rendezvous at `endpoint`, a URL.
    """
    if named := address_of(wanted):
        return named
    parts = urlsplit(endpoint)
    address = address_towards(parts.hostname or "", parts.port or _ANY_PORT)
    return address, None if address is None else interface_of(address)


def bracketed(address: str) -> str:
    """Return an address as it is written in a URL."""
    return f"[{address}]" if ":" in address else address


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None


# ---- names of this machine ----------------------------------------------------------------


_HOSTS_FILE = Path("/etc/hosts")
LOOPBACK = "127.0.0.1"


def is_this_machine(host: str, hosts_file: Path = _HOSTS_FILE) -> bool:
    """Return whether a host name or address means this machine."""
    name = host.lower().rstrip(".")
    own = socket.gethostname().lower()
    addresses = (name, *_addresses_in(hosts_file, name))
    return name in (own, own.partition(".")[0]) or any(
        is_loopback(a) or interface_of(a) is not None for a in addresses
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
    return default_address() if bound.is_unspecified else bind_host


def find_address(host: str, look_up: Callable[[str], str]) -> str | None:
    """Return our address on the way to a host; None if there is no way.

    `look_up` gives the name by which the network knows the host.
    """
    towards = address_towards(look_up(host))
    # The name of a host behind a jump host may have no address here: take the default route.
    return towards or address_towards(SOMEWHERE)


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
    return f"{parts.scheme}://{bracketed(address)}:{parts.port}"


def _addresses_in(hosts_file: Path, name: str) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for line in hosts_file.read_text(errors="replace").splitlines():
            address, *names = line.partition("#")[0].split() or [""]
            if name in (n.lower() for n in names):
                found.append(address)
    return found
