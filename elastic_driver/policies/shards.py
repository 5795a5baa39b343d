"""All data sets of a job, each with its ledger (a `Machine`).

The first request that describes a data set opens it; a later one that describes it otherwise is
rejected. A worker of the job keeps its shards as long as it lives; any other client must send a
request within each `LEASE_S`. Pure. Times are monotonic seconds.
"""

import re
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from elastic_driver import contract
from elastic_driver.core.decisions import Announce
from elastic_driver.core.events import AgentLost, LeaseExpired, Tick, WorkerExited, WorkerStarted
from elastic_driver.errors import UsageError
from elastic_driver.policies.messages import Rejection, Reply, RequestDropped
from elastic_driver.policies.shard_ledger import ShardLedger, open_ledger
from elastic_driver.policies.shard_messages import (
    WORLD,
    Description,
    DoneRequest,
    ExtendRequest,
    NextRequest,
    Quarantined,
    ReadCheckpoint,
    ReadStatus,
    Resumed,
    ResumeRequest,
    ShardBatch,
    ShardCheckpoint,
    ShardRequest,
    ShardStatus,
    StopOrdered,
    Wait,
)
from elastic_driver.policies.shard_sources import StreamSource

LEASE_S = 60.0
MAX_DATASETS = 256
MAX_HELD = 1024  # shards of one worker; more is a loop that forgets to report
MAX_GONE = 65536  # names of workers that must not be given anything any more
_DESCRIBES = (NextRequest, ResumeRequest, ShardCheckpoint)  # requests that open a data set
_READS = (ReadStatus, ReadCheckpoint)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")

ShardEvent = (
    ShardRequest | ShardBatch | RequestDropped | WorkerStarted | StopOrdered | WorkerExited
) | (LeaseExpired | AgentLost | Tick)
ShardDecision = Reply | Announce


@dataclass(slots=True)
class _Waiting:
    """A request for a shard that waits until there is one."""

    worker: str
    until: float


@dataclass(slots=True)
class _DataSet:
    """A data set: its description, ledger, source if that can grow, and waiting requests."""

    name: str
    description: Description
    ledger: ShardLedger
    stream: StreamSource | None
    waiting: dict[int, _Waiting] = field(default_factory=dict)  # by ticket


