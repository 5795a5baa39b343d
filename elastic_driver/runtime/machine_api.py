"""The HTTP routes of data shards and of TensorFlow's cluster: a machine answers each request.

| route | answer |
|---|---|
| `POST /v1/shards/{dataset}:next` | `Granted`, `Wait` or `End` for a `NextRequest` |
| `POST /v1/shards/{dataset}:done` | `ShardAccepted` or `ShardRefused` for a `DoneRequest` |
| `POST /v1/shards/{dataset}:resume` | `Resumed` for a `ResumeRequest` |
| `POST /v1/shards/{dataset}:agree` | `Agreed` for an `AgreeRequest` |
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
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from elastic_driver import contract
from elastic_driver.features.shards import messages as shards
from elastic_driver.features.tensorflow import messages as tf
from elastic_driver.kernel.machine import Reply
from elastic_driver.kernel.services import Rejection, RequestDropped
from elastic_driver.round_members import RoundMembers
from rendezvous.auth import Caller, Role
from rendezvous.web import JSON, Problem, caller_of, forbidden, problem_body, read_json
from rendezvous.wire import UNREADABLE

Asking = shards.ShardRequest | tf.TfRequest
RequestEvent = Asking | RequestDropped
SHARDS_PATH = "/v1/shards/"
_SHARDS = SHARDS_PATH + "{dataset:[^/:]+}"
ROUTES: tuple[tuple[str, str, type[Struct]], ...] = (
    ("POST", f"{_SHARDS}:next", shards.NextRequest),
    ("POST", f"{_SHARDS}:done", shards.DoneRequest),
    ("POST", f"{_SHARDS}:resume", shards.ResumeRequest),
    ("POST", f"{_SHARDS}:agree", shards.AgreeRequest),
    ("POST", f"{_SHARDS}:extend", shards.ExtendRequest),
    ("GET", _SHARDS, shards.ReadStatus),
    ("GET", f"{_SHARDS}/checkpoint", shards.ReadCheckpoint),
    ("PUT", f"{_SHARDS}/checkpoint", shards.ShardCheckpoint),
    ("POST", contract.TF_CLUSTER_SPEC_PATH, tf.ClusterSpecRequest),
    ("GET", contract.TF_WAITING_NODES_PATH, tf.LookRequest),
    ("POST", contract.TF_BARRIER_PATH, tf.BarrierRequest),
    ("POST", contract.TF_SYNCHRONIZE_PATH, tf.SynchronizeRequest),
)
_UNPROCESSABLE = ("bad_bounds", "bad_dataset", "bad_name", "other_source", "unknown_partition")
_STATUS = {"unknown_dataset": 404, "timed_out": 408, "too_large": 413}
_STATUS |= dict.fromkeys(_UNPROCESSABLE, 422)  # 409 for all other rejections
_OF_WORKERS = (
    *(shards.NextRequest, shards.DoneRequest),
    *(shards.ResumeRequest, shards.AgreeRequest, shards.ExtendRequest),
)
_encode = msgspec.json.Encoder().encode
_DECODE_FAST: dict[str, Callable[[bytes], shards.NextRequest | shards.DoneRequest]] = {
    "next": msgspec.json.Decoder(shards.NextRequest).decode,
    "done": msgspec.json.Decoder(shards.DoneRequest).decode,
}


# An encoded answer; None: one without content.
Answer = bytes | Problem | None


class OpenRequests:
    """Requests that wait for a machine's answer, by their ticket.

    `post` puts an event into the driver's mailbox; it returns False if the driver does not take it.
    `rounds` knows the members of the job's world.
    """

    def __init__(self, post: Callable[[RequestEvent], bool], rounds: RoundMembers) -> None:
        self._post, self._rounds = post, rounds
        self._tickets = count(1)
        self._open: dict[int, Callable[[Answer], None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(
        self, make: Callable[[int], Asking], done: Callable[[Answer], None]
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

    def _drop(self, event: Asking) -> None:
        if self._open.pop(event.ticket, None) is not None:
            self._post(RequestDropped(event.machine, event.ticket))

    async def ask(self, make: Callable[[int], Asking]) -> bytes | None:
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
        self, caller: Caller, path: str, body: bytes, answer: Callable[[int, bytes], None]
    ) -> Callable[[], None] | None:
        """Take a request for a shard, or a report, from the server's fast path."""
        name, _, action = path.removeprefix(SHARDS_PATH).partition(":")
        decode = _DECODE_FAST.get(action)
        if decode is None or not name or "%" in name:
            return None
        try:
            request = decode(body)
        except UNREADABLE:
            return None
        if not self.may_ask(caller, request):
            return None

        def done(found: Answer) -> None:
            if isinstance(found, Problem):
                answer(found.status, problem_body(found))
            else:
                answer(200, found or b"")

        owner = _slot_of(caller)
        return self.begin(lambda ticket: shards.ShardRequest(ticket, name, request, owner), done)

    def may_ask(self, caller: Caller, request: Struct) -> bool:
        """Return whether a caller may send this: a worker asks and reports in its own name.

        A member of the newest world may also do so for the world. It alone may say what the model
        of the world was trained with, or how far a stream goes.
        """
        if caller.role is not Role.WORKER or not isinstance(request, _OF_WORKERS):
            return True
        if isinstance(request, shards.ExtendRequest):
            return self._rounds.may_speak_for_world(caller.subject)
        if request.worker == shards.WORLD:
            return self._rounds.may_speak_for_world(caller.subject)
        if isinstance(request, shards.AgreeRequest):
            return False
        opens = isinstance(request, shards.ResumeRequest) and not request.held
        return request.worker == caller.subject or (opens and request.worker == shards.OPENING)

    def answer(self, replies: Iterable[Reply]) -> None:
        """Answer waiting requests; called in the driver's thread."""
        encoded: dict[int, bytes] = {}  # an answer that many wait for is encoded once
        answers: list[tuple[int, Answer]] = []
        for reply in replies:
            document = reply.document
            if isinstance(document, Rejection):
                status = _STATUS.get(document.code, 409)
                problem = Problem(status, document.code, document.message, document.hint)
                answers.append((reply.ticket, problem))
                continue
            if document is not None and id(document) not in encoded:
                encoded[id(document)] = _encode(document)
            answers.append((reply.ticket, encoded.get(id(document))))
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


