"""The HTTP routes of data shards and of TensorFlow's cluster: a machine answers each request.

Handlers run on the server's loop: they decode a request, post it as an event with a ticket, and
wait for the machine's `Reply` (`OpenRequests`). `machine_route` makes the row of such a request.
Messages are in `policies.shard_messages` and `policies.tf_messages`.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from elastic_driver import contract, token_roles
from elastic_driver.kernel.machine import Reply
from elastic_driver.policies import shard_messages as shards
from elastic_driver.policies import tf_messages as tf
from elastic_driver.policies.messages import Rejection, RequestDropped
from elastic_driver.round_members import RoundMembers
from elastic_driver.token_roles import TRAINERS, WATCHERS
from rendezvous.access import Roles
from rendezvous.auth import Caller
from rendezvous.routes import (
    JSON,
    Problem,
    Route,
    caller_of,
    first_line,
    forbidden,
    mount,
    problem_body,
    read_json,
)
from rendezvous.wire import UNREADABLE

Asking = shards.ShardRequest | tf.TfRequest
RequestEvent = Asking | RequestDropped
_UNPROCESSABLE = ("bad_bounds", "bad_dataset", "bad_name", "other_source", "unknown_partition")
_STATUS = {"unknown_dataset": 404, "timed_out": 408, "too_large": 413}
_STATUS |= dict.fromkeys(_UNPROCESSABLE, 422)  # 409 for all other rejections
_encode = msgspec.json.Encoder().encode
# An encoded answer; None: one without content.
Answer = bytes | Problem | None


class OpenRequests:
    """Requests that wait for a machine's answer, by their ticket.

    `post` puts an event into the driver's mailbox; it returns False if the driver does not take it.
    `rounds` knows the members of the job's world.
    """

    def __init__(self, post: Callable[[RequestEvent], bool], rounds: RoundMembers) -> None:
        self._post, self.rounds = post, rounds
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

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        mount(app, ROUTES, self)
        app.on_shutdown.append(self.close)

    async def close(self, _app: web.Application) -> None:
        """Refuse the waiting requests: the server stops."""
        waiting, self._open = self._open, {}
        for done in waiting.values():
            done(Problem(503, "stopping", "the driver is stopping", "ask its successor"))


# Returns what makes the event of a request by its ticket; raises Problem if the caller may not ask.
# Its arguments: where the request will wait, the caller, the request, and the names in the path.
Begin = Callable[[OpenRequests, Caller, Any, Mapping[str, str]], Callable[[int], Asking]]


def machine_route(
    method: str,
    path: str,
    roles: Roles,
    kind: type[Struct],
    answer: Any,
    *,
    begin: Begin,
    short: Callable[..., Callable[[], object] | None] | None = None,
) -> Route:
    """Return the row of a request that a machine answers.

    Args:
        kind: the type of the request: of the body, or of a GET's query.
        answer: that of the machine's answer; None: it has no content.
    """
    decode_body = msgspec.json.Decoder(kind).decode
    is_get = method == "GET"

    def decode(request: web.Request, body: bytes) -> Any:
        return msgspec.convert(dict(request.query), kind) if is_get else decode_body(body)

    async def handler(requests: OpenRequests, request: web.Request) -> web.Response:
        asked = await read_json(request, partial(decode, request))
        event_of = begin(requests, caller_of(request), asked, request.match_info)
        found = await requests.ask(event_of)
        status = 204 if found is None else 200
        return web.Response(body=found, status=status, content_type=JSON)

    return Route(
        method,
        path,
        roles,
        handler,
        answer,
        body=None if is_get else kind,
        query=kind if is_get else None,
        sentence=first_line(kind),
        short=short,
    )


def slot_of(caller: Caller) -> str:
    """Return the slot of a worker, whose share its successors have too; "" for any other caller."""
    return caller.subject.rpartition(".")[0] if caller.role is token_roles.WORKER else ""


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    """Call a function in the loop's thread; do nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


# ---- data shards -------------------------------------------------------------------------

SHARDS_PATH = "/v1/shards/"
_OF_WORKERS = (
    shards.NextRequest,
    shards.DoneRequest,
    shards.ResumeRequest,
    shards.AgreeRequest,
    shards.ExtendRequest,
)
_DECODE_SHORT: dict[str, Callable[[bytes], shards.NextRequest | shards.DoneRequest]] = {
    "next": msgspec.json.Decoder(shards.NextRequest).decode,
    "done": msgspec.json.Decoder(shards.DoneRequest).decode,
}


