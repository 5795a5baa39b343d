"""All data sets of a job, each with its ledger (a `Machine`).

The first request that describes a data set opens it; a later one that describes it differently
is rejected. A worker of the job keeps its shards as long as it lives; any other client must send a
request within each `LEASE_S`. Pure. Times are monotonic seconds.
"""

import heapq
import re
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, get_args

import msgspec

from elastic_driver import contract
from elastic_driver.errors import UsageError
from elastic_driver.features.shards import messages as m
from elastic_driver.features.shards.shard_ledger import ShardLedger
from elastic_driver.features.shards.sources import RangeSource
from elastic_driver.job.decisions import Announce, GiveOrder
from elastic_driver.job.events import AgentLost, DriverResumed, LeaseExpired, Tick
from elastic_driver.kernel.machine import Declaration, Packing, Reply, Requests
from elastic_driver.kernel.services import Rejection, RequestDropped
from elastic_driver.kernel.tables import Snapshots, Tables, make, saved, table
from elastic_driver.words import log_events as log
from elastic_driver.words.orders import StopWorkerOrder
from elastic_driver.words.wire_events import WorkerExited, WorkerStarted

LEASE_S = 60.0
MAX_DATASETS = 1024
MAX_BYTES = 32 * 1024 * 1024  # of all descriptions and restored checkpoints together, as JSON
SHARE = (
    4  # one worker, with its successors, opens a quarter of both, and leaves an eighth to people
)
RESERVE = 8
MAX_HELD = 1024  # shards of one worker; a loop that holds more forgets to report them
TERM_BITS = 32  # of a token are its number among those of one driver; the term is before them
MAX_GONE = 65536  # names of ended workers, which get no shard any more
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")

ShardEvent = (
    m.ShardRequest | m.ShardBatch | RequestDropped | WorkerStarted | m.StopOrdered | WorkerExited
) | (LeaseExpired | AgentLost | DriverResumed | Tick)


class _Waiting(NamedTuple):
    """A request for a shard that waits until there is one."""

    dataset: str
    worker: str
    until: float
    request: str = ""  # see `RepeatableRequest`


