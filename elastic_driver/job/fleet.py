"""The agents of the hosts, and the effects of one event: decisions, orders, the next deadline.

`Fleet` has one agent for each host in use; each start is a new incarnation. `placement` decides
which hosts get an agent, `lost_hosts` and `adoption` what follows from its news.
`AGENT_TRANSITIONS` is the specification.

Every rule writes what it wants done through the methods of `Effects`. Times are monotonic seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from elastic_driver.job.decisions import Announce, Decision, GiveOrder
from elastic_driver.job.workers import Worker, WorkerNews, Workers
from elastic_driver.kernel.log import LogEvent
from elastic_driver.kernel.tables import index, saved
from elastic_driver.kernel.wait import Wait, earliest, reason
from elastic_driver.settings import Settings
from elastic_driver.words import wire_events as ev
from elastic_driver.words.orders import Order, StopWorkerOrder


class AgentState(str, Enum):
    """The stages of an agent's life."""

    STARTING = "starting"  # asked for
    READY = "ready"  # takes orders
    AWAITED = "awaited"  # an earlier driver started it; it has not reported to this one yet
    GONE = "gone"  # ended, given up, or told to go


class AgentNews(str, Enum):
    """News of an agent."""

    READY = "ready"
    RESUMED = "driver resumed"
    RETURNED = "returned"  # to this driver
    LOST = "lost"
    RELEASED = "released"  # it was told to go; its end is not awaited


_A, _GOES = AgentState, {AgentNews.LOST: AgentState.GONE, AgentNews.RELEASED: AgentState.GONE}
AGENT_TRANSITIONS: dict[AgentState, dict[AgentNews, AgentState]] = {
    _A.STARTING: {AgentNews.READY: _A.READY, AgentNews.RETURNED: _A.READY, **_GOES},
    _A.READY: {AgentNews.RESUMED: _A.AWAITED, **_GOES},
    _A.AWAITED: {AgentNews.RETURNED: _A.READY, **_GOES},
    _A.GONE: {},
}
NAMES_OF_A_DRIVER = 1000  # for one host or slot
FALLBACK_PORT = 29500  # torch's own default, for an agent that found no free port to offer


def first_number(term: int) -> int:
    """Return the least incarnation that the driver of this term gives to agents and workers.

    It is above those of earlier drivers, also of those that the journal lacks.
    """
    return (term - 1) * NAMES_OF_A_DRIVER + 1


@dataclass(slots=True)
class HostAgent:
    """The agent process of one host."""

    host: str
    incarnation: int
    asked_at: float  # monotonic seconds
    state: AgentState = AgentState.STARTING
    address: str = ""
    ports: tuple[int, ...] = ()
    slot_ports: tuple[int, ...] = ()
    probe_port: int = 0  # where it answers a probe; 0: nowhere

    @property
    def is_up(self) -> bool:
        """Return whether it has been up, and is not known to be gone."""
        return self.state in (AgentState.READY, AgentState.AWAITED)

    def port(self, round_number: int) -> int:
        """Return the port for a torch store of this round: never the last one, as ports linger."""
        return self.ports[round_number % len(self.ports)] if self.ports else FALLBACK_PORT