class DataSets:
    """Hands out the shards of all data sets, and keeps account of them."""

    def __init__(self) -> None:
        self._datasets: dict[str, _DataSet] = {}
        self._alive: set[str] = set()  # workers that the job has started
        self._stopping: set[str] = set()  # workers that were ordered to stop
        self._gone: OrderedDict[str, None] = OrderedDict()  # workers that have ended
        self._due: float | None = None  # when leases are looked at
        self._out: list[ShardDecision] = []

    # ---- the door ------------------------------------------------------------------------

    def handle(self, event: ShardEvent, now: float) -> list[ShardDecision]:
        """Take in a request, the end of a worker or a host, or the time."""
        match event:
            case ShardBatch(requests):
                for request in requests:
                    self._take(request, now)
            case ShardRequest():
                self._take(event, now)
            case RequestDropped(ticket=ticket):
                for data in self._datasets.values():
                    data.waiting.pop(ticket, None)
            case WorkerStarted(worker=worker):
                self._alive.add(worker)
            case StopOrdered(worker):
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
            case Tick():
                self._tick(now)
        out, self._out = self._out, []
        return out

    def deadline(self) -> float | None:
        """See `Machine.deadline`."""
        waits = (w.until for data in self._datasets.values() for w in data.waiting.values())
        return min(chain(waits, () if self._due is None else (self._due,)), default=None)

    def check(self) -> list[str]:
        """See `Machine.check`."""
        return [
            f"data set {data.name}: {sentence}"
            for data in self._datasets.values()
            for sentence in data.ledger.check()
        ]

    def snapshot(self) -> bytes:
        """See `Machine.snapshot`."""
        sets = {data.name: _checkpoint(data) for data in self._datasets.values()}
        return msgspec.json.encode(
            (sets, sorted(self._alive), sorted(self._stopping), list(self._gone))
        )

    # ---- requests ------------------------------------------------------------------------

    def _take(self, event: ShardRequest, now: float) -> None:
        data = self._find(event)
        if isinstance(data, Rejection):
            self._out.append(Reply(event.ticket, data))
            return
        if isinstance(event.request, NextRequest):
            wait, worker = event.request.wait, event.request.worker
            if not self._offer(data, event.ticket, worker, now, last=wait <= 0):
                data.waiting[event.ticket] = _Waiting(worker, now + wait)
            if self._due is None:
                self._due = now + LEASE_S / 4
            return
        self._out.append(Reply(event.ticket, self._answer(data, event, now)))
        if not isinstance(event.request, _READS):
            self._changed(data, now)

    def _answer(
        self, data: _DataSet, event: ShardRequest, now: float
    ) -> msgspec.Struct | Rejection | None:
        ledger = data.ledger
        match event.request:
            case DoneRequest(worker, shard, token):
                return ledger.done(worker, shard, token, now)
            case ResumeRequest(worker=worker, held=held):
                return Resumed(tuple(ledger.resume(worker, held, now)))
            case ExtendRequest() as request:
                return _extend(data, request)
            case ReadStatus():
                entries = tuple(ledger.quarantined())
                return ShardStatus(data.description, ledger.counts(), entries)
            case ReadCheckpoint():
                return _checkpoint(data)
            case ShardCheckpoint(state=state):
                try:
                    ledger.restore(state)
                except UsageError as error:
                    return Rejection("other_source", str(error))
                return None
            case NextRequest():
                raise AssertionError("handled before")

    def _offer(self, data: _DataSet, ticket: int, worker: str, now: float, *, last: bool) -> bool:
        """Answer a request for a shard; return False if it has to wait and may (not `last`)."""
        if worker in self._gone:
            # It ended while this request waited, and could never train the shard.
            gone = Rejection("worker_gone", f"{worker} is gone", "only its successor may ask")
            self._out.append(Reply(ticket, gone))
            return True
        answer = data.ledger.next(worker, now)
        if isinstance(answer, Wait) and not last:
            return False
        self._out.append(Reply(ticket, answer))
        return True

    def _changed(self, data: _DataSet, now: float) -> None:
        """Answer the requests that wait, if there may be something for them."""
        if not data.waiting:
            return
        counts = data.ledger.counts()
        if counts.returned or not counts.doing or data.stream is not None:
            for ticket, waits in list(data.waiting.items()):
                if self._offer(data, ticket, waits.worker, now, last=False):
                    del data.waiting[ticket]

    # ---- workers and time ----------------------------------------------------------------

    def _host_lost(self, host: str, reason: str, now: float) -> None:
        for worker in [w for w in self._alive if contract.host_of_worker(w) == host]:
            self._ended(worker, reason, now)

    def _ended(self, worker: str, reason: str | None, now: float) -> None:
        """Take a worker's shards back; `reason`: why it was lost; None: it ended as planned."""
        self._alive.discard(worker)
        self._stopping.discard(worker)
        self._gone[worker] = None
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        for data in self._datasets.values():
            if reason is None:
                data.ledger.worker_left(worker)
            else:
                found = data.ledger.worker_lost(worker, reason)
                # A world whose members train its shards together goes on without this member; yet
                # the data may have killed it.
                found += data.ledger.blame(WORLD, f"{worker}: {reason}")
                self._announce(data, found)
            self._changed(data, now)

    def _tick(self, now: float) -> None:
        for data in self._datasets.values():
            for ticket, waits in list(data.waiting.items()):
                if waits.until <= now:
                    del data.waiting[ticket]
                    self._offer(data, ticket, waits.worker, now, last=True)
        if self._due is not None and self._due <= now:
            self._expire(now)

    def _expire(self, now: float) -> None:
        """Renew the leases of the job's workers; take back the shards of silent strangers."""
        for data in self._datasets.values():
            for worker in data.ledger.workers():
                if worker in self._alive or worker == WORLD:
                    data.ledger.renew(worker, now)
            self._announce(data, data.ledger.expire(now))
            self._changed(data, now)
        held = any(data.ledger.workers() for data in self._datasets.values())
        self._due = now + LEASE_S / 4 if held else None

    def _announce(self, data: _DataSet, found: list[Quarantined]) -> None:
        for entry in found:
            shard = entry.shard.name
            reason = f"data set {data.name}: {shard} is in quarantine: {entry.reason}"
            detail = {"dataset": data.name, "shard": shard}
            self._out.append(Announce("shard_quarantined", reason, detail=dict(detail)))

    # ---- opening -------------------------------------------------------------------------

    def _find(self, event: ShardRequest) -> _DataSet | Rejection:
        """Return the data set of a request, opened if the request may do so."""
        name, request = event.dataset, event.request
        data = self._datasets.get(name)
        if not isinstance(request, _DESCRIBES):
            return data or Rejection(
                "unknown_dataset", f"no data set {name[:128]!r}", "it opens with its first :next"
            )
        if data is None:
            return self._open(name, request.dataset)
        if data.description != request.dataset:
            return Rejection(
                "other_dataset",
                f"the data set {name!r} was opened as {data.description}, not as {request.dataset}",
                "describe it alike on every worker, or give one of them another name",
            )
        return data

    def _open(self, name: str, dataset: Description) -> _DataSet | Rejection:
        if _NAME.fullmatch(name) is None:
            hint = "use letters, digits, '.', '_', '-'"
            return Rejection("bad_name", f"{name[:40]!r} is no name", hint)
        if len(self._datasets) >= MAX_DATASETS:
            return Rejection("too_many", f"there are {MAX_DATASETS} data sets already")
        try:
            ledger, stream = open_ledger(dataset, lease=LEASE_S, max_held=MAX_HELD)
        except UsageError as error:
            return Rejection("bad_dataset", str(error))
        data = self._datasets[name] = _DataSet(name, dataset, ledger, stream)
        return data


def _extend(data: _DataSet, request: ExtendRequest) -> Rejection | None:
    if data.stream is None:
        return Rejection("no_stream", "this data set has a length and does not grow")
    try:
        data.stream.extend(request.partition, request.end)
        if request.closed:
            data.stream.close(request.partition)
    except UsageError as error:
        return Rejection("unknown_partition", str(error))
    return None


def _checkpoint(data: _DataSet) -> ShardCheckpoint:
    return ShardCheckpoint(data.description, data.ledger.checkpoint())
