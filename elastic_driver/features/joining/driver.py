"""Nodes that start by themselves and join: a host discovery and a backend in one.

A node proves that it knows the job's secret (`NodeProofs`) and reports that it is there. It gets
tokens of its own, and is a host like any other from then on: `find` lists it, and `start` writes
the wanted incarnation into the store, where the node waits for it. The node lives as long as it
renews its lease in the store. When the lease expires, or the node leaves or joins again, it is no
longer a host and its agents are lost. If the server's own node trains too, it is the first host; an
ordinary backend starts its agents.

A driver that goes on with a job *awaits* the nodes of the driver before it: they are hosts already,
and orders for them wait. A node that comes back in time keeps its name and its agents.

A lock guards the table: routes and leases run on the server's thread, `find` on the discovery
thread, `start` and `kill` on the driver's thread. Times are seconds.

`NodeProofs` is the server's part in that proof (`rendezvous.auth`). Its routes are the only ones
besides `/healthz` that need no token, and the only ones that a secret opens. A wrong proof is
answered late; each address that fails is reported once. The routes run on the server's loop,
`expire` on any thread. Times are seconds.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from aiohttp import web

from elastic_driver import contract, token_roles
from elastic_driver.errors import ClusterError
from elastic_driver.runtime.backend import AdoptsAgents, Backend, OnLost
from elastic_driver.runtime.discovery import Hosts
from elastic_driver.token_roles import NODES, agent_token, node_token
from elastic_driver.words import joining as join
from rendezvous.auth import Handshake, OpenHello, OpenHellos, Speaker, make_nonce
from rendezvous.errors import StoppedError
from rendezvous.limits import Hits, Limits
from rendezvous.routes import (
    PEER,
    Problem,
    Route,
    caller_of,
    forbidden,
    json_answer,
    mount,
    read_json,
)
from rendezvous.server import RendezvousServer
from rendezvous.wire import DeletePrefix, Operation, Set

PAUSE_S = 1.0  # before the answer to a wrong proof
MOST_NAMED = 100  # addresses that are reported
T = TypeVar("T")
log = logging.getLogger(__name__)
_decode_hello = msgspec.json.Decoder(join.Hello).decode
_decode_proof = msgspec.json.Decoder(join.NodeProof).decode


class NodeProofs:
    """Answers hellos and checks proofs.

    Args:
        secrets: a node has to know one of these.
        fingerprint: of the server's certificate; "": it has none.
        limits: the bounds of the server.
        hits: counts proofs that were wrong, too late or did not come.
    """

    def __init__(
        self, secrets: tuple[str, ...], fingerprint: str, limits: Limits, hits: Hits
    ) -> None:
        self._secrets, self._fingerprint, self._hits = secrets, fingerprint, hits
        self._hellos = OpenHellos(limits)
        self._lock = threading.Lock()
        self._named: set[str] = set()  # addresses

    async def hello(self, request: web.Request) -> web.Response:
        """Prove to a node that the server knows the secrets; the node's proof has to follow."""
        nonce = (await _read(request, _decode_hello)).nonce
        handshake = Handshake(nonce, make_nonce(), self._fingerprint)
        with self._lock:
            gone = self._hellos.add(handshake, request[PEER], time.monotonic())
        self._tell(gone)
        proofs = tuple(handshake.prove(secret, Speaker.SERVER) for secret in self._secrets)
        return json_answer(join.HelloAnswer(handshake.server_nonce, proofs))

    async def check(self, request: web.Request) -> join.NodeReport:
        """Return the report of a node that has proved a secret; raises Problem if it has not."""
        claim = await _read(request, _decode_proof)
        with self._lock:
            hello = self._hellos.take(claim.nonce, time.monotonic())
        if hello is not None:
            if hello.handshake.proved(self._secrets, Speaker.NODE, (claim.proof,)) is not None:
                return claim.report
            self._tell([hello])
            await asyncio.sleep(PAUSE_S)
        raise Problem(403, "no_proof", "the proof is wrong, late or repeated", "say hello again")

    def expire(self) -> None:
        """Report the nodes that have said hello and have not proved anything since."""
        with self._lock:
            gone = self._hellos.expire(time.monotonic())
        self._tell(gone)

    def _tell(self, failed: list[OpenHello]) -> None:
        for _ in failed:
            self._hits.count("no_proof")
        for peer in {hello.peer for hello in failed} - self._named:
            if len(self._named) < MOST_NAMED:
                self._named.add(peer)
                log.warning(
                    "a program at %s asked to join and did not prove that it knows this job's "
                    "secret; if it is a node of yours, its --run-id (--rdzv-id) or --token-file "
                    "differs from the server's",
                    peer,
                )


