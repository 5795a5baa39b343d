"""The HTTP routes whose requests a machine answers: data shards, and TensorFlow's cluster.

| route | answer |
|---|---|
| `POST /v1/shards/{dataset}:next` | `Granted`, `Wait` or `End` for a `NextRequest` |
| `POST /v1/shards/{dataset}:done` | `ShardAccepted` or `ShardRefused` for a `DoneRequest` |
| `POST /v1/shards/{dataset}:resume` | `Resumed` for a `ResumeRequest` |
| `POST /v1/shards/{dataset}:extend` | 204; an `ExtendRequest` says how far a partition goes |
| `GET /v1/shards/{dataset}` | `ShardStatus` |
| `GET`, `PUT /v1/shards/{dataset}/checkpoint` | a `ShardCheckpoint` |
| `POST /v1/tf/cluster_spec` | `ClusterSpec`, when the next cluster has formed; 408 `timed_out` |
| `GET /v1/tf/waiting_nodes[?address=A]` | `WaitingNodes`; renews the lease of A |
| `POST /v1/tf/barrier` | `Passed`, when every member has come |
| `POST /v1/tf/synchronize` | `Synchronized`: every member's value |

Handlers run on the server's loop: they decode a request, post it as an event with a ticket, and
wait for the machine's `Reply`. Messages are in `policies.shard_messages` and
`policies.tf_messages`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import count
from typing import TypeVar

import msgspec
from aiohttp import web

from elastic_driver import contract
from elastic_driver.policies.messages import Rejection, Reply, RequestDropped
from elastic_driver.policies.shard_messages import (
    DoneRequest,
    ExtendRequest,
    NextRequest,
    ReadCheckpoint,
    ReadStatus,
    ResumeRequest,
    ShardCheckpoint,
    ShardRequest,
)
from elastic_driver.policies.tf_messages import (
    BarrierRequest,
    ClusterSpecRequest,
    LookRequest,
    Passed,
    SynchronizeRequest,
    TfRequest,
)
from rendezvous.web import JSON, Problem, json_answer, problem_body, read_json

RequestEvent = ShardRequest | TfRequest | RequestDropped
T = TypeVar("T")
SHARDS_PATH = "/v1/shards/"
_SHARDS = SHARDS_PATH + "{dataset:[^/:]+}"
_MAX_ADDRESS = 300
_STATUS = {  # of rejections; 409 for all others
    "unknown_dataset": 404,
    "timed_out": 408,
    "too_large": 413,
    "bad_bounds": 422,
    "bad_dataset": 422,
    "bad_name": 422,
    "other_source": 422,
    "unknown_partition": 422,
}
_encode = msgspec.json.Encoder().encode
_DECODE_FAST: dict[str, Callable[[bytes], NextRequest | DoneRequest]] = {
    "next": msgspec.json.Decoder(NextRequest).decode,
    "done": msgspec.json.Decoder(DoneRequest).decode,
}


Answer = bytes | Problem | None
"""An encoded answer; None: one without content."""


class OpenRequests:
    """Requests that wait for a machine's answer, by their ticket.

    `post` puts an event into the driver's mailbox; it returns False if the driver does not take it.
    """

    def __init__(self, post: Callable[[RequestEvent], bool]) -> None:
        self._post = post
        self._tickets = count(1)
        self._open: dict[int, Callable[[Answer], None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(
        self, make: Callable[[int], ShardRequest | TfRequest], done: Callable[[Answer], None]
    ) -> Callable[[], None] | None:
        """Post a request; call `done` with its answer.

        Returns a function to call when the client goes away; None if the driver is too busy.
        """
        self._loop = asyncio.get_running_loop()
        event = make(next(self._tickets))
        self._open[event.ticket] = done
        if self._post(event):
            return partial(self._drop, event)
        del self._open[event.ticket]
        return None

    def _drop(self, event: ShardRequest | TfRequest) -> None:
        if self._open.pop(event.ticket, None) is not None:
            self._post(RequestDropped(event.machine, event.ticket))

    async def ask(self, make: Callable[[int], ShardRequest | TfRequest]) -> bytes | None:
        """Return the encoded answer, None for one without content; raises Problem."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        drop = self.begin(make, lambda body: None if future.done() else future.set_result(body))
        if drop is None:
            raise Problem(503, "not_accepting", "the driver has too much to do", "ask again")
        try:
            answer = await future
        finally:
            drop()
        if isinstance(answer, Problem):
            raise answer
        return answer

    def take_shard_request(
        self, path: str, body: bytes, answer: Callable[[int, bytes], None]
    ) -> Callable[[], None] | None:
        """Take a request for a shard, or a report, from the server's fast path."""
        name, _, action = path.removeprefix(SHARDS_PATH).partition(":")
        decode = _DECODE_FAST.get(action)
        if decode is None or not name or "%" in name:
            return None
        try:
            request = decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

        def done(found: Answer) -> None:
            if isinstance(found, Problem):
                answer(found.status, problem_body(found))
            else:
                answer(200, found or b"")

        return self.begin(lambda ticket: ShardRequest(ticket, name, request), done)

    def answer(self, replies: Iterable[Reply]) -> None:
        """Answer waiting requests; called by any other thread."""
        encoded: dict[int, bytes] = {}  # an answer that many wait for is encoded once
        answers: list[tuple[int, Answer]] = []
        for reply in replies:
            document = reply.document
            if isinstance(document, Rejection):
                status = _STATUS.get(document.code, 409)
                problem = Problem(status, document.code, document.message, document.hint)
                answers.append((reply.ticket, problem))
            elif document is None:
                answers.append((reply.ticket, None))
            else:
                if id(document) not in encoded:
                    encoded[id(document)] = _encode(document)
                answers.append((reply.ticket, encoded[id(document)]))
        if answers and self._loop is not None:
            call_on(self._loop, self._deliver, answers)

    def _deliver(self, answers: list[tuple[int, Answer]]) -> None:
        for ticket, answer in answers:
            done = self._open.pop(ticket, None)
            if done is not None:
                done(answer)

    async def close(self, _app: web.Application) -> None:
        """Refuse the waiting requests: the server stops."""
        waiting, self._open = self._open, {}
        for done in waiting.values():
            done(Problem(503, "stopping", "the driver is stopping", "ask its successor"))


