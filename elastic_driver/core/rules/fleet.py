"""The agents: one per host in use, each start a new incarnation.

Knows which agents were asked for and which are up. Which hosts get one is decided in
`placement`; starting and stopping is done by whoever executes the decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from elastic_driver.core.events import AgentReady


class AgentState(str, Enum):
    """Whether an agent was only asked for, or is up."""

    STARTING = "starting"
    READY = "ready"


FALLBACK_PORT = 29500  # torch's own default, for an agent that found no free port to offer


@dataclass(slots=True)
class Agent:
    """One agent process."""

    host: str
    incarnation: int
    asked_at: float  # monotonic seconds
    state: AgentState = AgentState.STARTING
    pid: int = 0
    address: str = ""
    ports: tuple[int, ...] = ()
    slot_ports: tuple[int, ...] = ()

    def port(self, round_number: int) -> int:
        """The port for a torch store of this round: another one each time, as they linger."""
        return self.ports[round_number % len(self.ports)] if self.ports else FALLBACK_PORT


@dataclass(slots=True)
class Fleet:
    """Agents by host."""

    agents: dict[str, Agent] = field(default_factory=dict)
    _incarnations: dict[str, int] = field(default_factory=dict)
    _starting: dict[str, Agent] = field(default_factory=dict)  # in the order they were asked for

    def ask(self, host: str, now: float) -> Agent:
        """A new incarnation for a host that has no agent."""
        incarnation = self._incarnations[host] = self._incarnations.get(host, 0) + 1
        agent = self.agents[host] = self._starting[host] = Agent(host, incarnation, now)
        return agent

    def ready(self, event: AgentReady) -> Agent | None:
        """The agent that has come up; None where this is news of an old one, or old news."""
        agent = self.current(event.host, event.incarnation)
        if agent is None or agent.state is AgentState.READY:
            return None
        agent.state = AgentState.READY
        agent.pid, agent.address = event.pid, event.address
        agent.ports, agent.slot_ports = event.ports, event.slot_ports
        del self._starting[event.host]
        return agent

    def current(self, host: str, incarnation: int) -> Agent | None:
        """The host's agent, if this is its incarnation."""
        agent = self.agents.get(host)
        return agent if agent is not None and agent.incarnation == incarnation else None

    def is_ready(self, host: str) -> bool:
        """Whether the host has an agent that takes orders."""
        agent = self.agents.get(host)
        return agent is not None and agent.state is AgentState.READY

    def drop(self, host: str) -> None:
        """The host's agent is gone, or was told to go and nobody waits for it."""
        self.agents.pop(host, None)
        self._starting.pop(host, None)

    def starting(self) -> tuple[Agent, ...]:
        """Agents that were asked for and are not up, the one that waits longest first."""
        return tuple(self._starting.values())