@dataclass
class DataSets(Snapshots):
    """Hands out the shards of all data sets, and records which are done."""

    _ledgers: dict[str, ShardLedger] = field(default_factory=dict)  # by the data set's name
    # Bytes of each, see `MAX_BYTES`, and the slot of the worker that has sent them.
    _sizes: dict[str, tuple[int, str]] = saved(factory=dict, name="sizes")
    _waiting: dict[int, _Waiting] = saved(factory=dict, name="waiting")  # by ticket
    # A heap: ends of waits, and their tickets.
    _ends: list[tuple[float, int]] = saved(factory=list, name="ends")
    _alive: set[str] = saved(factory=set, name="alive")  # workers that the job has started
    _stopping: set[str] = saved(factory=set, name="stopping")  # workers that were ordered to stop
    _gone: dict[str, None] = saved(factory=dict, name="gone")  # workers that have ended
    _due: float | None = saved(None, name="due")  # when the leases are checked next
    _out: list[Reply | Announce] = field(default_factory=list)

    def tables(self) -> Tables:
        """See `Snapshots.tables`."""
        ledgers = {name: ledger.tables() for name, ledger in self._ledgers.items()}
        return {"": table(self), "ledgers": ledgers}

    @classmethod
    def from_tables(cls, found: Tables) -> "DataSets":
        """See `Snapshots.from_tables`."""
        sets = make(cls, found[""])
        ledgers = found["ledgers"].items()
        sets._ledgers = {name: ShardLedger.from_tables(tables) for name, tables in ledgers}
        return sets

    # ---- a machine's methods -------------------------------------------------------------

    def handle(self, event: ShardEvent, now: float) -> list[Reply | Announce]:
        """Take in a request, the end of a worker or a host, or the time."""
        match event:
            case m.ShardBatch(requests):
                for request in requests:
                    self._take(request, now)
            case m.ShardRequest():
                self._take(event, now)
            case RequestDropped(ticket=ticket):
                self._waiting.pop(ticket, None)
            case WorkerStarted() | m.StopOrdered() | WorkerExited() | LeaseExpired() | AgentLost():
                self._news(event, now)
            case DriverResumed(term=term):
                self._waiting.clear()  # their connections have ended: who still waits asks again
                for ledger in self._ledgers.values():
                    ledger.begin_tokens(term << TERM_BITS)
            case Tick():
                self._tick(now)
        while self._ends and self._ends[0][1] not in self._waiting:
            heapq.heappop(self._ends)  # it was answered before
        out, self._out = self._out, []
        return out

    def deadline(self) -> float | None:
        """See `Machine.deadline`."""
        ends = [end for end, _ in self._ends[:1]]
        return min([*ends, *([] if self._due is None else [self._due])], default=None)

    def check(self) -> list[str]:
        """See `Machine.check`."""
        ledgers = self._ledgers.items()
        return [f"data set {name}: {said}" for name, ledger in ledgers for said in ledger.check()]

    # ---- requests ------------------------------------------------------------------------

    def _take(self, event: m.ShardRequest, now: float) -> None:
        ticket, name, request = event.ticket, event.dataset, event.request
        ledger = self._find(name, request, event.owner)
        if isinstance(ledger, Rejection):
            self._out.append(Reply(ticket, ledger))
        elif isinstance(request, m.NextRequest):
            waiting = _Waiting(name, request.worker, now + request.wait, request.request)
            if not self._offer(ticket, waiting, now):
                self._waiting[ticket] = waiting
                heapq.heappush(self._ends, (waiting.until, ticket))
            if self._due is None:
                self._due = now + LEASE_S / 4
        elif isinstance(request, _SAVED) and (full := self._full(name, request, event.owner)):
            self._out.append(Reply(ticket, full))
        else:
            if isinstance(request, m.AgreeRequest):
                self._end_waits_of(name, request.worker)
                self._announce(name, ledger.settle_blame(request.worker, request.held))
            self._out.append(Reply(ticket, self._answer(ledger, request, now)))
            if not isinstance(request, m.ReadStatus | m.ReadCheckpoint):
                self._changed(name, now)

    def _answer(self, ledger: ShardLedger, request: m.Request, now: float) -> (
        m.DoneAnswer | m.Resumed | m.Agreed | m.ShardStatus | m.ShardCheckpoint
    ) | (Rejection | None):
        try:
            match request:
                case m.DoneRequest(worker, shard, token):
                    return ledger.done(worker, shard, token, now)
                case m.ResumeRequest(worker=worker, held=held):
                    return m.Resumed(tuple(ledger.resume(worker, held, now)))
                case m.AgreeRequest():
                    return ledger.agree(request, now)
                case m.ReadStatus():
                    return m.ShardStatus(ledger.dataset, ledger.counts(), ledger.quarantined())
                case m.ReadCheckpoint():
                    return ledger.checkpoint()
                case m.ShardCheckpoint():
                    ledger.restore(request)
                case m.RestoreRequest(worker, saved):
                    if others := sorted(ledger.users - {worker}):
                        problem = f"{others[0]} has got shards of this data set already"
                        return Rejection("in_use", problem, _RESTORE_HINT)
                    ledger.restore(saved)
                case m.ExtendRequest(partition, end, closed):
                    if isinstance(ledger.source, RangeSource):
                        problem = "this data set has a length and does not grow"
                        return Rejection("no_stream", problem)
                    ledger.source.extend(partition, end, closed=closed)
        except UsageError as error:
            restoring = isinstance(request, _SAVED)
            return Rejection("other_source" if restoring else "unknown_partition", str(error))
        return None

    def _offer(self, ticket: int, waiting: _Waiting, now: float) -> bool:
        """Answer a request for a shard; return False, without an answer, if it can still wait."""
        worker = waiting.worker
        if worker in self._gone:
            # The worker ended while this request waited: it could not train the shard.
            gone = Rejection("worker_gone", f"{worker} is gone", "only its successor may ask")
            self._out.append(Reply(ticket, gone))
            return True
        answer = self._ledgers[waiting.dataset].next(worker, now, waiting.request)
        if isinstance(answer, m.Wait) and now < waiting.until:
            return False
        self._out.append(Reply(ticket, answer))
        return True

    def _changed(self, name: str, now: float) -> None:
        """Answer the waiting requests for this data set that can be answered now."""
        ledger = self._ledgers[name]
        if not self._waiting or not ledger.may_have_news():
            return
        for ticket, waiting in list(self._waiting.items()):
            if waiting.dataset == name and self._offer(ticket, waiting, now):
                del self._waiting[ticket]

    def _end_waits_of(self, name: str, worker: str) -> None:
        """End the waits of a world that agrees anew: nobody would train what they would get."""
        old = [t for t, w in self._waiting.items() if (w.dataset, w.worker) == (name, worker)]
        for ticket in old:
            del self._waiting[ticket]
            self._out.append(Reply(ticket, m.Wait(f"{worker} has agreed anew on what it holds")))

    # ---- workers and time ----------------------------------------------------------------

    def _news(
        self,
        event: WorkerStarted | m.StopOrdered | WorkerExited | LeaseExpired | AgentLost,
        now: float,
    ) -> None:
        match event:
            case WorkerStarted(worker=worker):
                self._alive.add(worker)
            case m.StopOrdered(worker):
                self._stopping.add(worker)
            case WorkerExited(worker=worker, exit_code=code):
                planned = worker in self._stopping or code == 0 or event.victim
                self._ended(worker, None if planned else f"exit code {code}", now)
            case LeaseExpired(kind="worker", owner=worker):
                self._ended(worker, event.reason, now)
            case LeaseExpired(kind="agent"):
                self._host_lost(event.agent[0], event.reason, now)
            case AgentLost(host=host, reason=reason):
                self._host_lost(host, reason, now)

    def _host_lost(self, host: str, reason: str, now: float) -> None:
        for worker in [w for w in self._alive if contract.host_of_worker(w) == host]:
            self._ended(worker, reason, now)

    def _ended(self, worker: str, reason: str | None, now: float) -> None:
        """Take a worker's shards back; `reason` of its loss, or None if its end was planned."""
        self._alive.discard(worker)
        self._stopping.discard(worker)
        self._gone[worker] = None
        if not self._alive:  # nor is the world
            for ledger in self._ledgers.values():
                ledger.users.clear()
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        for name, ledger in self._ledgers.items():
            if reason is None:
                ledger.worker_left(worker)
            else:
                found = ledger.worker_lost(worker, reason)
                # A world that trains its shards together goes on without this member, but the data
                # may have killed the member.
                found += ledger.blame(m.WORLD, f"{worker}: {reason}")
                self._announce(name, found)
            self._changed(name, now)

    def _tick(self, now: float) -> None:
        for ticket in [ticket for ticket, w in self._waiting.items() if w.until <= now]:
            self._offer(ticket, self._waiting.pop(ticket), now)
        if self._due is None or now < self._due:
            return
        for name, ledger in self._ledgers.items():
            for worker in ledger.workers():  # the job renews the leases of its own workers
                if worker in self._alive or worker == m.WORLD:
                    ledger.renew(worker, now)
            self._announce(name, ledger.expire(now))
            self._changed(name, now)
        held = any(ledger.workers() for ledger in self._ledgers.values())
        self._due = now + LEASE_S / 4 if held else None

    def _announce(self, name: str, found: list[m.Quarantined]) -> None:
        for entry in found:
            shard = entry.shard.name
            reason = f"data set {name}: {shard} is in quarantine: {entry.reason}"
            self._out.append(Announce(log.ShardQuarantined(dataset=name, shard=shard), reason))

    # ---- opening -------------------------------------------------------------------------

    def _find(self, name: str, request: m.Request, owner: str) -> ShardLedger | Rejection:
        """Return the ledger of a request's data set, opened if the request describes it."""
        ledger = self._ledgers.get(name)
        if not isinstance(request, _DESCRIBING):
            problem = f"no data set {name[:128]!r}"
            return ledger or Rejection("unknown_dataset", problem, "it opens with its first :next")
        if ledger is None:
            return self._open(name, request.dataset, owner)
        if ledger.dataset != request.dataset:
            opened = f"was opened as {ledger.dataset}, not as {request.dataset}"
            hint = "describe it alike on every worker, or give one of them another name"
            return Rejection("other_dataset", f"the data set {name!r} {opened}", hint)
        return ledger

    def _open(self, name: str, dataset: m.Description, owner: str) -> ShardLedger | Rejection:
        if _NAME.fullmatch(name) is None:
            hint = "use letters, digits, '.', '_', '-'"
            return Rejection("bad_name", f"{name[:40]!r} is no name", hint)
        own = sum(each == owner for _, each in self._sizes.values())
        if len(self._ledgers) >= _open_to(owner, MAX_DATASETS):
            return Rejection("too_many", f"there are {len(self._ledgers)} data sets already")
        if owner and own >= MAX_DATASETS // SHARE:
            return Rejection("too_many", f"the workers of slot {owner} have opened {own} data sets")
        try:
            ledger = ShardLedger(dataset, lease=LEASE_S, max_held=MAX_HELD)
        except UsageError as error:
            return Rejection("bad_dataset", str(error))
        if full := self._full(name, dataset, owner):
            return full
        self._ledgers[name] = ledger
        return ledger

    def _full(self, name: str, document: "m.Description | _Saved", owner: str) -> Rejection | None:
        """Return why there is no room for a description or a state; None: it is taken."""
        size = len(msgspec.json.encode(document))
        others = [each for known, each in self._sizes.items() if known != name]
        most, own = _open_to(owner, MAX_BYTES), sum(s for s, each in others if each == owner)
        if sum(s for s, _ in others) + size > most:
            return _too_large("the data sets take", most)
        if owner and own + size > MAX_BYTES // SHARE:
            return _too_large(f"the data sets of slot {owner} take", MAX_BYTES // SHARE)
        self._sizes[name] = size, owner
        return None


def _open_to(owner: str, room: int) -> int:
    return room - room // RESERVE if owner else room


def _too_large(what: str, most: int) -> Rejection:
    problem = f"{what} more than {most >> 20} MiB as JSON"
    hint = "use larger shards, or fewer partitions and data sets"
    return Rejection("too_large", problem, hint)


_Saved: TypeAlias = m.ShardCheckpoint | m.RestoreRequest | m.AgreeRequest
_SAVED = get_args(_Saved)
_DESCRIBING = (m.NextRequest, m.ResumeRequest, *_SAVED)
_RESTORE_HINT = "restore before the first shard is asked for, or with an operator's token"


def _pack(event: m.ShardBatch) -> Requests:
    asked = event.requests
    rows = ((r.ticket, r.dataset, type(r.request).__name__, r.request) for r in asked)
    return Requests(tuple(rows), tuple(r.owner for r in asked))


def _unpack(found: Requests) -> m.ShardBatch:
    rows = found.rows()
    return m.ShardBatch(
        tuple(m.ShardRequest(ticket, name, body, owner) for ticket, name, _, body, owner in rows)
    )


def _stop_ordered(decision: GiveOrder) -> m.StopOrdered | None:
    order = decision.order
    return m.StopOrdered(order.worker) if isinstance(order, StopWorkerOrder) else None


MACHINES = (
    Declaration(
        name="shards",
        kind=DataSets,
        new=lambda _lease: DataSets(),
        events=ShardEvent,
        decisions=Reply | Announce,
        hears={"job": (WorkerStarted, WorkerExited, LeaseExpired, AgentLost)},
        follows={GiveOrder: _stop_ordered},
        together=(m.ShardRequest,),
        batch=lambda requests: m.ShardBatch(tuple(requests)),
        packing=Packing(m.ShardBatch, get_args(m.Request), _pack, _unpack),
    ),
)
