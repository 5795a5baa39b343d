"""Which host names mean this machine, without asking a name server.

A resolver that does not answer would hold the job up, so only what the machine knows by
itself counts: loopback, its own name, its interfaces' addresses, and its hosts file.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path

import psutil

_HOSTS_FILE = Path("/etc/hosts")
LOOPBACK = "127.0.0.1"


def is_this_machine(host: str, hosts_file: Path = _HOSTS_FILE) -> bool:
    """Whether a host name or address means this machine."""
    name = host.lower().rstrip(".")
    if name == "localhost" or _is_own_address(name):
        return True
    own = socket.gethostname().lower()
    if name in (own, own.partition(".")[0]):
        return True
    return any(_is_own_address(address) for address in _addresses_in(hosts_file, name))


def meeting_address(host: str) -> str:
    """The address at which other processes of this machine reach one on `host`."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return host
    return LOOPBACK


def _is_own_address(text: str) -> bool:
    try:
        wanted = ipaddress.ip_address(text)
    except ValueError:
        return False
    return wanted.is_loopback or str(wanted) in _interface_addresses()


def _interface_addresses() -> set[str]:
    return {
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def _addresses_in(hosts_file: Path, name: str) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for line in hosts_file.read_text(errors="replace").splitlines():
            address, *names = line.partition("#")[0].split() or [""]
            if name in (n.lower() for n in names):
                found.append(address)
    return found
