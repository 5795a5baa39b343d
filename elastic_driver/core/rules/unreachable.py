"""Hosts that are not reachable (power, cable, sshd): they are probed until they answer.

Not to be reachable is no misbehaviour, so there is no cool-down. A host that answers is used at
once, if its slots are needed. Where no probe is possible (a jump host), the start of an agent is
tried in its place; starts that fail are tried again after a growing pause of a few seconds at most.
Times are monotonic seconds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_driver.core import events as ev
from elastic_driver.core.decisions import ProbeHosts
from elastic_driver.core.driver_events import HostProbed
from elastic_driver.core.rules.discovered import Discovered
from elastic_driver.core.rules.hosts import Host
from elastic_driver.core.rules.rounds import Rule
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import counted
from elastic_driver.words import host_log_events as host_log

PATIENCE_S = 1.0  # for an answer; probes overlap, as the first packet of one may be lost
_TOLD_STARTS = 1  # later starts that fail are not announced: there may be one every few seconds


@dataclass(slots=True)
class Unreachable(Rule):
    """Has hosts probed that are not reachable."""

    discovered: Discovered
    probes: int = saved(0)  # decisions to probe hosts so far

    def lose(self, host: str, reason: str, now: float, *, started: bool) -> None:
        """Record that a host is not reachable; `started`: its agent was up."""
        if self.hosts.lose(host, now, reason, started=started, probes=self.probes):
            back = f"{reason}; it is used again as soon as it answers"
            self.effects.announce(host_log.HostUnreachable(), back, host)

    def _tell_again(self, told: list[Host], now: float) -> None:
        """Say that hosts still do not answer: less and less often, one line for all of them."""
        first = told[0]
        gone = now - (first.lost_at or now)
        others = f"; so are {len(told) - 1} more" if len(told) > 1 else ""
        what = f"gone for {gone:.0f} s, {counted(first.probed, 'try', 'tries')}{others}"
        self.effects.announce(host_log.HostStillAway(), f"{what}: {first.reason}", first.name)

    def on_probed(self, event: HostProbed, now: float) -> None:
        """Let a host be used that answers, or that cannot be probed."""
        host = self.hosts.record_answer(event.host, event.number)
        if host is None:
            raise ev.StaleEvent(f"{event.host} was probed before, or is not waited for")
        if event.answered:
            self.discovered.hold(host.name, "it was not reachable")
            if host.failed_starts <= _TOLD_STARTS:
                gone = now - (host.lost_at or now)
                self.effects.announce(
                    host_log.HostResurrected(), f"answers after {gone:.1f} s", host.name
                )
        self.capacity.note_change()

    def advance(self, now: float) -> Iterable[Wait]:
        """Have the hosts probed whose time has come."""
        hosts = self.hosts
        if self.outcome.finishing or hosts.next_probe == math.inf:
            return ()
        due = hosts.take_due_probes(now) if hosts.next_probe <= now else ()
        if due:
            self.probes += 1
            others = f" and {len(due) - 1} more" if len(due) > 1 else ""
            reason = f"not reachable: {due[0]}{others}"
            self.effects.decide(ProbeHosts(due, PATIENCE_S, self.probes, reason))
            if told := hosts.still_away(due, now):
                self._tell_again(told, now)
        return (Wait(hosts.next_probe),)
