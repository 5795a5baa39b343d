"""The HTTP routes of a server as rows, and what the handlers of all routes share.

A `Route` is the one place that tells everything about a route: method and path, the roles that may
use it, its messages, and what answers it. The rights of tokens follow from the rows (`access`), and
so does any document about them. Rows stand in the module of their handlers under the name `ROUTES`;
`collect` gathers those of many modules. A handler is a function of a *part*, an object that is made
with the server, and of the request; most are methods of the part's class. `mount` binds rows to
their part, behind the middlewares of `web`.

Handlers read typed bodies with `read_json`, answer with `json_answer`, and raise `Problem` to
answer with an error.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType, ModuleType
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from rendezvous import wire
from rendezvous.access import Access, RouteRights
from rendezvous.answers import RequestTimes
from rendezvous.auth import Caller, Tokens
from rendezvous.connections import Client
from rendezvous.limits import Hits
from rendezvous.sessions import HEADER, Refusals, Session, Sessions

T = TypeVar("T")

# Sends a status and a JSON document to a client.
Answer = Callable[[int, bytes], None]
# Takes a POST's caller, path and body, and answers it, at once or later, on the loop. Returns a
# function to call when the client goes away; None: nothing was done, aiohttp has to answer.
Post = Callable[[Caller, str, bytes, Answer], Callable[[], object] | None]
BINARY, TEXT, ANY = "application/octet-stream", "text/plain", "*/*"
EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True)
class Route(RouteRights):
    """One route, and everything that is known about it.

    Args:
        handler: answers a request; its arguments are the part that it belongs to and the request.
        answer: the type of the JSON document of a good answer, or a media type; None: no content.
        body: the same of the request.
        query: the type whose fields the query may have, by name.
        code: the status of a good answer; 0: 204 without content, 202 with `Accepted`, else 200.
        optional: the body may be empty.
        more: other media types of the answer.
        errors: `status code` of the errors that this route has and others have not.
        sentence: what a request does; by default the first line of the handler's docstring.
        note: what the table of routes in the documentation says beside that.
        short: answers the POST the short way (`fast_path`); its first argument is the part. One for
            all paths that are alike up to their first name in braces.
    """

    handler: Callable[..., Awaitable[web.StreamResponse]]
    answer: Any = None
    body: Any = None
    query: type[Struct] | None = None
    code: int = 0
    optional: bool = False
    more: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    sentence: str = ""
    note: str = ""
    short: Callable[..., Callable[[], object] | None] | None = None

    @property
    def status(self) -> int:
        """The status of a good answer."""
        return self.code or (
            204 if self.answer is None else 202 if self.answer is Accepted else 200
        )

    @property
    def summary(self) -> str:
        """What a request does, in one sentence."""
        return self.sentence or first_line(self.handler)


def first_line(described: object) -> str:
    """Return the first line of a docstring; "" if there is none."""
    return (inspect.getdoc(described) or "").partition("\n")[0]


def collect(modules: Iterable[ModuleType]) -> tuple[Route, ...]:
    """Return the rows of these modules, each of which has them under the name ROUTES."""
    return tuple(row for module in modules for row in module.ROUTES)


def mount(app: web.Application, routes: Iterable[Route], part: object) -> None:
    """Have the rows' requests answered with this part."""
    for row in routes:
        app.router.add_route(row.method, row.path, MethodType(row.handler, part))


def short_ways(routes: Iterable[Route], part: object) -> dict[str, Post]:
    """Return what answers the rows' POSTs the short way, as `fast_path` takes it."""
    return {
        row.path.partition("{")[0]: partial(row.short, part)
        for row in routes
        if row.short is not None
    }


# ---- what handlers share -----------------------------------------------------------------

JSON = "application/json"
CALLER = web.RequestKey("caller", Caller)
CLIENT = web.RequestKey("client", Client)  # the connection that a request came by
PEER = web.RequestKey("peer", str)  # who has connected (`Peers`), whatever the request says
SESSION = web.RequestKey("session", Session)  # of a request without a token
FORBIDDEN = "forbidden"
ACCESS = web.AppKey("access", Access)
REFUSALS = web.AppKey("refusals", Refusals)
HITS = web.AppKey("hits", Hits)  # of the server, for handlers that show them
REQUEST_TIMES = web.AppKey("request_times", RequestTimes)
SESSIONS = web.AppKey("sessions", Sessions)
TOKENS = web.AppKey("tokens", Tokens)  # for a login


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


def caller_of(request: web.Request) -> Caller:
    """Return who has sent a request that `guard` has let in."""
    return request[CALLER]


def forbidden(sentence: str) -> Problem:
    """Return the problem of a request to which its token gives no right."""
    hint = "docs/security.md lists what each token may do"
    return Problem(403, FORBIDDEN, sentence, hint)


def session_of(request: web.Request, sessions: Sessions) -> Session | None:
    """Return the session of a request, or None."""
    now = asyncio.get_running_loop().time()
    return sessions.find(request.cookies, request.headers.get(HEADER, ""), now)


def problem_body(problem: Problem) -> bytes:
    """Return the document for a problem: `{"error": {code, message, hint}}`."""
    detail = wire.ErrorDetail(problem.code, problem.message, problem.hint)
    return wire.encode(wire.ErrorBody(detail))


def error_answer(problem: Problem, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return the answer for a problem."""
    body, status = problem_body(problem), problem.status
    return web.Response(body=body, status=status, headers=headers, content_type=JSON)


class Accepted(Struct, frozen=True):
    """The answer to a request that the driver carries out later."""

    accepted: bool


ACCEPTED = wire.encode(Accepted(accepted=True))


def accepted() -> web.Response:
    """Return the answer to a request that has been accepted."""
    return web.Response(body=ACCEPTED, status=202, content_type=JSON)