async def _read(request: web.Request, decode: Callable[[bytes], T]) -> T:
    if request.content_length is None or request.content_length > join.MAX_STRANGERS_BYTES:
        limit = f"the body may have {join.MAX_STRANGERS_BYTES} bytes, and its length is told first"
        raise Problem(413, "too_large", limit)
    return await read_json(request, decode)


LOOK_S = 0.5  # `find` returns this often although nothing has changed
# For nodes to learn how the job has ended, each after the end of its agent; a node that is lost is
# given up before, when its lease ends.
LEAVE_S = 10.0
# Heartbeat timeouts for a node to come back to a driver that has taken over elsewhere: it hears of
# that driver from its agent, which has one of them.
RETURN_TIMEOUTS = 2.0
MAX_NODES = 100_000
OF_PEER = MAX_NODES // 4  # of them, of one address, or user of this machine

_decode_report = msgspec.json.Decoder(join.NodeReport).decode


@dataclass(eq=False)
class _JoinedNode:
    """One membership of a node: from a join to its end."""

    name: str
    offer: join.NodeReport
    slots: int
    peer: str = ""  # who has connected to join (`rendezvous.fairness`)
    agents: dict[int, OnLost] = field(default_factory=dict)  # started, and not known to be gone
    killed: int = 0  # the newest incarnation that was killed
    check_killed: int = 0  # of the agents of node checks


@dataclass(frozen=True)
class NodeRules:
    """The settings that every node has to keep to."""

    run_id: str
    version: str  # of elastic-driver, the same everywhere
    heartbeat_timeout: float
    default_slots: int


def _of_check(incarnation: int) -> bool:
    """Return whether an agent belongs to a node check: such agents run beside those of the job."""
    return incarnation >= contract.FIRST_OF_CHECKS