def add_machine_routes(app: web.Application, requests: OpenRequests) -> None:
    """Mount the routes."""
    for method, path, kind in ROUTES:
        app.router.add_route(method, path, _handler(requests, kind))
    app.on_shutdown.append(requests.close)


def _handler(
    requests: OpenRequests, kind: type[Struct]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    decode_body = msgspec.json.Decoder(kind).decode

    async def handler(request: web.Request) -> web.Response:
        def decode(body: bytes) -> Struct:
            if request.method == "GET":
                return msgspec.convert(dict(request.query), kind)
            return decode_body(body)

        asked: Any = await read_json(request, decode)
        caller = caller_of(request)
        if not requests.may_ask(caller, asked):
            whom = getattr(asked, "worker", shards.WORLD)
            said = f"worker {caller.subject} may not speak for {whom!r} here"
            raise forbidden(f"{said}: it holds shards in its own name, or as a member of the world")
        if isinstance(asked, shards.ShardCheckpoint) and caller.role is Role.WORKER:
            asked = shards.RestoreRequest(caller.subject, asked)
        dataset, owner = request.match_info.get("dataset"), _slot_of(caller)
        if dataset is None:
            found = await requests.ask(lambda ticket: tf.TfRequest(ticket, asked, owner))
        else:
            found = await requests.ask(
                lambda ticket: shards.ShardRequest(ticket, dataset, asked, owner)
            )
        status = 204 if found is None else 200
        return web.Response(body=found, status=status, content_type=JSON)

    return handler


def _slot_of(caller: Caller) -> str:
    """Return the slot of a worker, whose share its successors have too; "" for any other caller."""
    return caller.subject.rpartition(".")[0] if caller.role is Role.WORKER else ""


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    """Call a function in the loop's thread; do nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
