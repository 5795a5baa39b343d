"""The HTTP routes of the key-value store, and the parts that all routes share.

| route | answer |
|---|---|
| `GET /healthz` | 200 without a token, for load balancers and people |
| `PUT /v1/kv/{scope}/{key}[?lease=S]` | 204, raw bytes stored, `X-Revision` |
| `GET /v1/kv/{scope}/{key}[?wait=S][&after=REV]` | 200, raw bytes, `X-Revision`; or 404 |
| `DELETE /v1/kv/{scope}/{key}` | 204, or 404 if there was nothing |
| `POST /v1/kv:batch` | `wire.BatchReply` for `wire.KVBatch` |

A GET whose wait runs out is answered 408 `timed_out`: ask again. Keys below a sealed prefix
are answered 410 `sealed`. In the store, scope and key are one name, `scope/key`.

Other modules' handlers are mounted behind the same middlewares: `guard` checks the token or the
session and its rights, keeps its owner (`caller_of`) and gives errors one shape, `once` answers
repeated POSTs. Handlers read typed bodies with `read_json`, answer with `json_answer`, and
raise `Problem` to answer with an error. Any other exception becomes a 500 that only tells the
client where to look.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import web, web_response
from aiohttp.typedefs import Handler, Middleware
from msgspec import Meta, Struct

from rendezvous import wire
from rendezvous.access import Access
from rendezvous.answers import PostAnswer, PostsOnce, RequestTimes
from rendezvous.auth import AUTHORIZATION, Caller, Tokens
from rendezvous.connections import Client
from rendezvous.errors import RefusedError, StoppedError
from rendezvous.fairness import owner_of
from rendezvous.limits import Hits
from rendezvous.service import StoreService
from rendezvous.sessions import HEADER, OF_CONNECTION, Refusals, Session, Sessions

# Neither version nor library, in any answer: also in one to a request that is none.
setattr(web_response, "SERVER_SOFTWARE", "elastic-driver")  # noqa: B010 - it is not exported
log = logging.getLogger(__name__)
T = TypeVar("T")

JSON = "application/json"
CALLER = web.RequestKey("caller", Caller)
CLIENT = web.RequestKey("client", Client)  # the connection that a request came by
PEER = web.RequestKey("peer", str)  # who has connected (`peers`), whatever the request says
SESSION = web.RequestKey("session", Session)  # of a request without a token
FORBIDDEN = "forbidden"
ACCESS = web.AppKey("access", Access)
REFUSALS = web.AppKey("refusals", Refusals)
HITS = web.AppKey("hits", Hits)  # of the server, for handlers that show them
REQUEST_TIMES = web.AppKey("request_times", RequestTimes)
SESSIONS = web.AppKey("sessions", Sessions)
TOKENS = web.AppKey("tokens", Tokens)  # for a login
_REFUSED = {"sealed": 410, "too_large": 413, "not_a_number": 409, "store_full": 503}
_REFUSED |= {"busy": 429, "share_full": 429}
# Status → code for programs, and a hint.
_OF_AIOHTTP = {
    404: ("not_found", "check the path; the routes are listed in docs/protocol.md"),
    405: ("method_not_allowed", "use one of the methods in the Allow header"),
    413: ("too_large", "send less at once"),
}


class Problem(Exception):
    """Answers a request with an error: status, code for programs, message, hint what to try."""

    def __init__(self, status: int, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.hint = status, code, message, hint


def busy(sentence: str) -> Problem:
    """Return the problem of a request for which a server has no room now."""
    return Problem(503, "busy", sentence, "try again in a moment")


def json_answer(document: msgspec.Struct, status: int = 200) -> web.Response:
    """Return an answer with this document as its JSON body."""
    return web.Response(body=wire.encode(document), status=status, content_type=JSON)


async def read_json(request: web.Request, decode: Callable[[bytes], T]) -> T:
    """Return the decoded body; raise Problem 400 (not JSON) or 422 (JSON of another type)."""
    body = await request.read()
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise Problem(422, "invalid", f"the body has the wrong form: {error}") from error
    except wire.UNREADABLE as error:
        raise Problem(400, "malformed", f"the body is not JSON: {error}") from error


def guard(tokens: Tokens, access: Access, refusals: Refusals, sessions: Sessions) -> Middleware:
    """Return the middleware that lets in who may use a route, and shapes all errors.

    A request without a token may have a session: a cookie and a header. The request ends with it.
    """
    refuse = _Refuser(refusals).refuse

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        header = request.headers.get(AUTHORIZATION)
        if request.path in access.open:
            answer = await shape_errors(request, handler)
            wrong = request.path == access.login_path and answer.status == 401
            return await refuse(request, answer=answer) if wrong else answer
        session = None
        if header is None:
            session = session_of(request, sessions)
            caller = None if session is None else session.caller
        else:
            caller = request[CLIENT].identify(tokens, header)
        if caller is None:
            return await refuse(request, header=header)
        if problem := _right_lacking(request, caller, access):
            refusals.forbidden(caller, problem.message)
            return error_answer(problem)
        request[CALLER] = caller
        if session is None:
            return await shape_errors(request, handler)
        request[SESSION] = session
        with _ends_with(session, request.transport):
            return await shape_errors(request, handler)

    return guarded


def session_of(request: web.Request, sessions: Sessions) -> Session | None:
    """Return the session of a request, or None."""
    now = asyncio.get_running_loop().time()
    return sessions.find(request.cookies, request.headers.get(HEADER, ""), now)


@contextmanager
def _ends_with(session: Session, transport: asyncio.Transport | None) -> Iterator[None]:
    """Break off what is answered meanwhile, such as a stream, when its session ends."""
    if transport is None:  # the client has gone
        yield
        return
    cut = transport.abort
    timer = asyncio.get_running_loop().call_at(session.until, cut)
    session.cuts.add(cut)
    try:
        yield
    finally:
        session.cuts.discard(cut)
        timer.cancel()


async def dress(_request: web.Request, response: web.StreamResponse) -> None:
    """Give any answer the headers that each has: what one caller sees is kept nowhere for another.

    Pages of other servers neither load an answer, nor take it for something that it is not.
    """
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Cross-Origin-Resource-Policy"] = "same-origin"


class _Refuser:
    """Answers requests without a good token, later and later."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._failures: WeakKeyDictionary[asyncio.BaseTransport, int] = WeakKeyDictionary()

    async def refuse(
        self,
        request: web.Request,
        *,
        header: str | None = None,
        answer: web.StreamResponse | None = None,
    ) -> web.StreamResponse:
        """Return the answer to a request after a pause; `answer`: that of a login."""
        address, transport = request[PEER] or "a client that is gone", request.transport
        pause = self._refusals.unauthorized(address, asyncio.get_running_loop().time())
        if pause is None and transport is not None:
            transport.abort()
        elif pause:
            try:
                await asyncio.sleep(pause)
            finally:
                self._refusals.answered(address)
        if answer is None:
            found = "an unknown token" if header else "no token"
            hint = "send Authorization: Bearer <token>, with the token from the job's token file"
            problem = Problem(401, "unauthorized", f"the request carries {found}", hint)
            answer = error_answer(problem, {"WWW-Authenticate": "Bearer"})
        if transport is not None:
            self._failures[transport] = self._failures.get(transport, 0) + 1
            if self._failures[transport] >= OF_CONNECTION:
                answer.force_close()
        return answer