@dataclass(slots=True)
class Fleet:
    """The agents by host."""

    agents: dict[str, HostAgent] = saved(factory=dict)
    starting: dict[str, HostAgent] = index("agents")  # not up yet, in order
    awaited: dict[str, HostAgent] = index("agents")  # of an earlier driver
    given_up: dict[str, int] = saved(factory=dict)  # the last agent of a host that was lost
    _incarnations: dict[str, int] = saved(factory=dict, name="incarnations")
    _first: int = saved(1, name="first")  # the least incarnation that this driver gives

    def begin_term(self, term: int) -> None:
        """Number agents anew for this driver, so that no name is used twice in a run."""
        self._first = first_number(term)

    def ask(self, host: str, now: float) -> HostAgent:
        """Record a new incarnation for a host that has no agent."""
        incarnation = max(self._incarnations.get(host, 0) + 1, self._first)
        self._incarnations[host] = incarnation
        agent = self.agents[host] = self.starting[host] = HostAgent(host, incarnation, now)
        return agent

    def apply(self, agent: HostAgent, news: AgentNews) -> bool:
        """Change the agent's state by the table; return False if it does not list `news`."""
        after = AGENT_TRANSITIONS[agent.state].get(news)
        if after is None:
            return False
        agent.state = after
        self.starting.pop(agent.host, None)
        self.awaited.pop(agent.host, None)
        if after is AgentState.AWAITED:
            self.awaited[agent.host] = agent
        if after is AgentState.GONE:
            del self.agents[agent.host]
        if news is AgentNews.LOST:
            self.given_up[agent.host] = agent.incarnation
        return True

    def record_up(self, event: ev.AgentUp) -> None:
        """Record that an agent is up, or back; raise `ev.StaleEvent` if that is not new."""
        agent = self.current(event)
        back = isinstance(event, ev.AgentReturned)
        if not self.apply(agent, AgentNews.RETURNED if back else AgentNews.READY):
            raise ev.StaleEvent(f"agent {event.host}.{event.incarnation} is up already")
        agent.address, agent.ports, agent.slot_ports = event.address, event.ports, event.slot_ports
        agent.probe_port = event.probe_port

    def current(self, event: ev.AgentEvent) -> HostAgent:
        """Return the agent that an event is about; raise `ev.StaleEvent` if it was replaced."""
        agent = self.agents.get(event.host)
        if agent is None or agent.incarnation != event.incarnation:
            raise ev.StaleEvent(f"agent {event.host}.{event.incarnation} is not the present one")
        return agent

    def has_had(self, host: str) -> bool:
        """Return whether an agent of this host has ever been up, or may have been."""
        agent = self.agents.get(host)
        return host in self._incarnations and (agent is None or agent.is_up)

    def is_ready(self, host: str) -> bool:
        """Return whether the host has an agent that takes orders."""
        return host in self.agents and self.agents[host].state is AgentState.READY

    def is_up(self, host: str) -> bool:
        """Return whether the host has an agent that takes orders, or is awaited."""
        return host in self.agents and self.agents[host].is_up


# ---- effects -----------------------------------------------------------------------------

About: TypeAlias = Worker | str | None  # a worker, the name of a host, or the round


@dataclass(slots=True)
class Effects:
    """The decisions so far, and what the job waits for."""

    settings: Settings
    fleet: Fleet
    workers: Workers
    round: int = saved(1)  # the number that announcements carry
    decisions: list[Decision] = field(default_factory=list)  # upon the present event
    alarm: float | None = saved(None)  # the next moment at which time alone changes something
    waiting: str = saved("")  # what the job waits for
    ignored_events: int = saved(0)
    ignored: str = saved("")  # the last event that changed nothing

    def decide(self, decision: Decision) -> None:
        """Add a decision."""
        self.decisions.append(decision)

    def announce(self, what: LogEvent, reason: str, about: About = None) -> None:
        """Add a line for the event log."""
        if isinstance(about, Worker):
            slot = None if about.spare else about.slot
            rank = None if about.spare or not about.number else about.place.rank
            place = (about.host, slot, rank, about.pid or None, about.id)
            self.decide(Announce(what, reason, self.round, *place))
        else:
            self.decide(Announce(what, reason, self.round, about))

    def ignore(self, what: str) -> None:
        """Count an event that changes nothing: it is late, repeated or out of order."""
        self.ignored_events += 1
        self.ignored = what

    def wait(self, waits: Sequence[Wait]) -> None:
        """Wake the job at the earliest of these waits, and say what it waits for."""
        self.alarm, self.waiting = earliest(waits), reason(waits)

    def enter_round(self, number: int) -> None:
        """Give later announcements this round's number."""
        self.round = number

    def take(self) -> list[Decision]:
        """Return the decisions of this event, and forget them."""
        taken, self.decisions = self.decisions, []
        return taken

    # ---- orders to agents ----------------------------------------------------------------

    def give(self, host: str, order: Order, reason: str, *, repeated: bool = False) -> None:
        """Hand an order to the host's agent, if it has one that is up.

        `repeated`: an earlier driver gave it, and the agent may not have got it.
        """
        if self.fleet.is_ready(host):
            incarnation = self.fleet.agents[host].incarnation
            self.decide(GiveOrder(host, incarnation, order, reason, repeated))

    def stop(self, worker: Worker, reason: str) -> None:
        """Tell a worker's agent to stop it; its exit is then expected."""
        if self.workers.apply(worker, WorkerNews.TOLD_TO_STOP):
            self.order_stop(worker.host, worker.id, reason)

    def order_stop(self, host: str, worker: str, reason: str) -> None:
        """Tell a host's agent to stop a worker, by its name."""
        self.give(host, StopWorkerOrder(worker, self.settings.stop_grace, reason), reason)

    def kill(self, worker: Worker, reason: str) -> None:
        """Tell the agent to kill a worker at once that does not answer any more."""
        self.workers.mark_killed(worker)
        self.give(worker.host, StopWorkerOrder(worker.id, 0.0, reason), reason)
