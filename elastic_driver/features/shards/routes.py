"""The routes of data shards: what workers and people ask, and who may ask it."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from elastic_driver import token_roles
from elastic_driver.features.shards import messages as m
from elastic_driver.runtime.machine_api import Answer, OpenRequests, machine_route, slot_of
from elastic_driver.token_roles import TRAINERS, WATCHERS, RoundMembers
from rendezvous.access import Roles
from rendezvous.auth import Caller
from rendezvous.routes import Problem, Route, problem_body
from rendezvous.wire import UNREADABLE

SHARDS_PATH = "/v1/shards/"
_UNPROCESSABLE = ("bad_bounds", "bad_dataset", "bad_name", "other_source", "unknown_partition")
STATUS = {"unknown_dataset": 404, "too_large": 413, **dict.fromkeys(_UNPROCESSABLE, 422)}
_OF_WORKERS = (
    m.NextRequest,
    m.DoneRequest,
    m.ResumeRequest,
    m.AgreeRequest,
    m.ExtendRequest,
)
_DECODE_FAST: dict[str, Callable[[bytes], m.NextRequest | m.DoneRequest]] = {
    "next": msgspec.json.Decoder(m.NextRequest).decode,
    "done": msgspec.json.Decoder(m.DoneRequest).decode,
}


def may_ask(rounds: RoundMembers, caller: Caller, request: Struct) -> bool:
    """Return whether a caller may send this: a worker asks and reports in its own name.

    A member of the newest world may also do so for the world. It alone may say what the model of
    the world was trained with, or how far a stream goes.
    """
    if caller.role is not token_roles.WORKER or not isinstance(request, _OF_WORKERS):
        return True
    if isinstance(request, m.ExtendRequest) or request.worker == m.WORLD:
        return rounds.may_speak_for_world(caller.subject)
    if isinstance(request, m.AgreeRequest):
        return False
    opens = isinstance(request, m.ResumeRequest) and not request.held
    return request.worker == caller.subject or (opens and request.worker == m.OPENING)


def _refuse(rounds: RoundMembers, caller: Caller, request: Struct) -> str | None:
    if may_ask(rounds, caller, request):
        return None
    whom = getattr(request, "worker", m.WORLD)
    said = f"worker {caller.subject} may not speak for {whom!r} here"
    return f"{said}: it holds shards in its own name, or as a member of the world"


def take_short(
    requests: OpenRequests,
    caller: Caller,
    path: str,
    body: bytes,
    answer: Callable[[int, bytes], None],
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
    if not may_ask(requests.rounds, caller, request):
        return None

    def done(found: Answer) -> None:
        if isinstance(found, Problem):
            answer(found.status, problem_body(found))
        else:
            answer(200, found or b"")

    owner = slot_of(caller)
    return requests.begin(lambda ticket: m.ShardRequest(ticket, name, request, owner), done)


def _event(ticket: int, asked: Any, caller: Caller, names: Mapping[str, str]) -> m.ShardRequest:
    if isinstance(asked, m.ShardCheckpoint) and caller.role is token_roles.WORKER:
        asked = m.RestoreRequest(caller.subject, asked)
    return m.ShardRequest(ticket, names["dataset"], asked, slot_of(caller))


def _row(
    method: str, action: str, kind: type[Struct], answer: Any, roles: Roles = TRAINERS, **more: Any
) -> Route:
    path = f"{SHARDS_PATH}{{dataset:[^/:]+}}{action}"
    return machine_route(method, path, roles, kind, answer, make=_event, refuse=_refuse, **more)


ROUTES = (
    _row("POST", ":next", m.NextRequest, m.NextAnswer, short=take_short),
    _row("POST", ":done", m.DoneRequest, m.DoneAnswer, short=take_short),
    _row("POST", ":resume", m.ResumeRequest, m.Resumed),
    _row("POST", ":agree", m.AgreeRequest, m.Agreed),
    _row("POST", ":extend", m.ExtendRequest, None),
    _row("GET", "", m.ReadStatus, m.ShardStatus, WATCHERS),
    _row("GET", "/checkpoint", m.ReadCheckpoint, m.ShardCheckpoint),
    _row("PUT", "/checkpoint", m.ShardCheckpoint, None),
)