def _may_ask(rounds: RoundMembers, caller: Caller, request: Struct) -> bool:
    """Return whether a caller may send this: a worker asks and reports in its own name.

    A member of the newest world may also do so for the world. It alone may say what the model
    of the world was trained with, or how far a stream goes.
    """
    if caller.role is not token_roles.WORKER or not isinstance(request, _OF_WORKERS):
        return True
    if isinstance(request, shards.ExtendRequest):
        return rounds.may_speak_for_world(caller.subject)
    if request.worker == shards.WORLD:
        return rounds.may_speak_for_world(caller.subject)
    if isinstance(request, shards.AgreeRequest):
        return False
    opens = isinstance(request, shards.ResumeRequest) and not request.held
    return request.worker == caller.subject or (opens and request.worker == shards.OPENING)


def _take_short(
    requests: OpenRequests,
    caller: Caller,
    path: str,
    body: bytes,
    answer: Callable[[int, bytes], None],
) -> Callable[[], None] | None:
    """Take a request for a shard, or a report, from the server's fast path."""
    name, _, action = path.removeprefix(SHARDS_PATH).partition(":")
    decode = _DECODE_SHORT.get(action)
    if decode is None or not name or "%" in name:
        return None
    try:
        request = decode(body)
    except UNREADABLE:
        return None
    if not _may_ask(requests.rounds, caller, request):
        return None

    def done(found: Answer) -> None:
        if isinstance(found, Problem):
            answer(found.status, problem_body(found))
        else:
            answer(200, found or b"")

    owner = slot_of(caller)
    return requests.begin(lambda ticket: shards.ShardRequest(ticket, name, request, owner), done)


def _of_shards(
    requests: OpenRequests, caller: Caller, asked: Any, names: Mapping[str, str]
) -> Callable[[int], shards.ShardRequest]:
    if not _may_ask(requests.rounds, caller, asked):
        whom = getattr(asked, "worker", shards.WORLD)
        said = f"worker {caller.subject} may not speak for {whom!r} here"
        raise forbidden(f"{said}: it holds shards in its own name, or as a member of the world")
    if isinstance(asked, shards.ShardCheckpoint) and caller.role is token_roles.WORKER:
        asked = shards.RestoreRequest(caller.subject, asked)
    name, owner = names["dataset"], slot_of(caller)
    return lambda ticket: shards.ShardRequest(ticket, name, asked, owner)


def _shards(
    method: str, action: str, kind: type[Struct], answer: Any, roles: Roles = TRAINERS, **more: Any
) -> Route:
    path = f"{SHARDS_PATH}{{dataset:[^/:]+}}{action}"
    return machine_route(method, path, roles, kind, answer, begin=_of_shards, **more)


# ---- TensorFlow --------------------------------------------------------------------------


def _of_tf(
    _requests: OpenRequests, caller: Caller, asked: Any, _names: Mapping[str, str]
) -> Callable[[int], tf.TfRequest]:
    owner = slot_of(caller)
    return lambda ticket: tf.TfRequest(ticket, asked, owner)


def _tf(method: str, path: str, kind: type[Struct], answer: Any) -> Route:
    return machine_route(method, path, TRAINERS, kind, answer, begin=_of_tf)


# ---- rows --------------------------------------------------------------------------------

ROUTES = (
    _shards("POST", ":next", shards.NextRequest, shards.NextAnswer, short=_take_short),
    _shards("POST", ":done", shards.DoneRequest, shards.DoneAnswer, short=_take_short),
    _shards("POST", ":resume", shards.ResumeRequest, shards.Resumed),
    _shards("POST", ":agree", shards.AgreeRequest, shards.Agreed),
    _shards("POST", ":extend", shards.ExtendRequest, None),
    _shards("GET", "", shards.ReadStatus, shards.ShardStatus, WATCHERS),
    _shards("GET", "/checkpoint", shards.ReadCheckpoint, shards.ShardCheckpoint),
    _shards("PUT", "/checkpoint", shards.ShardCheckpoint, None),
    _tf("POST", contract.TF_CLUSTER_SPEC_PATH, tf.ClusterSpecRequest, tf.ClusterSpec),
    _tf("GET", contract.TF_WAITING_NODES_PATH, tf.LookRequest, tf.WaitingNodes),
    _tf("POST", contract.TF_BARRIER_PATH, tf.BarrierRequest, tf.Passed),
    _tf("POST", contract.TF_SYNCHRONIZE_PATH, tf.SynchronizeRequest, tf.Synchronized),
)
