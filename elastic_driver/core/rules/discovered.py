"""Hosts that come, go, change their size, or come out of their cool-down."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_driver.core.events import DiscoveryFailed, HostsDiscovered
from elastic_driver.core.rules.base import Rule
from elastic_driver.core.rules.rechecks import Rechecks


@dataclass(slots=True)
class Discovered(Rule):
    """Records and announces what discovery reports of hosts."""

    rechecks: Rechecks

    def on_hosts(self, event: HostsDiscovered) -> None:
        """Record the hosts there are now, and announce what has changed."""
        changes = self.hosts.discovered(event.hosts)
        if not changes:
            return
        self.capacity.note_change()
        for host, slots in changes.added:
            self.effects.announce("host_discovered", f"{slots} slots", host=host)
            self.rechecks.found(host)
        for host in changes.removed:
            self.effects.announce("host_removed", "discovery no longer reports it", host=host)
            self.rechecks.gone(host)
        for host, before, slots in changes.resized:
            self.effects.announce("host_discovered", f"{slots} slots, it had {before}", host=host)

    def on_failed(self, event: DiscoveryFailed) -> None:
        """Announce that nothing was found out; the hosts that are known stay."""
        kept = f"{event.reason}; the {len(self.hosts)} known hosts stay"
        self.effects.announce("discovery_failed", kept)

    def advance(self, now: float) -> None:
        """Let hosts be used again whose cool-down is over."""
        for host in self.hosts.resurrect(now):
            over = "its cool-down is over"
            self.effects.announce("host_resurrected", over, host=host)
            self.rechecks.hold(host, over)
            self.capacity.note_change()
        next_end = self.hosts.next_resurrection()
        if next_end is not None:
            self.effects.due_or_set_alarm(next_end, now)
