"""The TensorFlow cluster that forms over HTTP: its members, who waits, who was lost (a `Machine`).

A node comes with a `ClusterSpecRequest`. When `min_nodes` have come, a window opens in which more
may join; arrivals do not extend it, and `max_nodes` close it. A cluster that forms is a
*generation*. Its members renew their lease with `LookRequest`s, and learn from the answers that
others wait or that members were lost. Each member then sends a `ClusterSpecRequest` again, which
leaves the generation. The next generation forms when every member has left or is lost; newcomers
wait until then.

Pure. Times are monotonic seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import msgspec

from elastic_driver.core.events import Tick
from elastic_driver.core.tf_config import WORKERS_ONLY, Task, assign, cluster_of
from elastic_driver.policies.messages import Rejection, Reply, RequestDropped
from elastic_driver.policies.tf_meetings import Meetings
from elastic_driver.policies.tf_messages import (
    BarrierRequest,
    ClusterSpec,
    ClusterSpecRequest,
    LookRequest,
    SynchronizeRequest,
    TfAnswer,
    TfRequest,
    WaitingNodes,
)

TfEvent = TfRequest | RequestDropped | Tick

HELD_UP_S = 0.5  # a Tick that is this late means that the driver itself stood still
RENEWAL_S = 1.0  # for renewals that wait in socket buffers to be read


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The numbers on which all nodes that wait together have to agree."""

    least: int
    most: int
    gather: float


@dataclass(slots=True)
class _Call:
    """The request of a node that waits; `ticket` None: it was answered, the node will ask again."""

    ticket: int | None
    until: float