class JoinedNodes(Backend):
    """Hosts that join by themselves (a `HostDiscovery` and a `Backend` of the driver).

    Args:
        rules: the settings of the job that concern nodes.
        secrets: a node has to prove that it knows one of these, or the run's token.
        own: the server's own node, if it trains too. Set `own_starter` before its first `start`.
    """

    def __init__(self, rules: NodeRules, secrets: tuple[str, ...] = (), own: Hosts = ()) -> None:
        self._rules, self._secrets, self._own = rules, secrets, dict(own)
        self.own_starter: Backend | None = None
        self._lock = threading.Condition()
        self._nodes: dict[str, _JoinedNode] = {}  # by session
        self._awaited: dict[str, _JoinedNode] = {}  # by name
        self._awaited_until = math.inf  # monotonic
        self._changed = True  # since the last `find`
        self._cancelled = False
        self._server: RendezvousServer | None = None
        self._token = ""
        self._proofs: NodeProofs | None = None
        self._over: join.JobOver | None = None

    def open(self, server: RendezvousServer, token: str) -> None:
        """Let nodes join from now on: the rendezvous is up, and the job's token is written."""
        with self._lock:
            self._server, self._token = server, token
            if self._awaited:
                patience = RETURN_TIMEOUTS * self._rules.heartbeat_timeout
                self._awaited_until = time.monotonic() + patience
            secrets = (*self._secrets, token)
            self._proofs = NodeProofs(secrets, server.fingerprint, server.limits, server.hits)

    def await_nodes(self, hosts: Hosts) -> None:
        """Await the return of these nodes of a driver that has died; call it before `open`."""
        with self._lock:
            for name, slots in hosts:
                if name not in self._own:
                    offer = join.NodeReport(name, "", "", self._rules.version)
                    self._awaited[name] = _JoinedNode(name, offer, slots)

    # ---- HostDiscovery -------------------------------------------------------------------

    def find(self) -> Hosts:
        """Return the hosts in the order in which they joined; wait `LOOK_S` for a change."""
        if self._proofs is not None:
            self._proofs.expire()
        with self._lock:
            self._lock.wait_for(lambda: self._changed or self._cancelled, LOOK_S)
            if self._cancelled:
                raise ClusterError("the search for nodes was cancelled")
            self._changed = False
            if self._awaited and time.monotonic() >= self._awaited_until:
                self._give_up_awaited()
            nodes = (*self._awaited.values(), *self._nodes.values())
            return (*self._own.items(), *((node.name, node.slots) for node in nodes))

    def cancel(self) -> None:
        """See `HostDiscovery.cancel`."""
        with self._lock:
            self._cancelled = True
            self._lock.notify_all()

    # ---- Backend -------------------------------------------------------------------------

    def start(self, host: str, incarnation: int, on_lost: OnLost) -> None:
        """See `Backend.start`."""
        if self.own_starter is not None and host in self._own:
            self.own_starter.start(host, incarnation, on_lost)
            return
        with self._lock:
            for node in self._named(host):
                node.agents[incarnation] = on_lost
                self._publish(node)
                return
        on_lost(f"node {host} has left")

    def adopt(self, host: str, incarnation: int, pid: int, on_lost: OnLost) -> None:
        """See `AdoptsAgents.adopt`; an agent may come back before its node does."""
        if host in self._own:
            if isinstance(self.own_starter, AdoptsAgents):
                self.own_starter.adopt(host, incarnation, pid, on_lost)
            return
        with self._lock:
            for node in self._named(host):
                node.agents[incarnation] = on_lost

    def kill(self, host: str, incarnation: int) -> None:
        """See `Backend.kill`; a silent node has lost its agents when it is given up."""
        if self.own_starter is not None and host in self._own:
            self.own_starter.kill(host, incarnation)
            return
        with self._lock:
            for node in self._named(host):
                if _of_check(incarnation):
                    node.check_killed = max(node.check_killed, incarnation)
                else:
                    node.killed = max(node.killed, incarnation)
                self._publish(node)

    def probe_address(self, host: str) -> tuple[str, int] | None:
        """See `Backend.probe_address`; nodes that join connect to us, not we to them."""
        starter = self.own_starter if host in self._own else None
        return None if starter is None else starter.probe_address(host)

    def job_ends(self, exit_code: int, reason: str) -> None:
        """Publish how the job has ended; each node then ends what it still runs, and leaves."""
        with self._lock:
            self._over = self._over or join.JobOver(exit_code, reason)
            for node in self._nodes.values():
                self._publish(node)

    def close(self, grace: float) -> None:
        """See `Backend.close`: nodes end their agents themselves when the job is over."""
        began = time.monotonic()
        self.job_ends(1, "the driver was closed")
        if self.own_starter is not None:
            self.own_starter.close(grace)
        left = max(grace - (time.monotonic() - began), LEAVE_S)
        with self._lock:
            self._lock.wait_for(lambda: not self._nodes and not self._awaited, left)

    def _named(self, name: str) -> list[_JoinedNode]:
        nodes = (*self._nodes.values(), *self._awaited.values())
        return [node for node in nodes if node.name == name]

    def _publish(self, node: _JoinedNode) -> None:
        if node.name in self._awaited:
            return  # it is told when it comes back
        order = join.NodeOrder(
            incarnation=max((n for n in node.agents if not _of_check(n)), default=0),
            killed=node.killed,
            over=self._over,
            check=max(filter(_of_check, node.agents), default=0),
            check_killed=node.check_killed,
        )
        key = join.node_order(node.name, node.offer.session)
        self._store(Set(key, msgspec.json.encode(order)))

    def _store(self, operation: Operation) -> None:
        if self._server is not None:
            with contextlib.suppress(StoppedError):
                self._server.post([operation])

    # ---- reports of nodes -----------------------------------------------------------------

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        mount(app, ROUTES, self)

    async def post_hello(self, request: web.Request) -> web.Response:
        """Prove to a node that this server knows the secret."""
        return await self._open_proofs().hello(request)

    async def post_proof(self, request: web.Request) -> web.Response:
        """Take in a node that has proved that it knows the secret."""
        report = await self._open_proofs().check(request)
        return self._take(report, request[PEER], proved=True)

    async def post_report(self, request: web.Request) -> web.Response:
        """Take in the end of a node's agents, its leaving, or its return to this driver."""
        report, caller = await read_json(request, _decode_report), caller_of(request)
        if caller.role is token_roles.NODE and not self._is_of(report, caller.subject):
            raise forbidden(f"the token of node {caller.subject} is not that of {report.name}")
        return self._take(report, request[PEER], proved=False)

    def _is_of(self, report: join.NodeReport, name: str) -> bool:
        """Return whether a report is about the node of this name."""
        with self._lock:
            node = self._nodes.get(report.session)
            return node.name == name if node is not None else report.joined_as in (None, name)

    def _open_proofs(self) -> NodeProofs:
        if self._proofs is None:
            raise _not_accepting()
        return self._proofs

    def _take(self, report: join.NodeReport, peer: str, *, proved: bool) -> web.Response:
        rules = self._rules
        with self._lock:
            node = self._nodes.get(report.session)
            if node is None:
                node = self._join(report, peer, proved)
            elif report.leaves:
                self._remove(node, report.reason)
            else:
                alike = [n for n in node.agents if _of_check(n) == _of_check(report.ended)]
                for incarnation in [n for n in alike if n <= report.ended]:
                    node.agents.pop(incarnation)(report.reason)
        answer = join.Joined(
            name=node.name,
            run_id=rules.run_id,
            token=node_token(self._token, node.name),
            agent_token=agent_token(self._token, node.name),
            known_by="" if self._server is None else self._server.known_by,
            heartbeat_timeout=rules.heartbeat_timeout,
        )
        return json_answer(answer)

    def lease_expired(self, key: str) -> None:
        """Give up the node that owned this lease; called by the server's thread for every lease."""
        with self._lock:
            node = self._nodes.get(join.session_of(key))
            if node is not None:
                silence = f"{self._rules.heartbeat_timeout:g} s"
                self._remove(node, f"node {node.name} was not heard from for {silence}")

    # ---- the table, with the lock held ---------------------------------------------------

    def _join(self, offer: join.NodeReport, peer: str, proved: bool) -> _JoinedNode:
        """Add a node; if it joins again, the agents of its earlier process are lost."""
        rules = self._rules
        if offer.ended or offer.leaves:
            raise Problem(410, join.NOT_JOINED, "the job does not know this node", "join again")
        if not proved and offer.joined_as is None:  # an older program sends the secret itself
            problem = f"{offer.name} has not proved that it knows the secret"
            raise Problem(409, "no_proof", problem, "install the same elastic-driver everywhere")
        if offer.version != rules.version:
            versions = f"{offer.version}, and the server {rules.version}"
            problem = f"{offer.name} has elastic-driver {versions}"
            raise Problem(409, "other_version", problem, "install the same version everywhere")
        ends = self._over is not None and offer.joined_as not in self._awaited
        if ends or self._server is None:
            raise _not_accepting()
        if len(self._nodes) >= MAX_NODES:
            raise Problem(409, "too_many", f"{MAX_NODES} nodes have joined already")
        if sum(node.peer == peer for node in self._nodes.values()) >= OF_PEER:
            raise Problem(409, "too_many", f"{OF_PEER} nodes have joined from {peer} already")
        for known in list(self._nodes.values()):
            # A token that a node was given stands for the name that it was given with it.
            name, its = (known.offer.name, offer.name) if proved else (known.name, offer.joined_as)
            if (name, known.offer.machine) == (its, offer.machine):
                self._remove(known, offer.reason or f"node {known.name} has joined anew")
        node = self._awaited.pop(offer.joined_as or "", None)
        if node is None:
            name = self._free_name(offer)
            if not proved and name != offer.joined_as:
                gone = f"another node is {offer.joined_as} now"
                raise Problem(410, join.NOT_JOINED, gone, "join again")
            node = _JoinedNode(name, offer, offer.slots or rules.default_slots)
        node.offer, node.peer = offer, peer
        self._nodes[offer.session] = node
        lease = join.node_lease(node.name, offer.session)
        self._store(Set(lease, lease=rules.heartbeat_timeout))
        self._publish(node)
        self._change()
        return node

    def _free_name(self, offer: join.NodeReport) -> str:
        """Return a name that no other node has, if possible the one that this node had before."""
        taken = (
            {node.name for node in self._nodes.values()} | self._own.keys() | self._awaited.keys()
        )
        numbered = (f"{offer.name}-{n}" for n in range(2, len(taken) + 3))
        names = (offer.joined_as or offer.name, offer.name, *numbered)
        return next(name for name in names if name not in taken)

    def _give_up_awaited(self) -> None:
        """Report the agents of nodes that have not come back as lost."""
        given_up, self._awaited = tuple(self._awaited.values()), {}
        for node in given_up:
            for on_lost in node.agents.values():
                on_lost(f"node {node.name} has not come back to the resumed driver")

    def _remove(self, node: _JoinedNode, reason: str) -> None:
        """Forget a node, refuse its keys, and report its agents as lost."""
        del self._nodes[node.offer.session]
        keys = join.node_lease(node.name, node.offer.session).removesuffix("lease")
        self._store(DeletePrefix(keys, seal=True))
        self._change()
        for on_lost in node.agents.values():
            on_lost(reason)

    def _change(self) -> None:
        self._changed = True
        self._lock.notify_all()


def _not_accepting() -> Problem:
    return Problem(503, "not_accepting", "the job begins or ends", "try again later")


class CheckOfNodes(Backend):
    """The backend of one node check: its agents run on nodes that have joined."""

    def __init__(self, nodes: JoinedNodes) -> None:
        self._nodes = nodes

    def start(self, host: str, incarnation: int, on_lost: OnLost) -> None:
        """See `Backend.start`."""
        self._nodes.start(host, incarnation, on_lost)

    def kill(self, host: str, incarnation: int) -> None:
        """See `Backend.kill`."""
        self._nodes.kill(host, incarnation)

    def close(self, grace: float) -> None:
        """See `Backend.close`: nothing is left to close, as a check ends its agents itself."""


ROUTES = (
    Route("POST", join.HELLO_PATH, None, JoinedNodes.post_hello, join.HelloAnswer, join.Hello),
    Route(
        "POST",
        join.PROOF_PATH,
        None,
        JoinedNodes.post_proof,
        join.Joined,
        join.NodeProof,
        errors=("403 no_proof",),
    ),
    Route("POST", join.NODES_PATH, NODES, JoinedNodes.post_report, join.Joined, join.NodeReport),
)