def _right_lacking(request: web.Request, caller: Caller, access: Access) -> Problem | None:
    """Return the problem of a request that its caller may not make; None: it may."""
    resource = request.match_info.route.resource
    if resource is not None and not access.may_call(caller, request.method, resource.canonical):
        what = f"{request.method} {resource.canonical}"
        return forbidden(f"a token of role {caller.role.value} may not {what}")
    return None


def caller_of(request: web.Request) -> Caller:
    """Return who has sent a request that `guard` has let in."""
    return request[CALLER]


def forbidden(sentence: str) -> Problem:
    """Return the problem of a request to which its token gives no right."""
    hint = "docs/security.md lists what each token may do"
    return Problem(403, FORBIDDEN, sentence, hint)


async def shape_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Return the handler's answer, or the answer for the exception it raised."""
    try:
        return await handler(request)
    except Problem as problem:
        if problem.code == FORBIDDEN:
            request.app[REFUSALS].forbidden(caller_of(request), problem.message)
        return error_answer(problem)
    except RefusedError as error:
        return error_answer(Problem(_REFUSED.get(error.code, 409), error.code, str(error)))
    except web.HTTPException as error:
        code, hint = _OF_AIOHTTP.get(error.status, ("http_error", ""))
        message = f"{request.method} {request.path}: {error.reason}"
        allow = error.headers.get("Allow")
        headers = {"Allow": allow} if allow else None
        return error_answer(Problem(error.status, code, message, hint), headers)
    except ConnectionResetError:  # nobody reads this answer
        return error_answer(Problem(400, "incomplete", "the client left before its request ended"))
    except StoppedError as error:
        return error_answer(Problem(503, "stopping", str(error), "try again in a moment"))
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        bug = Problem(500, "internal", "this request met a bug of ours", "see the driver's log")
        return error_answer(bug)


def problem_body(problem: Problem) -> bytes:
    """Return the document for a problem: `{"error": {code, message, hint}}`."""
    detail = wire.ErrorDetail(problem.code, problem.message, problem.hint)
    return wire.encode(wire.ErrorBody(detail))


