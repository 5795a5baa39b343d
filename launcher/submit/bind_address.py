"""Where the rendezvous of a job listens, and at which address each of its hosts finds it.

Names are resolved as ssh would, and only where something has to be found out; nothing here waits
for a name server that a job could do without.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from elastic_driver.errors import ClusterError, UsageError
from launcher.backends.remote_shell import Reach
from launcher.backends.this_machine import is_this_machine
from launcher.network import SOMEWHERE, address_of, address_towards, bracketed

_LOOKUPS_AT_ONCE = 32


@dataclass(frozen=True)
class Whereabouts:
    """Where the rendezvous listens, and at which address each host finds it."""

    bind_host: str  # numeric; a wildcard where the hosts are on several networks
    reach: Reach

    def endpoint_for(self, url: str, host: str) -> str:
        """The URL for `host`, of the rendezvous that this machine reaches at `url`.

        Raises ClusterError where the host cannot reach it.
        """
        bound = ipaddress.ip_address(self.bind_host)
        if bound.is_loopback and not is_this_machine(host):
            raise ClusterError(
                f"{host} cannot reach the rendezvous, which listens on this machine only "
                f"({self.bind_host}); say where with --rdzv-endpoint HOST[:PORT]"
            )
        if not bound.is_unspecified:
            return url
        address = self.own_address if is_this_machine(host) else None
        address = address or self.address_towards(host)
        return f"http://{bracketed(address)}:{urlsplit(url).port}"

    def address_towards(self, host: str) -> str:
        """Our address on the way to a host, by the name under which it is known."""
        address = self.find_address(host)
        if address is None:
            raise ClusterError(
                f"no way to {host}: its name has no address here, and there is no default route; "
                "say where the rendezvous is to listen with --rdzv-endpoint"
            )
        return address

    def find_address(self, host: str) -> str | None:
        """The same, or None where there is no way to the host."""
        towards = address_towards(self.reach.look_up(host))
        # Behind a jump host its name may mean nothing here: the default route is the best guess.
        return towards or address_towards(SOMEWHERE)

    @property
    def own_address(self) -> str | None:
        """What workers on this machine are reached at by those on others; None: by nobody."""
        bound = ipaddress.ip_address(self.bind_host)
        if bound.is_loopback:
            return None
        return address_towards(SOMEWHERE) if bound.is_unspecified else self.bind_host


def decide_whereabouts(
    bind: str, remote: Sequence[str], interfaces: Sequence[str], reach: Reach
) -> Whereabouts:
    """Where the rendezvous of a job with these remote hosts is to listen.

    `bind` is what was asked for, a numeric address; loopback, the default, gives way when there
    are hosts that could not reach it. Raises UsageError or ClusterError where nothing fits.
    """
    given = Whereabouts(bind, reach)
    # Its own name may mean loopback here (Debian's 127.0.1.1), which is of no use to others.
    remote = [host for host in remote if not is_this_machine(host)]
    if not ipaddress.ip_address(bind).is_loopback or not remote:
        return given
    if interfaces:
        named = address_of(interfaces)
        if named is None:
            there = ", ".join(sorted(psutil.net_if_addrs()))
            raise UsageError(
                f"--network-interfaces: none of {', '.join(interfaces)} has an address here; "
                f"there are {there}"
            )
        return Whereabouts(named[1], reach)
    with ThreadPoolExecutor(_LOOKUPS_AT_ONCE) as pool:
        found = {address for address in pool.map(given.find_address, remote) if address}
    if not found:  # what is wrong with each of them is the pre-check's to say
        return given
    if len(found) == 1:
        return Whereabouts(found.pop(), reach)
    return Whereabouts("::" if any(":" in address for address in found) else "0.0.0.0", reach)  # noqa: S104
