"""Nodes that start by themselves and join: a source of hosts and a starter of agents in one.

A node posts that it is there, and from then on waits for orders in long-polls, which also show
that it lives. To the driver it is a host like any other: this object answers `find()` with the
nodes there are, and starts an agent by telling its node to. A node that is silent for the
heartbeat timeout, leaves, or joins anew is no host any more, and its agents are lost.

The table of nodes is guarded by a lock: routes run on the server's loop, `find` on the discovery
thread, `start` and `kill` on the driver's mailbox thread. Waiting requests are woken on the loop.
Times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from aiohttp import web

from elastic_driver.core.join_messages import (
    ATTEND_PATH,
    JOIN_PATH,
    LEAVE_PATH,
    AttendRequest,
    JobOver,
    Joined,
    JoinRequest,
    LeaveRequest,
    NodeOrders,
)
from elastic_driver.errors import ClusterError
from elastic_driver.runtime.backend import Backend, OnLost
from elastic_driver.runtime.host_lists import Hosts
from rendezvous.auth import read_token_file
from rendezvous.web import Problem, json_answer, read_json

LOOK_S = 0.5  # discovery looks this often though nothing has changed
TOLD_S = 3.0  # for the nodes to hear how the job has ended
MAX_NODES = 100_000
_LATE = 0.2  # of the heartbeat timeout: a timer that is later than this was held up itself

_decode_join = msgspec.json.Decoder(JoinRequest).decode
_decode_attend = msgspec.json.Decoder(AttendRequest).decode
_decode_leave = msgspec.json.Decoder(LeaveRequest).decode


@dataclass(eq=False)
class _Node:
    """One node's process, from its join to its end."""

    name: str
    offer: JoinRequest
    slots: int
    agents: dict[int, OnLost] = field(default_factory=dict)  # ordered, and not known to be gone
    killed: set[int] = field(default_factory=set)
    number: int = 1
    told: bool = False  # how the job has ended
    news: asyncio.Event = field(default_factory=asyncio.Event)
    silence: asyncio.TimerHandle | None = None


@dataclass(frozen=True)
class NodeRules:
    """What every node that joins has to keep to."""

    run_id: str
    version: str  # of elastic-driver, the same everywhere
    heartbeat_timeout: float
    leave_notice: float
    default_slots: int
    reserved: frozenset[str] = frozenset()  # names that no node gets


