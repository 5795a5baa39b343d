"""The TensorFlow cluster that forms over HTTP: its members, waiting and lost nodes (a `Machine`).

A node comes with a `ClusterSpecRequest`. When `min_nodes` have come, a window opens in which more
may join; arrivals do not extend it, and `max_nodes` close it. A cluster that forms is a
*generation*. Its members renew their lease with `LookRequest`s, and learn from the answers that
others wait or that members were lost. Each member then sends a `ClusterSpecRequest` again, which
leaves the generation. The next generation forms when every member has left or is lost; newcomers
wait until then.

Pure. Times are monotonic seconds.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypeAlias, get_args

import msgspec

from elastic_driver.features.tensorflow import messages as tf
from elastic_driver.job.events import DriverResumed, Tick
from elastic_driver.kernel.machine import Declaration, Packing, Reply, Requests
from elastic_driver.kernel.services import Rejection, RepeatableRequest, RequestDropped
from elastic_driver.kernel.tables import Snapshots, Tables, make, saved, table
from elastic_driver.words import counted
from elastic_driver.words.tf_config import WORKERS_ONLY, Task, assign, cluster_of

HELD_UP_S = 0.5  # a Tick that is this late means that the driver itself stood still
RENEWAL_S = 1.0  # for renewals that wait in socket buffers to be read
MAX_TAGS = 4096  # that wait for members at the same time
MAX_HELD_BYTES = 256 * 1024 * 1024  # of values that wait for others
MAX_NODES = 16_384  # addresses that have a place
SHARE = 4  # one member, or the workers of one slot, get a quarter of each of these
_ANEW = "ask for the next cluster_spec"

_TfAsked = tf.ClusterSpecRequest | tf.BarrierRequest | tf.LookRequest
TfEvent: TypeAlias = tf.TfRequest | RequestDropped | DriverResumed | Tick
# The ticket of a request, the node that sent it, and the reply.
Answer = tuple[int, str, tf.ClusterSpec | tf.Synchronized | Rejection]


# ---- barriers and exchanges --------------------------------------------------------------


@dataclass(slots=True)
class _Meeting:
    deadline: float
    called: dict[str, None] = field(default_factory=dict)  # the members, in their order
    values: dict[str, bytes] = field(default_factory=dict)
    tickets: dict[str, int] = field(default_factory=dict)
    failed: Rejection | None = None


@dataclass(slots=True)
class _Tag:
    calls: dict[str, int] = field(default_factory=dict)  # so far, by member
    meetings: dict[int, _Meeting] = field(default_factory=dict)


@dataclass(init=False)
class Meetings:
    """All barriers and exchanges of one generation, identified by their tags.

    A tag may be used repeatedly: each member's n-th call belongs to the n-th meeting of that tag.
    If a meeting fails, it fails for all members: those that wait are answered at once, the others
    when they come. `members` are in the order of their indices.
    """

    _generation: int = saved(0, name="generation")
    _members: tuple[str, ...] = saved((), name="members")
    _tags: dict[str, _Tag] = saved(factory=dict, name="tags")
    _broken: Rejection | None = saved(None, name="broken")
    _held: Counter[str] = saved(factory=Counter, name="held")  # bytes, by member
    # Of each member, that not all others have made.
    _calls: Counter[str] = saved(factory=Counter, name="calls")

    def __init__(self, generation: int, members: Iterable[str]) -> None:
        self._generation, self._members = generation, tuple(members)
        self._tags, self._broken = {}, None
        self._held, self._calls = Counter(), Counter()

    def arrive(self, ticket: int, request: tf.BarrierRequest, deadline: float) -> list[Answer]:
        """Record that a member has come to a tag, or has failed; return the answers to give."""
        member, tag = request.address, request.tag
        value = request.value if isinstance(request, tf.SynchronizeRequest) else b""
        refused = self._broken
        if refused is None and tag not in self._tags and len(self._tags) >= MAX_TAGS:
            refused = Rejection("too_many_tags", f"{MAX_TAGS} tags wait already", "use tags again")
        elif refused is None and self._calls[member] >= MAX_TAGS // SHARE:
            problem = f"{member} has called {self._calls[member]} times without the others"
            refused = Rejection("too_many_tags", problem, "wait for the others")
        elif refused is None and not self._has_room(member, len(value)):
            problem = f"values of {self._held.total()} bytes wait already"
            refused = Rejection("too_large", problem, "synchronize less at once")
        if refused is not None:
            return [(ticket, member, refused)]
        known = self._tags.setdefault(tag, _Tag())
        number = known.calls[member] = known.calls.get(member, 0) + 1
        meeting = known.meetings.setdefault(number, _Meeting(deadline))
        meeting.called[member] = None
        self._calls[member] += 1
        meeting.tickets[member] = ticket
        reply: tf.Synchronized | Rejection | None = meeting.failed
        if reply is None and request.failure is not None:
            problem = f"{tag!r} failed: {member} says: {request.failure}"
            reply = Rejection("failed", problem, _ANEW)
        elif reply is None:
            meeting.values[member] = value
            meeting.deadline = min(meeting.deadline, deadline)
            self._held[member] += len(value)
            if len(meeting.values) == len(self._members):
                values = {name: meeting.values[name] for name in self._members}
                reply = tf.Synchronized(self._generation, values)
        answers = [] if reply is None else self._answer(meeting, reply)
        if len(meeting.called) == len(self._members):
            self._calls.subtract([*meeting.called])
            del known.meetings[number]
        if not known.meetings and len({known.calls.get(m, 0) for m in self._members}) == 1:
            del self._tags[tag]
        return answers

    def gone(self, member: str, why: str) -> list[Answer]:
        """Fail every meeting from now on: this member will not come again."""
        problem = f"{member} {why}, generation {self._generation} cannot meet any more"
        self._broken = Rejection("member_gone", problem, _ANEW)
        answers = [a for _, m in self._open() for a in self._answer(m, self._broken)]
        self._tags.clear()
        self._calls.clear()
        return answers

    def forget_waiting(self) -> None:
        """Forget the members that wait: their connections have ended, and they come again."""
        for known in self._tags.values():
            for meeting in known.meetings.values():
                for member in meeting.tickets:
                    known.calls[member] -= 1
                    self._calls[member] -= 1
                    meeting.called.pop(member, None)
                    self._held[member] -= len(meeting.values.pop(member))
                meeting.tickets.clear()
            known.meetings = {n: found for n, found in known.meetings.items() if found.called}

    def expire(self, now: float) -> list[Answer]:
        """Fail the meetings whose deadline is over; return the answers to give."""
        answers = []
        for tag, meeting in self._open():
            if meeting.deadline <= now:
                missing = [name for name in self._members if name not in meeting.called]
                who = f"{', '.join(missing[:8])} ({len(missing)} of {len(self._members)})"
                problem = f"{tag!r} timed out: {who} did not come"
                answers += self._answer(meeting, Rejection("timed_out", problem, _ANEW))
        return answers

    def _has_room(self, member: str, size: int) -> bool:
        """Return whether a member may leave a value of this size for the others."""
        share = max(tf.MAX_VALUE_BYTES, MAX_HELD_BYTES // SHARE)
        return self._held.total() + size <= MAX_HELD_BYTES and self._held[member] + size <= share

    def deadline(self) -> float | None:
        """Return when to call `expire` next."""
        return min((meeting.deadline for _, meeting in self._open()), default=None)

    def _open(self) -> list[tuple[str, _Meeting]]:
        """Return the meetings that have not failed, with their tags."""
        meetings = ((tag, m) for tag, known in self._tags.items() for m in known.meetings.values())
        return [(tag, meeting) for tag, meeting in meetings if meeting.failed is None]

    def _answer(self, meeting: _Meeting, reply: tf.Synchronized | Rejection) -> list[Answer]:
        """Answer all members that wait, and drop the values."""
        if isinstance(reply, Rejection):
            meeting.failed = reply
        self._held.subtract({member: len(value) for member, value in meeting.values.items()})
        tickets, meeting.tickets, meeting.values = meeting.tickets, {}, {}
        return [(ticket, member, reply) for member, ticket in tickets.items()]


# ---- the cluster -------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """The request of a node that waits; `ticket` None: it was answered, the node will ask again."""

    ticket: int | None
    until: float


class _Given(NamedTuple):
    """The newest answer to a node, by the name of its request: one of these three."""

    request: str
    spec: tf.ClusterSpec | None = None
    met: tf.Synchronized | None = None
    refused: Rejection | None = None

    @classmethod
    def of(cls, request: str, answer: tf.ClusterSpec | tf.Synchronized | Rejection) -> "_Given":
        if isinstance(answer, tf.ClusterSpec):
            return cls(request, spec=answer)
        if isinstance(answer, tf.Synchronized):
            return cls(request, met=answer)
        return cls(request, refused=answer)

    @property
    def answer(self) -> tf.ClusterSpec | tf.Synchronized | Rejection | None:
        return self.spec or self.met or self.refused


@dataclass
class TfCluster(Snapshots):
    """The one cluster of a job. `lease`: seconds after which a silent node is lost."""

    lease: float = saved()
    _leases: dict[str, float] = saved(factory=dict, name="leases")  # node → the end of its lease
    # Node → the slot of the worker that speaks for it, as long as it has a lease; "": whoever has
    # an operator's token.
    _owners: dict[str, str] = saved(factory=dict, name="owners")
    # In the order of their arrival.
    _waiting: dict[str, _Call] = saved(factory=dict, name="waiting")
    # The newest request; all waiting nodes have asked for the same numbers.
    _wished: tf.ClusterSpecRequest | None = saved(None, name="wished")
    # The end of the time in which others may still join.
    _window: float | None = saved(None, name="window")
    _generation: int = saved(0, name="generation")
    # Of the newest generation, the oldest member first.
    _tasks: dict[str, Task] = saved(factory=dict, name="tasks")
    _cluster: dict[str, list[str]] = saved(factory=dict, name="cluster")
    # Members that have not left and are not lost.
    _living: set[str] = saved(factory=set, name="living")
    _lost: list[str] = saved(factory=list, name="lost")
    # Members that had no request open when it formed.
    _unaware: set[str] = saved(factory=set, name="unaware")
    _meetings: Meetings = field(default_factory=lambda: Meetings(0, ()))
    # Of the requests that wait, by ticket.
    _names: dict[int, str] = saved(factory=dict, name="names")
    # The newest answer to each node, with the name of its request, until the node sends another
    # one: an answer may be lost.
    _given: dict[str, _Given] = saved(factory=dict, name="given")
    _out: list[Reply] = field(default_factory=list)

    def tables(self) -> Tables:
        """See `Snapshots.tables`."""
        return {"": table(self), "meetings": table(self._meetings)}

    @classmethod
    def from_tables(cls, found: Tables) -> "TfCluster":
        """See `Snapshots.from_tables`."""
        cluster = make(cls, found[""])
        cluster._meetings = make(Meetings, found["meetings"])
        return cluster

    # ---- a machine's methods -------------------------------------------------------------

    def handle(self, event: TfEvent, now: float) -> list[Reply]:
        """Take in a request, the loss of a request's client or of the driver, or the time."""
        match event:
            case tf.TfRequest(ticket, request, owner):
                if refused := self._refuse(request, owner):
                    return [Reply(ticket, refused)]
                self._take(ticket, request, now)
                if (node := request.address) not in self._leases:  # it has got no place
                    self._owners.pop(node or "", None)
            case DriverResumed():
                self._resume(now)
            case RequestDropped(ticket=ticket):  # its node keeps its place for one lease
                self._names.pop(ticket, None)
                for node, call in self._waiting.items():
                    if call.ticket == ticket:
                        call.ticket = None
                        self._leases[node] = now + self.lease
            case Tick():
                due = self.deadline()
                if due is not None and now - due > HELD_UP_S:  # meanwhile no renewal was read
                    late = now - due + RENEWAL_S
                    self._leases = {node: until + late for node, until in self._leases.items()}
                self._expire(now)
        out, self._out = self._out, []
        for reply in out:
            self._names.pop(reply.ticket, None)
        return out

    def deadline(self) -> float | None:
        """See `Machine.deadline`."""
        calls = (call.until for call in self._waiting.values() if call.ticket is not None)
        others = (self._window, self._meetings.deadline())
        known = (at for at in others if at is not None)
        return min(chain(self._leases.values(), calls, known), default=None)

    def check(self) -> list[str]:
        """See `Machine.check`."""
        strangers = self._living - self._tasks.keys()
        return [f"{node} lives in a generation that it is no member of" for node in strangers]

    def view(self) -> tf.TfStatus:
        """Return the members, and the nodes that wait or were lost."""
        members = {node: task for node, task in self._tasks.items() if node in self._living}
        return tf.TfStatus(self._generation, members, tuple(self._waiting), tuple(self._lost))

    # ---- requests ------------------------------------------------------------------------

    def _refuse(self, request: _TfAsked, owner: str) -> Rejection | None:
        """Return why a request may not speak for its node; None: it does from now on."""
        node = request.address
        if node is None or (isinstance(request, tf.LookRequest) and node not in self._leases):
            return None
        if node in self._owners:
            if not owner or self._owners[node] == owner:
                return None
            problem = f"{node} is a node of another worker"
            return Rejection("not_yours", problem, "give each node an address of its own")
        own = sum(of == owner for of in self._owners.values())
        if len(self._owners) >= MAX_NODES or (owner and own >= MAX_NODES // SHARE):
            return Rejection("too_many", f"{len(self._owners)} nodes have a place already")
        self._owners[node] = owner
        return None

    def _take(
        self,
        ticket: int,
        request: _TfAsked,
        now: float,
    ) -> None:
        if isinstance(request, RepeatableRequest) and request.request:
            self._names[ticket] = request.request
        given = self._given.pop(request.address or "", _Given(""))
        name, answer = given.request, given.answer
        if answer is not None and name == self._names.get(ticket):
            self._answer([(ticket, request.address or "", answer)], now)
            return
        match request:
            case tf.ClusterSpecRequest():
                self._join(ticket, request, now)
            case tf.LookRequest(node):
                if node in self._leases:
                    self._leases[node] = max(self._leases[node], now + self.lease)
                waiting, lost = tuple(self._waiting), tuple(self._lost)
                look = tf.WaitingNodes(self._count(), self._generation, waiting, lost)
                self._out.append(Reply(ticket, look))
            case tf.BarrierRequest(address=node) if node not in self._living:
                problem = f"{node} is not a member of generation {self._generation}"
                refused = Rejection("not_a_member", problem, "ask for a cluster_spec first")
                self._out.append(Reply(ticket, refused))
            case tf.BarrierRequest(address=node):
                kind = "synchronize" if isinstance(request, tf.SynchronizeRequest) else "barrier"
                tagged = msgspec.structs.replace(request, tag=f"{kind} {request.tag}")
                deadline = now + request.timeout
                self._leases[node] = deadline + self.lease
                self._answer(self._meetings.arrive(ticket, tagged, deadline), now)

    def _resume(self, now: float) -> None:
        """Keep the place of every node for one lease: all connections have ended with a driver."""
        self._names.clear()
        self._meetings.forget_waiting()
        for call in self._waiting.values():
            call.ticket = None
        for node, until in self._leases.items():
            self._leases[node] = max(until, now + self.lease)

    def _join(self, ticket: int, request: tf.ClusterSpecRequest, now: float) -> None:
        """Add a node to those that wait for the next generation; it leaves the present one."""
        node = request.address
        if node in self._unaware:
            self._unaware.discard(node)
            self._answer([(ticket, node, self._spec(node))], now)
            return
        refused = self._disagrees(request)
        if refused is not None:
            self._out.append(Reply(ticket, refused))
            return
        if node in self._living:
            self._living.discard(node)
            self._answer(self._meetings.gone(node, "has asked for the next cluster"), now)
        before = self._waiting.get(node)
        if before is not None and before.ticket is not None:
            problem = f"another request came from {node}"
            hint = "give each node an address of its own"
            self._out.append(Reply(before.ticket, Rejection("replaced", problem, hint)))
        self._wished, until = request, now + request.wait
        self._waiting[node] = _Call(ticket, until)
        self._leases[node] = until + self.lease
        self._form(now)

    def _disagrees(self, request: tf.ClusterSpecRequest) -> Rejection | None:
        least, most, wished = request.min_nodes, request.max_nodes, self._wished
        if least > most:
            return Rejection("bad_bounds", f"min_nodes {least} is more than max_nodes {most}")
        if wished is None or not self._waiting or list(self._waiting) == [request.address]:
            return None
        if (least, most, request.gather) == (wished.min_nodes, wished.max_nodes, wished.gather):
            return None
        nodes = f"{wished.min_nodes} to {wished.max_nodes} nodes"
        problem = f"others wait for {nodes} and gather for {wished.gather:g} s"
        return Rejection("other_bounds", problem, "ask for the same on every node")

    # ---- generations ---------------------------------------------------------------------

    def _form(self, now: float) -> None:
        """Form the next generation, if it is time."""
        wished = self._wished
        if wished is None or self._living or len(self._waiting) < wished.min_nodes:
            self._window = None
            return
        if len(self._waiting) < wished.max_nodes:
            if self._window is None:
                self._window = now + wished.gather
            if now < self._window:
                return
        stays = (node for node in self._tasks if node in self._waiting and node not in self._lost)
        stayed = {node: self._tasks[node] for node in stays}
        newcomers = (node for node in self._waiting if node not in stayed)
        members = [*stayed, *newcomers][: wished.max_nodes]
        self._generation += 1
        self._tasks = assign(members, WORKERS_ONLY, stayed)
        self._cluster = cluster_of(self._tasks, {node: node for node in self._tasks})
        self._living, self._lost, self._window = set(self._tasks), [], None
        by_index = sorted(self._tasks, key=lambda node: self._tasks[node])
        self._meetings = Meetings(self._generation, by_index)
        self._given.clear()
        tickets = {node: self._waiting.pop(node).ticket for node in self._tasks}
        self._unaware = {node for node, ticket in tickets.items() if ticket is None}
        if not self._waiting:
            self._wished = None
        asked = ((node, ticket) for node, ticket in tickets.items() if ticket is not None)
        self._answer([(ticket, node, self._spec(node)) for node, ticket in asked], now)

    def _spec(self, node: str) -> tf.ClusterSpec:
        return tf.ClusterSpec(self._generation, self._cluster, self._tasks[node])

    def _count(self) -> int:
        """Return how many members were lost (below 0), or how many nodes could join."""
        if self._lost or self._wished is None:
            return -len(self._lost)
        back = sum(1 for node in self._waiting if node in self._tasks)
        room = max(0, self._wished.max_nodes - len(self._living) - back)
        return back + min(len(self._waiting) - back, room)

    # ---- time ----------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        """Do everything that is due by now."""
        self._answer(self._meetings.expire(now), now)
        for node in [node for node, until in self._leases.items() if until <= now]:
            del self._leases[node]
            self._owners.pop(node, None)
            self._waiting.pop(node, None)
            self._given.pop(node, None)
            if node in self._living:
                self._living.discard(node)
                self._unaware.discard(node)
                self._lost.append(node)
                gone = self._meetings.gone(node, f"was not heard of for {self.lease:g} s")
                self._answer(gone, now)
        self._form(now)
        for node, call in self._waiting.items():
            if call.ticket is not None and call.until <= now:
                self._out.append(Reply(call.ticket, self._not_yet()))
                call.ticket = None
                self._leases[node] = now + self.lease

    def _not_yet(self) -> Rejection:
        least = self._wished.min_nodes if self._wished is not None else 1
        problem = f"{counted(len(self._waiting), 'node waits', 'nodes wait')}, {least} needed"
        if self._living:
            problem = f"{len(self._living)} members train in generation {self._generation}"
        hint = f"ask again: the place is kept for {self.lease:g} s"
        return Rejection("timed_out", f"no cluster yet: {problem}", hint)

    def _answer(self, answers: Iterable[Answer], now: float) -> None:
        """Send answers; renew the lease of each node that gets one, unless it still waits."""
        for ticket, node, reply in answers:
            self._out.append(Reply(ticket, reply))
            if (name := self._names.pop(ticket, "")) and node in self._leases:
                self._given[node] = _Given.of(name, reply)
            call = self._waiting.get(node)
            if node in self._leases and (call is None or call.ticket is None):
                self._leases[node] = now + self.lease


def _pack(event: tf.TfRequest) -> Requests:
    row = event.ticket, "", type(event.request).__name__, event.request
    return Requests((row,), (event.owner,))


def _unpack(found: Requests) -> tf.TfRequest:
    ((ticket, _, _, request, owner),) = found.rows()
    return tf.TfRequest(ticket, request, owner)


MACHINES = (
    Declaration(
        name="tf",
        kind=TfCluster,
        new=TfCluster,
        shown_as="tf",
        events=TfEvent,
        decisions=Reply,
        packing=Packing(tf.TfRequest, get_args(tf.Request), _pack, _unpack),
    ),
)