def error_answer(problem: Problem, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return the answer for a problem."""
    body, status = problem_body(problem), problem.status
    return web.Response(body=body, status=status, headers=headers, content_type=JSON)


def once(posts_once: PostsOnce) -> Middleware:
    """Return the middleware that answers repeated POSTs; it belongs behind `guard`."""
    calls: set[asyncio.Task[None]] = set()

    async def call(key: str, request: web.Request, handler: Handler) -> None:
        answer = None
        try:
            response = await shape_errors(request, handler)
            body = response.body if isinstance(response, web.Response) else b""
            content = body if isinstance(body, bytes) else b""
            answer = PostAnswer(response.status, content, response.headers)
        finally:
            posts_once.end(key, caller_of(request), answer)

    @web.middleware
    async def answered_once(request: web.Request, handler: Handler) -> web.StreamResponse:
        caller = request.get(CALLER)
        request_id = request.headers.get(wire.REQUEST_ID_HEADER)
        key = posts_once.key_of(caller, request.path, request_id)
        if request.method != "POST" or caller is None or not key:
            return await handler(request)
        await request.read()  # now, as the connection may end before the handler reads
        if not posts_once.knows(key):
            if not posts_once.begin(key, caller):
                raise busy(
                    "this client has its share of the requests that are being answered, or there "
                    "are too many"
                )
            task = asyncio.create_task(call(key, request, handler))
            calls.add(task)
            task.add_done_callback(calls.discard)
        answer = await posts_once.answer_to(key)
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    return answered_once


class KVQuery(Struct, frozen=True):
    """The key and the query of a single key's route; times are seconds."""

    key: wire.Key
    wait: wire.Seconds = 0.0
    after: Annotated[int, Meta(ge=0)] = 0
    lease: Annotated[float, Meta(ge=0.0, le=wire.MAX_LEASE_S)] = 0.0  # 0: none


class KVRoutes:
    """Handlers of the routes above."""

    def __init__(self, service: StoreService) -> None:
        self._service = service

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        app.router.add_get(wire.HEALTH_PATH, self.health)
        app.router.add_post(wire.BATCH_PATH, self.batch)
        key = wire.KV_PREFIX + "/{scope}/{key:.+}"
        app.router.add_get(key, self.get, allow_head=False)
        app.router.add_put(key, self.put)
        app.router.add_delete(key, self.delete)

    async def health(self, _request: web.Request) -> web.Response:
        """Answer that the server is up."""
        return web.Response(body=b'{"status":"ok"}', content_type=JSON)

    async def batch(self, request: web.Request) -> web.Response:
        """Carry out many operations; a repeat of the same request changes nothing."""
        batch = await read_json(request, wire.decode_batch)
        _check(request, batch.operations)
        caller = caller_of(request)
        write_id, owner = caller.own_id(batch.write_id), owner_of(caller)
        results = await self._service.carry_out(batch.operations, write_id, owner=owner)
        return web.Response(body=wire.encode_reply(results), content_type=JSON)

    async def get(self, request: web.Request) -> web.Response:
        """Answer with a value as it was stored, at once or when it is newer than `after`."""
        query = _read(request, request.query)
        key = query.key
        asked = wire.Get((key,), query.wait, query.after)
        found = await self._one(request, asked, wire.Entries)
        entry = found.entries.get(key)
        if found.timed_out:
            held = f"revision {entry.revision}" if entry else "nothing"
            message = f"key {key!r} holds {held} after {query.wait:g} s"
            raise Problem(408, "timed_out", message, "ask again")
        if entry is None:
            raise Problem(404, "not_found", f"no key {key!r}", "?wait=S waits until it is written")
        headers = {wire.REVISION_HEADER: str(entry.revision)}
        binary = "application/octet-stream"
        return web.Response(body=entry.value, content_type=binary, headers=headers)

    async def put(self, request: web.Request) -> web.Response:
        """Store the body as it is, with a lease if one is given."""
        query = _read(request, request.query)
        put = wire.Set(query.key, await request.read(), query.lease or None)
        written = await self._one(request, put, wire.Written)
        return web.Response(status=204, headers={wire.REVISION_HEADER: str(written.revision)})

    async def delete(self, request: web.Request) -> web.Response:
        """Delete one key."""
        key = _read(request, {}).key
        if (await self._one(request, wire.Delete(key), wire.Number)).number == 0:
            raise Problem(404, "not_found", f"no key {key!r}")
        return web.Response(status=204)

    async def _one(self, request: web.Request, operation: wire.Operation, kind: type[T]) -> T:
        _check(request, (operation,))
        owner = owner_of(caller_of(request))
        (result,) = await self._service.carry_out((operation,), owner=owner)
        return wire.expect(result, kind)


def _check(request: web.Request, operations: Sequence[wire.Operation]) -> None:
    """Raise Problem if the caller may not carry out one of these."""
    sentence = request.app[ACCESS].refused(caller_of(request), operations)
    if sentence is not None:
        raise forbidden(sentence)


def _read(request: web.Request, query: Mapping[str, str]) -> KVQuery:
    key = f"{request.match_info['scope']}/{request.match_info['key']}"
    try:
        return msgspec.convert({**query, "key": key}, KVQuery, strict=False)
    except msgspec.ValidationError as error:
        raise Problem(422, "invalid", f"the query has the wrong form: {error}") from error
