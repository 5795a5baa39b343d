"""The driver's data shards: HTTP routes around the pure ledgers of `policies.shards.ledger`.

| route | answer |
|---|---|
| `POST /v1/shards/{dataset}:next` | `Granted`, `Wait` or `End` for a `NextRequest` |
| `POST /v1/shards/{dataset}:done` | `Accepted` or `Refused` for a `DoneRequest` |
| `POST /v1/shards/{dataset}:resume` | `Resumed` for a `ResumeRequest` |
| `POST /v1/shards/{dataset}:extend` | 204; an `ExtendRequest` says how far a partition goes |
| `GET /v1/shards/{dataset}` | `ShardStatus`: where the shards are |
| `GET`, `PUT /v1/shards/{dataset}/checkpoint` | a `ShardCheckpoint` |

The first request that describes a data set opens it; a later one that describes it otherwise
is refused. Ledgers belong to the server's loop and nobody else: what the driver's
mailbox thread learns of workers is handed over to it. A worker the driver hears keeps its shards
however long it trains one; anyone else (a tool) must speak once in `LEASE_S`. Times are seconds.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from elastic_driver import contract
from elastic_driver.core.events import (
    AgentLost,
    Event,
    WorkerExited,
    WorkerLost,
    WorkerStarted,
)
from elastic_driver.errors import UsageError
from elastic_driver.policies.shards.ledger import open_ledger
from elastic_driver.policies.shards.messages import (
    WORLD,
    Answer,
    Description,
    DoneRequest,
    ExtendRequest,
    NextRequest,
    Quarantined,
    Resumed,
    ResumeRequest,
    ShardCheckpoint,
    ShardCounts,
    Wait,
)
from rendezvous.web import Problem, json_answer, read_json

__all__ = ["LEASE_S", "ShardRoutes", "ShardStatus"]

LEASE_S = 60.0
MAX_DATASETS = 256
MAX_HELD = 1024  # shards of one worker; more is a loop that forgets to report
MAX_GONE = 65536  # names of workers that must not be given anything any more
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PATH = "/v1/shards/{dataset:[^/:]+}"
T = TypeVar("T")


class ShardStatus(Struct, frozen=True):
    """What people see of a data set."""

    dataset: Description
    counts: ShardCounts
    quarantined: tuple[Quarantined, ...]


def _decoder(kind: type[T]) -> Callable[[bytes], T]:
    return msgspec.json.Decoder(kind).decode


_decode_next, _decode_done = _decoder(NextRequest), _decoder(DoneRequest)
_decode_resume, _decode_extend = _decoder(ResumeRequest), _decoder(ExtendRequest)
_decode_checkpoint = _decoder(ShardCheckpoint)


class _DataSet:
    """One data set: what it is, its ledger, and who waits for a change."""

    def __init__(self, dataset: Description) -> None:
        self.description = dataset
        self.ledger, self.stream = open_ledger(dataset, lease=LEASE_S, max_held=MAX_HELD)
        self.news = asyncio.Event()

    def changed(self) -> None:
        """Wake those who wait, if they may have something to hear."""
        counts = self.ledger.counts()
        if counts.returned or not counts.doing or self.stream is not None:
            self.news.set()
            self.news = asyncio.Event()


class ShardRoutes:
    """Handlers of the routes above, and the ears of the driver's mailbox thread.

    `on_quarantined(dataset, entry)` is called on the server's loop and must not block.
    """

    def __init__(self, on_quarantined: Callable[[str, Quarantined], None]) -> None:
        self._on_quarantined = on_quarantined
        self._datasets: dict[str, _DataSet] = {}
        self._heard: set[str] = set()  # workers whose heartbeat the driver hears
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        app.router.add_post(f"{_PATH}:next", self.next)
        app.router.add_post(f"{_PATH}:done", self.done)
        app.router.add_post(f"{_PATH}:resume", self.resume)
        app.router.add_post(f"{_PATH}:extend", self.extend)
        app.router.add_get(_PATH, self.get_status, allow_head=False)
        app.router.add_get(f"{_PATH}/checkpoint", self.get_checkpoint, allow_head=False)
        app.router.add_put(f"{_PATH}/checkpoint", self.put_checkpoint)
        app.on_startup.append(self._begin)
        app.on_shutdown.append(self._end)

    async def _begin(self, _app: web.Application) -> None:
        self._loop = asyncio.get_running_loop()

    async def _end(self, _app: web.Application) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- what the driver learns, on its own thread ---------------------------------------

    def heard(self, event: Event, *, planned: bool) -> None:
        """Something happened to a worker or a host; `planned`: a worker ended as it was told to."""
        match event:
            case WorkerStarted(worker=worker):
                self._hand_over(self._heard.add, worker)
            case WorkerExited(worker=worker):
                blameless = planned or event.exit_code == 0 or event.victim
                reason = None if blameless else f"exit code {event.exit_code}"
                self._hand_over(self._worker_gone, worker, reason)
            case WorkerLost(worker=worker, reason=reason):
                self._hand_over(self._worker_gone, worker, reason)
            case AgentLost(host=host, reason=reason):
                self._hand_over(self._host_gone, host, reason)
            case _:
                pass

    def _hand_over(self, function: Callable[..., None], *facts: object) -> None:
        loop = self._loop
        if loop is None:
            return  # the server has not begun: nobody holds anything
        try:
            loop.call_soon_threadsafe(function, *facts)
        except RuntimeError:
            if not loop.is_closed():
                raise

    def _worker_gone(self, worker: str, reason: str | None) -> None:
        """A worker is gone: lost for this reason, or (None) as planned."""
        self._heard.discard(worker)
        self._gone[worker] = None
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        for name, data in self._datasets.items():
            if reason is None:
                data.ledger.worker_left(worker)
            else:
                found = data.ledger.worker_lost(worker, reason)
                # Whose shards all train together goes on without it; it may be the data's fault.
                found += data.ledger.blame(WORLD, f"{worker}: {reason}")
                self._tell(name, found)
            data.changed()

    def _host_gone(self, host: str, reason: str) -> None:
        for worker in [w for w in self._heard if contract.host_of_worker(w) == host]:
            self._worker_gone(worker, reason)

    # ---- what workers ask ----------------------------------------------------------------

    async def next(self, request: web.Request) -> web.Response:
        """A shard, at once or after a wait."""
        asked = await read_json(request, _decode_next)
        name, data = self._open(request, asked.dataset)
        loop = asyncio.get_running_loop()
        until = loop.time() + asked.wait
        while True:
            news = data.news
            answer = self._ask(data, asked.worker, loop.time())
            if not isinstance(answer, Wait) or loop.time() >= until:
                break
            try:
                await asyncio.wait_for(news.wait(), until - loop.time())
            except asyncio.TimeoutError:
                continue  # one last look, at the very end of the wait
            data = self._datasets.get(name, data)
        self._arm()
        return json_answer(answer)

    def _ask(self, data: _DataSet, worker: str, now: float) -> Answer:
        if worker in self._gone:
            # It was killed while this request waited: what it got, nobody would ever train.
            raise Problem(409, "worker_gone", f"{worker} is gone", "only its successor may ask")
        return data.ledger.next(worker, now)

    async def done(self, request: web.Request) -> web.Response:
        """A shard was trained."""
        told = await read_json(request, _decode_done)
        data = self._known(request)
        verdict = data.ledger.done(
            told.worker, told.shard, told.token, asyncio.get_running_loop().time()
        )
        data.changed()
        return json_answer(verdict)

    async def resume(self, request: web.Request) -> web.Response:
        """Which shards a holder has no more."""
        asked = await read_json(request, _decode_resume)
        _, data = self._open(request, asked.dataset)
        now = asyncio.get_running_loop().time()
        lost = data.ledger.resume(asked.worker, asked.held, now)
        data.changed()
        return json_answer(Resumed(tuple(lost)))

    async def extend(self, request: web.Request) -> web.Response:
        """A stream has more records, or a partition's last one is known."""
        told = await read_json(request, _decode_extend)
        data = self._known(request)
        if data.stream is None:
            raise Problem(409, "no_stream", "this data set has a length and does not grow")
        try:
            data.stream.extend(told.partition, told.end)
            if told.closed:
                data.stream.close(told.partition)
        except UsageError as error:
            raise Problem(422, "unknown_partition", str(error)) from error
        data.changed()
        return web.Response(status=204)

    # ---- what people and checkpoints ask -------------------------------------------------

    async def get_status(self, request: web.Request) -> web.Response:
        """Where the shards are."""
        data = self._known(request)
        entries = tuple(data.ledger.quarantined())
        return json_answer(ShardStatus(data.description, data.ledger.counts(), entries))

    async def get_checkpoint(self, request: web.Request) -> web.Response:
        """The progress, to be kept beside a model's checkpoint."""
        data = self._known(request)
        return json_answer(ShardCheckpoint(data.description, data.ledger.checkpoint()))

    async def put_checkpoint(self, request: web.Request) -> web.Response:
        """Go back to a checkpoint; whoever holds shards loses them."""
        found = await read_json(request, _decode_checkpoint)
        _, data = self._open(request, found.dataset)
        try:
            data.ledger.restore(found.state)
        except UsageError as error:
            raise Problem(422, "other_source", str(error)) from error
        data.changed()
        return web.Response(status=204)

    # ---- inside --------------------------------------------------------------------------

    def _open(self, request: web.Request, dataset: Description) -> tuple[str, _DataSet]:
        """The data set of this name, opened if it is new."""
        name = request.match_info["dataset"]
        data = self._datasets.get(name)
        if data is None:
            data = self._datasets[name] = self._new(name, dataset)
        elif data.description != dataset:
            raise Problem(
                409,
                "other_dataset",
                f"the data set {name!r} was opened as {data.description}, not as {dataset}",
                "describe it alike on every worker, or give one of them another name",
            )
        return name, data

    def _new(self, name: str, dataset: Description) -> _DataSet:
        if _NAME.fullmatch(name) is None:
            raise Problem(
                422, "bad_name", f"{name[:40]!r} is no name", "use letters, digits, '.', '_', '-'"
            )
        if len(self._datasets) >= MAX_DATASETS:
            raise Problem(409, "too_many", f"there are {MAX_DATASETS} data sets already")
        try:
            return _DataSet(dataset)
        except UsageError as error:
            raise Problem(422, "bad_dataset", str(error)) from error

    def _known(self, request: web.Request) -> _DataSet:
        name = request.match_info["dataset"]
        if name not in self._datasets:
            raise Problem(
                404,
                "unknown_dataset",
                f"no data set {name[:128]!r}",
                "it opens with its first :next",
            )
        return self._datasets[name]

    def _tell(self, name: str, found: list[Quarantined]) -> None:
        for entry in found:
            self._on_quarantined(name, entry)

    def _arm(self) -> None:
        """See to it that leases end when they are over."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(LEASE_S / 4, self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Renew what is held by those the driver hears; take back what others let lie."""
        self._timer = None
        for name, data in self._datasets.items():
            for worker in data.ledger.workers():
                if worker in self._heard or worker == WORLD:
                    data.ledger.renew(worker, loop.time())
            found = data.ledger.expire(loop.time())
            self._tell(name, found)
            data.changed()
        if any(data.ledger.workers() for data in self._datasets.values()):
            self._arm()
