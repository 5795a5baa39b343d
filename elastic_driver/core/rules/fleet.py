"""The agents: one for each host in use; each start is a new incarnation.

`placement` decides which hosts get one, `agents` what follows from their news. The transition table
is the specification. Times are monotonic seconds.
"""

from dataclasses import dataclass, field
from enum import Enum

from elastic_driver.core.events import AgentReady


class AgentState(str, Enum):
    """The stages of an agent's life."""

    STARTING = "starting"  # asked for
    READY = "ready"  # takes orders
    GONE = "gone"  # ended, given up, or told to go


class AgentNews(str, Enum):
    """News of an agent."""

    READY = "ready"
    LOST = "lost"
    RELEASED = "released"  # it was told to go; its end is not awaited


AGENT_TRANSITIONS: dict[AgentState, dict[AgentNews, AgentState]] = {
    AgentState.STARTING: {
        AgentNews.READY: AgentState.READY,
        AgentNews.LOST: AgentState.GONE,
        AgentNews.RELEASED: AgentState.GONE,
    },
    AgentState.READY: {AgentNews.LOST: AgentState.GONE, AgentNews.RELEASED: AgentState.GONE},
    AgentState.GONE: {},
}


FALLBACK_PORT = 29500  # torch's own default, for an agent that found no free port to offer


@dataclass(slots=True)
class HostAgent:
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

    agents: dict[str, HostAgent] = field(default_factory=dict)
    _incarnations: dict[str, int] = field(default_factory=dict)
    _starting: dict[str, HostAgent] = field(default_factory=dict)  # the first asked for first

    def ask(self, host: str, now: float) -> HostAgent:
        """A new incarnation for a host that has no agent."""
        incarnation = self._incarnations[host] = self._incarnations.get(host, 0) + 1
        agent = self.agents[host] = self._starting[host] = HostAgent(host, incarnation, now)
        return agent

    def apply(self, agent: HostAgent, news: AgentNews) -> bool:
        """Change the agent's state by the table; False (and no change) where it lists nothing."""
        after = AGENT_TRANSITIONS[agent.state].get(news)
        if after is None:
            return False
        agent.state = after
        self._starting.pop(agent.host, None)
        if after is AgentState.GONE:
            del self.agents[agent.host]
        return True

    def ready(self, event: AgentReady) -> HostAgent | None:
        """Return the agent that has come up; None where this is news of an old one, or old news."""
        agent = self.current(event.host, event.incarnation)
        if agent is None or not self.apply(agent, AgentNews.READY):
            return None
        agent.pid, agent.address = event.pid, event.address
        agent.ports, agent.slot_ports = event.ports, event.slot_ports
        return agent

    def current(self, host: str, incarnation: int) -> HostAgent | None:
        """The host's agent, if this is its incarnation."""
        agent = self.agents.get(host)
        return agent if agent is not None and agent.incarnation == incarnation else None

    def is_ready(self, host: str) -> bool:
        """Return whether the host has an agent that takes orders."""
        agent = self.agents.get(host)
        return agent is not None and agent.state is AgentState.READY

    def starting(self) -> tuple[HostAgent, ...]:
        """Agents that were asked for and are not up, the one that waits longest first."""
        return tuple(self._starting.values())
