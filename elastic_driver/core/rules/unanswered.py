"""Workers whose connections to another host of the job nobody answers.

Usually a firewall drops them. A library that connects waits for minutes and then names an address
at best, so the agents look at the connections of their workers and report those that wait. A world
that such a pair keeps from its first step will never come about: the job ends after
`--start-timeout`. Times are monotonic seconds.
"""

from dataclasses import dataclass

from elastic_driver.core import events as ev
from elastic_driver.core.rules.rounds import Rule
from elastic_driver.errors import ExitCode
from elastic_driver.kernel.tables import saved
from elastic_driver.words import host_log_events as host_log


@dataclass(slots=True)
class Unanswered(Rule):
    """Names the pairs of hosts that do not reach each other."""

    since: dict[str, float] = saved(factory=dict)  # "host address" → the first report

    def on_unanswered(self, event: ev.ConnectionUnanswered, now: float) -> None:
        """Name the pair once; end a job that was kept from its first step for too long."""
        self.fleet.current(event)
        others = (a.host for a in self.fleet.agents.values() if a.address == event.address)
        other = next(others, None)
        if other is None:  # a server of the user's, say
            raise ev.StaleEvent(f"{event.address} is not the address of a host of this job")
        pair = f"{event.host} {event.address}"
        reason = self._describe(event, other)
        if pair not in self.since:
            self.since[pair] = now
            worker = self.workers.workers.get(event.worker)
            self.effects.announce(host_log.ConnectionUnanswered(), reason, worker or event.host)
        waited = now - self.since[pair]
        starting = self.outcome.elastic and not self.outcome.has_progress
        if starting and waited >= self.settings.start_timeout:
            self.outcome.finish(
                ExitCode.UNAVAILABLE, f"{reason}, for {waited:.0f} s (--start-timeout)"
            )

    @staticmethod
    def _describe(event: ev.ConnectionUnanswered, other: str) -> str:
        return (
            f"{event.host} gets no answer from {other} ({event.address}) at TCP port {event.port}: "
            f"let the firewall of {other} pass it, --ports sets which ports are used "
            "(docs/firewalls.md)"
        )
