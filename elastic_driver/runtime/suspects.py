"""Evidence that agents are lost, and that they live, on its way to the job machine.

Evidence comes from the rendezvous (a heartbeat is missing, a client that waits goes away) and from
backends. When an agent is suspected, its next heartbeat is awaited and reported as `AgentHeard`.
The machine decides (`job.lost_hosts`); probes are carried out here. Times are seconds.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_driver import contract
from elastic_driver.job.decisions import ProbeAgent
from elastic_driver.job.events import AgentHeard, AgentProbed, AgentSuspected, Evidence
from elastic_driver.presence import Presence
from elastic_driver.reachability import probe
from rendezvous.auth import agent_token
from rendezvous.server import RendezvousServer
from rendezvous.wire import MAX_WAIT_S, Entries, Get, Watch

REASONS: dict[Evidence, str] = {
    "silent": "its heartbeat did not come in time",
    "disconnected": "its connection to the driver has closed",
}


@dataclass
class Suspects:
    """Posts evidence about agents; `server` and `token` are set before any comes."""

    post: Callable[[AgentSuspected | AgentHeard | AgentProbed], object]
    server: RendezvousServer | None = None
    token: str = ""  # the driver's, from which those of the agents are derived
    _awaited: set[tuple[str, int]] = field(default_factory=set)  # used on the server's loop

    def found(self, evidence: Evidence, host: str, incarnation: int, reason: str = "") -> None:
        """Report evidence against an agent; any thread may call this."""
        if self.server is None or incarnation >= contract.FIRST_OF_CHECKS:
            return
        reason = reason or REASONS[evidence]
        self.post(AgentSuspected(host, incarnation, evidence, reason))
        self.server.spawn(self._await_heartbeat(self.server, host, incarnation))

    def lease_expired(self, key: str) -> None:
        """Report an agent whose heartbeat is missing, if this is the lease of a heartbeat."""
        if (agent := contract.heartbeat_owner(key)) is not None:
            self.found("silent", *agent)

    def client_left(self, key: str) -> None:
        """Report an agent whose connection has closed, by its lease."""
        lease = contract.lease_owner(key)
        if lease is not None and lease[0] == "agent":
            self.found("disconnected", *contract.agent_named(lease[1]))

    def probe(self, asked: ProbeAgent) -> None:
        """Probe an agent and post the result."""
        if self.server is not None:
            self.server.spawn(self._probe(asked))

    async def _probe(self, asked: ProbeAgent) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        agent = asked.host, asked.incarnation
        question = Presence(agent_token(self.token, asked.host), *agent).ask()
        result = await probe(asked.address, asked.port, asked.patience, question)
        self.post(AgentProbed(*agent, asked.number, result, clock() - began))

    async def _await_heartbeat(self, server: RendezvousServer, host: str, incarnation: int) -> None:
        """Post `AgentHeard` at the agent's next heartbeat; end without it if the agent is lost."""
        agent = host, incarnation
        if agent in self._awaited:
            return
        self._awaited.add(agent)
        key = contract.agent_heartbeat(*agent)
        try:
            (found,) = await server.carry_out([Get((key,))])
            entry = found.entries.get(key) if isinstance(found, Entries) else None
            watch = Watch({key: entry.revision if entry else 0}, wait=MAX_WAIT_S)
            while isinstance(found, Entries):  # a refusal: the agent's keys are sealed
                (found,) = await server.carry_out([watch])
                if isinstance(found, Entries) and not found.timed_out:
                    self.post(AgentHeard(*agent))
                    return
        finally:
            self._awaited.discard(agent)
