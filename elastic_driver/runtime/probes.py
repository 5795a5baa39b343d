"""Probes of hosts and agents, and the evidence that agents are lost or live, for the job machine.

A probe of hosts that are not reachable (`ProbeHosts`) is one TCP connection to each. They run on
the rendezvous server's loop, without a task for each, as there may be hundreds a second. A
backend's address of a host is looked up once, in a thread; few are looked up at a time, as half of
all hosts may be lost at once. Times are seconds.

Evidence comes from the rendezvous (a heartbeat is missing, a client that waits goes away) and from
backends. When an agent is suspected, its next heartbeat is awaited and reported as `AgentHeard`.
The machine decides (`job.lost_hosts`); probes are carried out here. Times are seconds.
"""

import asyncio
import errno
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from elastic_driver import contract
from elastic_driver.job.decisions import ProbeAgent, ProbeHosts
from elastic_driver.job.events import AgentHeard, AgentProbed, AgentSuspected, Evidence, HostProbed
from elastic_driver.reachability import Presence, probe
from elastic_driver.token_roles import agent_token
from rendezvous.server import RendezvousServer
from rendezvous.wire import MAX_WAIT_S, Entries, Get, Watch

LOOK_UPS = 2  # at the same time
FRESH_S = 30.0  # for the number of a name: a machine that was replaced may have another one
Place: TypeAlias = tuple[str, int] | None  # a host's name or number, and port; None: no probe
Target: TypeAlias = tuple[socket.AddressFamily, Any]  # with an address for `connect`


@dataclass(eq=False)
class HostProbes:
    """Probes hosts, and remembers their addresses."""

    look_up: Callable[[str], Place]  # `Backend.probe_address`
    post: Callable[[HostProbed], None]
    _places: dict[str, Place] = field(default_factory=dict)
    _targets: dict[str, tuple[float, Target]] = field(default_factory=dict)  # until when, where
    _looking: set[str] = field(default_factory=set)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LOOK_UPS))

    async def carry_out(self, asked: ProbeHosts) -> None:
        """Probe the hosts, and post an event for each that answers or cannot be probed."""
        now = time.monotonic()
        known = {host: self._targets.get(host, (0.0, None)) for host in asked.hosts}
        fresh = {host: target for host, (until, target) in known.items() if target and now < until}
        # While an address is looked up, no other probe waits for it.
        others = [host for host in asked.hosts if host not in fresh and host not in self._looking]
        late = (self._look_up_and_probe(host, asked) for host in others)
        await asyncio.gather(self._probe(fresh, asked), *late)

    async def _look_up_and_probe(self, host: str, asked: ProbeHosts) -> None:
        self._looking.add(host)
        try:
            async with self._turns:
                target = await self._target(host)
        except Exception:  # of another package's backend, or no address for the name
            target = None
        finally:
            self._looking.discard(host)
        if target is None:
            self.post(HostProbed(host, asked.number, answered=False))
        else:
            self._targets[host] = time.monotonic() + FRESH_S, target
            await self._probe({host: target}, asked)

    async def _target(self, host: str) -> Target | None:
        """Return where to connect; None if no probe is possible. Raises what a look-up raises."""
        if host not in self._places:
            self._places[host] = await asyncio.to_thread(self.look_up, host)
        place = self._places[host]
        if place is None:
            return None
        found = await asyncio.get_running_loop().getaddrinfo(*place, type=socket.SOCK_STREAM)
        return found[0][0], found[0][4]

    async def _probe(self, targets: Mapping[str, Target], asked: ProbeHosts) -> None:
        def answered(host: str) -> None:
            self.post(HostProbed(host, asked.number, answered=True))

        await connect_all(targets.items(), asked.patience, answered)


async def connect_all(
    targets: Iterable[tuple[str, Target]], patience: float, answered: Callable[[str], None]
) -> None:
    """Connect to all targets at once; call `answered` for each that accepts in time."""
    loop = asyncio.get_running_loop()
    pending, over = dict[str, socket.socket](), loop.create_future()

    def settle(host: str) -> None:
        connection = pending.pop(host)
        loop.remove_writer(connection)
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            answered(host)
        connection.close()
        if not pending and not over.done():
            over.set_result(None)

    try:
        for host, (family, address) in targets:
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.setblocking(False)
            if connection.connect_ex(address) in (0, errno.EINPROGRESS):
                pending[host] = connection
                loop.add_writer(connection, settle, host)
            else:
                connection.close()
        if pending:
            await asyncio.wait([over], timeout=patience)
    finally:
        for connection in pending.values():
            loop.remove_writer(connection)
            connection.close()


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