class JoinedNodes(Backend):
    """Hosts that join by themselves (a `HostDiscovery` and a `Backend` of the driver)."""

    def __init__(self, rules: NodeRules, secrets: tuple[str, ...] = ()) -> None:
        """`secrets`: with any of these in place of the job's token a node may join."""
        self._rules, self.secrets = rules, secrets
        self._lock = threading.Condition()
        self._nodes: dict[str, _Node] = {}  # by session
        self._changed = True  # since the last `find`
        self._cancelled = False
        self._token: str | None = None
        self._over: JobOver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, token_file: Path) -> None:
        """The rendezvous is up, and the job's token written: nodes may join from now on."""
        token = read_token_file(token_file)
        with self._lock:
            self._token = token

    # ---- HostDiscovery -------------------------------------------------------------------

    def find(self) -> Hosts:
        """The nodes there are, in the order in which they joined; returns when that changes."""
        with self._lock:
            self._lock.wait_for(lambda: self._changed or self._cancelled, LOOK_S)
            if self._cancelled:
                raise ClusterError("the search for nodes was cancelled")
            self._changed = False
            return tuple((node.name, node.slots) for node in self._nodes.values())

    def cancel(self) -> None:
        """See `HostDiscovery.cancel`."""
        with self._lock:
            self._cancelled = True
            self._lock.notify_all()

    # ---- Backend --------------------------------------------------------------------

    def start(self, host: str, incarnation: int, on_lost: OnLost) -> None:
        """See `Backend.start`."""
        with self._lock:
            node = self._named(host)
            if node is not None:
                node.agents[incarnation] = on_lost
                self._tell(node)
                return
        on_lost(f"node {host} has left")

    def kill(self, host: str, incarnation: int) -> None:
        """See `Backend.kill`; a node that is silent has lost its agents when it is dropped."""
        with self._lock:
            node = self._named(host)
            if node is not None and incarnation in node.agents:
                node.killed.add(incarnation)
                self._tell(node)

    def job_ends(self, exit_code: int, reason: str) -> None:
        """Tell every node how the job has ended; each then ends what is left there, and leaves."""
        with self._lock:
            self._over = JobOver(exit_code, reason)
            for node in self._nodes.values():
                self._tell(node)

    def close(self, grace: float) -> None:
        """See `Backend.close`: the nodes end their agents once they know of the job's end."""
        with self._lock:
            if self._over is None:
                self._over = JobOver(1, "the driver was closed")
                for node in self._nodes.values():
                    self._tell(node)
            self._lock.wait_for(
                lambda: all(node.told for node in self._nodes.values()), max(grace, TOLD_S)
            )

    def _named(self, name: str) -> _Node | None:
        return next((node for node in self._nodes.values() if node.name == name), None)

    def _tell(self, node: _Node) -> None:
        """Have the node's request answered, from any thread."""
        node.number += 1
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                self._loop.call_soon_threadsafe(node.news.set)

    # ---- routes --------------------------------------------------------------------------

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        app.router.add_post(JOIN_PATH, self.post_join)
        app.router.add_post(ATTEND_PATH, self.post_attend)
        app.router.add_post(LEAVE_PATH, self.post_leave)

    async def post_join(self, request: web.Request) -> web.Response:
        """A node offers itself."""
        wish = await read_json(request, _decode_join)
        rules = self._rules
        if wish.version != rules.version:
            raise Problem(
                409,
                "other_version",
                f"elastic-driver {wish.version} is installed on {wish.name}, {rules.version} here",
                "install the same version everywhere",
            )
        self._loop = asyncio.get_running_loop()
        with self._lock:
            if self._over is not None or self._token is None:
                raise Problem(503, "not_accepting", "the job begins or ends", "try again later")
            if len(self._nodes) >= MAX_NODES:
                raise Problem(409, "too_many", f"{MAX_NODES} nodes have joined already")
            token = self._token
            orphans = self._take_over(wish)
            node = _Node(self._free_name(wish), wish, wish.slots or rules.default_slots)
            self._nodes[wish.session] = node
            self._change()
        _lose(orphans, f"node {wish.name} has joined anew")
        self._watch(node)
        return json_answer(
            Joined(node.name, rules.run_id, token, rules.heartbeat_timeout, rules.leave_notice)
        )

    async def post_attend(self, request: web.Request) -> web.Response:
        """A node lives, tells of ended agents, and waits for orders."""
        told = await read_json(request, _decode_attend)
        node = self._known(told.session)
        self._watch(node)
        for end in told.ended:
            with self._lock:
                on_lost = node.agents.pop(end.incarnation, None)
                node.killed.discard(end.incarnation)
            if on_lost is not None:
                on_lost(end.reason)
        if node.number == told.known:
            node.news.clear()
            wait = min(told.wait, self._rules.heartbeat_timeout / 3)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(node.news.wait(), wait)
        with self._lock:
            answer = NodeOrders(
                node.number, tuple(node.agents), tuple(sorted(node.killed)), self._over
            )
            if self._over is not None:
                node.told = True
                self._lock.notify_all()
        return json_answer(answer)

    async def post_leave(self, request: web.Request) -> web.Response:
        """A node goes."""
        told = await read_json(request, _decode_leave)
        node = self._known(told.session)
        self._drop(node, told.reason)
        return json_answer(NodeOrders(node.number))

    def _known(self, session: str) -> _Node:
        with self._lock:
            node = self._nodes.get(session)
        if node is None:
            raise Problem(410, "not_joined", "the job does not know this node", "join again")
        return node

    # ---- the table -----------------------------------------------------------------------

    def _change(self) -> None:
        self._changed = True
        self._lock.notify_all()

    def _take_over(self, wish: JoinRequest) -> list[OnLost]:
        """Remove the entry of the process that this one follows: the same name and machine."""
        for session, node in list(self._nodes.items()):
            known = node.offer
            if (known.name, known.machine) == (wish.name, wish.machine) or session == wish.session:
                return self._remove(node)
        return []

    def _free_name(self, wish: JoinRequest) -> str:
        taken = {node.name for node in self._nodes.values()} | self._rules.reserved
        names = (wish.name if n == 1 else f"{wish.name}-{n}" for n in range(1, len(taken) + 2))
        return next(name for name in names if name not in taken)

    def _remove(self, node: _Node) -> list[OnLost]:
        """Forget a node; whom to tell of its agents. The lock is held."""
        if self._nodes.get(node.offer.session) is not node:
            return []
        del self._nodes[node.offer.session]
        if node.silence is not None:
            node.silence.cancel()
        self._change()
        return list(node.agents.values())

    def _drop(self, node: _Node, reason: str) -> None:
        with self._lock:
            orphans = self._remove(node)
        _lose(orphans, reason)

    def _watch(self, node: _Node) -> None:
        """On the loop: the node was heard of just now; drop it when it has been silent for long."""
        if node.silence is not None:
            node.silence.cancel()
        loop, patience = asyncio.get_running_loop(), self._rules.heartbeat_timeout
        due = loop.time() + patience

        def silent() -> None:
            if loop.time() > due + _LATE * patience:  # we stood still, not the node
                self._watch(node)
                return
            self._drop(node, f"node {node.name} was not heard of for {patience:g} s")

        node.silence = loop.call_at(due, silent)


def _lose(orphans: list[Callable[[str], None]], reason: str) -> None:
    for on_lost in orphans:
        on_lost(reason)
