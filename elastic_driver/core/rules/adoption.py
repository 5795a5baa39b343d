"""A driver goes on with the job of one that has died: it adopts the agents and their workers.

Times are monotonic seconds.
"""

from dataclasses import dataclass

from elastic_driver.core import events as ev
from elastic_driver.core.decisions import Announce
from elastic_driver.core.rules.agents import Agents
from elastic_driver.core.rules.rounds import Rule
from elastic_driver.core.rules.suspicion import Suspicion


@dataclass(slots=True)
class Adoption(Rule):
    """Compares what returning agents say with the books of the job, and gives orders again."""

    agents: Agents
    suspicion: Suspicion
    term: int = 1  # of this driver

    def on_resumed(self, event: ev.DriverResumed, now: float) -> None:
        """Begin the term of a driver that goes on with the job."""
        self.term = event.term
        self.effects.announce("driver_resumed", event.reason or "it was resumed", term=event.term)

    def on_returned(self, event: ev.AgentReturned, now: float) -> None:
        """Adopt an agent."""
        if event.term != self.term:
            raise ev.StaleEvent(f"{event.host} reports to term {event.term}, this is {self.term}")
        self.fleet.ready(event)
        self.suspicion.on_ready(event, now)
        self.capacity.note_change()
        number, at = self.rounds.current.number, f"at {event.address}"
        self.effects.decide(Announce("agent_returned", at, number, event.host, pid=event.pid))