class MachineRoutes:
    """Handlers of the routes above."""

    def __init__(self, requests: OpenRequests) -> None:
        self._requests = requests

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        add = app.router
        add.add_post(f"{_SHARDS}:next", self._shard_route(NextRequest))
        add.add_post(f"{_SHARDS}:done", self._shard_route(DoneRequest))
        add.add_post(f"{_SHARDS}:resume", self._shard_route(ResumeRequest))
        add.add_post(f"{_SHARDS}:extend", self._shard_route(ExtendRequest))
        add.add_put(f"{_SHARDS}/checkpoint", self._shard_route(ShardCheckpoint))
        add.add_get(_SHARDS, self._read_route(ReadStatus()), allow_head=False)
        add.add_get(f"{_SHARDS}/checkpoint", self._read_route(ReadCheckpoint()), allow_head=False)
        add.add_post(contract.TF_CLUSTER_SPEC_PATH, self._tf_route(ClusterSpecRequest))
        add.add_get(contract.TF_WAITING_NODES_PATH, self.waiting_nodes, allow_head=False)
        add.add_post(contract.TF_BARRIER_PATH, self.barrier)
        add.add_post(contract.TF_SYNCHRONIZE_PATH, self._tf_route(SynchronizeRequest))
        app.on_shutdown.append(self._requests.close)

    def _shard_route(
        self,
        kind: type[NextRequest | DoneRequest | ResumeRequest | ExtendRequest | ShardCheckpoint],
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        decode = msgspec.json.Decoder(kind).decode

        async def handler(request: web.Request) -> web.Response:
            asked = await read_json(request, decode)
            name = request.match_info["dataset"]
            return _response(await self._requests.ask(lambda n: ShardRequest(n, name, asked)))

        return handler

    def _read_route(
        self, asked: ReadStatus | ReadCheckpoint
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(request: web.Request) -> web.Response:
            name = request.match_info["dataset"]
            return _response(await self._requests.ask(lambda n: ShardRequest(n, name, asked)))

        return handler

    def _tf_route(
        self, kind: type[ClusterSpecRequest | SynchronizeRequest]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        decode = msgspec.json.Decoder(kind).decode

        async def handler(request: web.Request) -> web.Response:
            asked = await read_json(request, decode)
            return _response(await self._requests.ask(lambda n: TfRequest(n, asked)))

        return handler

    async def barrier(self, request: web.Request) -> web.Response:
        """Answer when every member has come to the barrier."""
        asked = await read_json(request, _decode_barrier)
        body = await self._requests.ask(lambda n: TfRequest(n, asked))
        return json_answer(msgspec.json.decode(body or b"", type=Passed))

    async def waiting_nodes(self, request: web.Request) -> web.Response:
        """Answer whether the cluster should form anew."""
        address = request.query.get("address")
        if address is not None and len(address) > _MAX_ADDRESS:
            raise Problem(422, "invalid", f"an address has at most {_MAX_ADDRESS} characters")
        return _response(await self._requests.ask(lambda n: TfRequest(n, LookRequest(address))))


_decode_barrier = msgspec.json.Decoder(BarrierRequest).decode


def _response(body: bytes | None) -> web.Response:
    if body is None:
        return web.Response(status=204)
    return web.Response(body=body, content_type=JSON)


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    """Call a function in the loop's thread; do nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