class TfCluster:
    """The one cluster of a job. `lease`: seconds after which a silent node is lost."""

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._leases: dict[str, float] = {}  # until when
        self._waiting: dict[str, _Call] = {}  # in the order of their arrival
        self._bounds: _Bounds | None = None  # of those who wait
        self._window: float | None = None  # the end of the time in which others may still join
        self._generation = 0
        self._tasks: dict[str, Task] = {}  # of the newest generation, the oldest member first
        self._cluster: dict[str, list[str]] = {}
        self._living: set[str] = set()  # members that have not left and are not lost
        self._lost: list[str] = []
        self._unaware: set[str] = set()  # members that had no request open when it formed
        self._meetings = Meetings(0, ())

    # ---- the door ------------------------------------------------------------------------

    def handle(self, event: TfEvent, now: float) -> list[Reply]:
        """Take in a request, the end of one, or the time."""
        match event:
            case TfRequest():
                return self._answer(event, now)
            case RequestDropped(ticket=ticket):
                self.withdraw(ticket, now)
                return []
            case Tick():
                due = self.deadline()
                if due is not None and now - due > HELD_UP_S:
                    self.postpone(now - due + RENEWAL_S)
                return _replies(self.expire(now))

    def check(self) -> list[str]:
        """See `Machine.check`."""
        strangers = self._living - self._tasks.keys()
        return [f"{node} lives in a generation that it is no member of" for node in strangers]

    def snapshot(self) -> bytes:
        """See `Machine.snapshot`."""
        state = (self._generation, self._tasks, sorted(self._living), list(self._waiting))
        return msgspec.json.encode((*state, self._lost, self._leases))

    def _answer(self, event: TfRequest, now: float) -> list[Reply]:
        ticket, request = event.ticket, event.request
        match request:
            case ClusterSpecRequest():
                return _replies(self.join(ticket, request, now))
            case LookRequest(address):
                return [Reply(ticket, self.look(address, now))]
            case BarrierRequest() | SynchronizeRequest():
                kind = "barrier" if isinstance(request, BarrierRequest) else "synchronize"
                tagged = msgspec.structs.replace(request, tag=f"{kind} {request.tag}")
                return _replies(self.arrive(ticket, tagged, now))

    # ---- requests ------------------------------------------------------------------------

    def join(self, ticket: int, request: ClusterSpecRequest, now: float) -> list[TfAnswer]:
        """Take a node in for the next generation; it leaves the one that it is in."""
        node = request.address
        if node in self._unaware:
            self._unaware.discard(node)
            return self._with_leases([TfAnswer(ticket, node, self._spec(node))], now)
        refused = self._disagrees(request)
        if refused is not None:
            return [TfAnswer(ticket, node, refused)]
        answers: list[TfAnswer] = []
        if node in self._living:
            self._living.discard(node)
            answers += self._meetings.gone(node, "has asked for the next cluster")
        before = self._waiting.get(node)
        if before is not None and before.ticket is not None:
            problem = f"another request came from {node}"
            hint = "give each node an address of its own"
            answers.append(TfAnswer(before.ticket, node, Rejection("replaced", problem, hint)))
        self._bounds = _Bounds(request.min_nodes, request.max_nodes, request.gather)
        until = now + request.wait
        self._waiting[node] = _Call(ticket, until)
        self._leases[node] = until + self._lease
        answers += self._form(now)
        return self._with_leases(answers, now)

    def look(self, node: str | None, now: float) -> WaitingNodes:
        """Return what has changed since the generation formed; renew the lease of `node`."""
        if node in self._leases:
            self._leases[node] = max(self._leases[node], now + self._lease)
        waiting, lost = tuple(self._waiting), tuple(self._lost)
        return WaitingNodes(self._count(), self._generation, waiting, lost)

    def arrive(
        self, ticket: int, request: BarrierRequest | SynchronizeRequest, now: float
    ) -> list[TfAnswer]:
        """Take in that a member has come to a barrier or an exchange."""
        node = request.address
        if node not in self._living:
            problem = f"{node} is not a member of generation {self._generation}"
            refused = Rejection("not_a_member", problem, "ask for a cluster_spec first")
            return [TfAnswer(ticket, node, refused)]
        deadline = now + request.timeout
        self._leases[node] = deadline + self._lease
        answers = self._meetings.arrive(
            ticket,
            node,
            request.tag,
            value=request.value if isinstance(request, SynchronizeRequest) else b"",
            failure=request.failure,
            deadline=deadline,
        )
        return self._with_leases(answers, now)

    def withdraw(self, ticket: int, now: float) -> None:
        """Forget a request whose client is gone; its node keeps its place for one lease."""
        for node, call in self._waiting.items():
            if call.ticket == ticket:
                call.ticket = None
                self._leases[node] = now + self._lease

    # ---- time ----------------------------------------------------------------------------

    def expire(self, now: float) -> list[TfAnswer]:
        """Do everything that is due by now."""
        answers = self._with_leases(self._meetings.expire(now), now)
        for node in [node for node, until in self._leases.items() if until <= now]:
            del self._leases[node]
            self._waiting.pop(node, None)
            if node in self._living:
                self._living.discard(node)
                self._unaware.discard(node)
                self._lost.append(node)
                gone = self._meetings.gone(node, f"was not heard of for {self._lease:g} s")
                answers += self._with_leases(gone, now)
        answers += self._with_leases(self._form(now), now)
        for node, call in self._waiting.items():
            if call.ticket is not None and call.until <= now:
                answers.append(TfAnswer(call.ticket, node, self._not_yet()))
                call.ticket = None
                self._leases[node] = now + self._lease
        return answers

    def deadline(self) -> float | None:
        """See `Machine.deadline`."""
        calls = (call.until for call in self._waiting.values() if call.ticket is not None)
        others = (self._window, self._meetings.deadline())
        known = (at for at in others if at is not None)
        return min(chain(self._leases.values(), calls, known), default=None)

    def postpone(self, seconds: float) -> None:
        """Let all leases end later: nobody could be heard for so many seconds."""
        self._leases = {node: until + seconds for node, until in self._leases.items()}

    # ---- inside --------------------------------------------------------------------------

    def _disagrees(self, request: ClusterSpecRequest) -> Rejection | None:
        if request.min_nodes > request.max_nodes:
            problem = f"min_nodes {request.min_nodes} is more than max_nodes {request.max_nodes}"
            return Rejection("bad_bounds", problem)
        wished = _Bounds(request.min_nodes, request.max_nodes, request.gather)
        alone = not self._waiting or list(self._waiting) == [request.address]
        if alone or wished == self._bounds or self._bounds is None:
            return None
        return Rejection(
            "other_bounds",
            f"others wait for {self._bounds.least} to {self._bounds.most} nodes and gather for "
            f"{self._bounds.gather:g} s",
            "ask for the same on every node",
        )

    def _form(self, now: float) -> list[TfAnswer]:
        """Form the next generation, if it is time."""
        bounds = self._bounds
        if bounds is None or self._living or len(self._waiting) < bounds.least:
            self._window = None
            return []
        if len(self._waiting) < bounds.most:
            if self._window is None:
                self._window = now + bounds.gather
            if now < self._window:
                return []
        stayed = {node: task for node, task in self._tasks.items() if node in self._waiting}
        stayed = {node: task for node, task in stayed.items() if node not in self._lost}
        newcomers = (node for node in self._waiting if node not in stayed)
        self._begin([*stayed, *newcomers][: bounds.most], stayed)
        tickets = {node: self._waiting.pop(node).ticket for node in self._tasks}
        self._unaware = {node for node, ticket in tickets.items() if ticket is None}
        if not self._waiting:
            self._bounds = None
        asked = ((node, ticket) for node, ticket in tickets.items() if ticket is not None)
        return [TfAnswer(ticket, node, self._spec(node)) for node, ticket in asked]

    def _begin(self, members: Iterable[str], previous: dict[str, Task]) -> None:
        self._generation += 1
        self._tasks = assign(list(members), WORKERS_ONLY, previous)
        self._cluster = cluster_of(self._tasks, {node: node for node in self._tasks})
        self._living, self._lost = set(self._tasks), []
        self._window = None
        by_index = sorted(self._tasks, key=lambda node: self._tasks[node])
        self._meetings = Meetings(self._generation, by_index)

    def _spec(self, node: str) -> ClusterSpec:
        return ClusterSpec(self._generation, self._cluster, self._tasks[node])

    def _count(self) -> int:
        if self._lost:
            return -len(self._lost)
        if self._bounds is None:
            return 0
        back = sum(1 for node in self._waiting if node in self._tasks)
        room = max(0, self._bounds.most - len(self._living) - back)
        return back + min(len(self._waiting) - back, room)

    def _not_yet(self) -> Rejection:
        least = self._bounds.least if self._bounds is not None else 1
        problem = f"{len(self._waiting)} nodes wait, {least} are needed"
        if self._living:
            problem = f"{len(self._living)} members train in generation {self._generation}"
        hint = f"ask again: the place is kept for {self._lease:g} s"
        return Rejection("timed_out", f"no cluster yet: {problem}", hint)

    def _with_leases(self, answers: list[TfAnswer], now: float) -> list[TfAnswer]:
        """Renew the lease of each node that is answered, unless it still waits."""
        for _, node, _ in answers:
            call = self._waiting.get(node)
            if node in self._leases and (call is None or call.ticket is None):
                self._leases[node] = now + self._lease
        return answers


def _replies(answers: Iterable[TfAnswer]) -> list[Reply]:
    return [Reply(answer.ticket, answer.reply) for answer in answers]
