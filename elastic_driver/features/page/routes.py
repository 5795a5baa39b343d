"""The page of a job: its files, the login by which a browser gets a session, and its stream.

The files are the committed bundle in `elastic_driver/page/`, which `make page` builds. No script
can read the cookie, and no other origin the key (`rendezvous.sessions`). A login has a header that
pages of others cannot send, so nobody logs a browser in to a session of his own. `live` has the
stream.
"""

import asyncio
import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from elastic_driver import contract
from elastic_driver.features.page import live
from elastic_driver.runtime.status_routes import RoutePart, Serving
from elastic_driver.token_roles import OPERATORS, PEOPLE
from elastic_driver.words.orders import LoginCode
from rendezvous.auth import Caller, bearer
from rendezvous.routes import (
    ANY,
    PEER,
    SESSION,
    SESSIONS,
    TOKENS,
    Problem,
    Route,
    caller_of,
    json_answer,
    mount,
    read_json,
    session_of,
)
from rendezvous.sessions import CODE_S, HEADER

FOLDER = Path(__file__).resolve().parents[2] / "page"
PAGE_FILES = ("/assets/app.css", "/assets/app.js", "/assets/icon.svg")
CONTENT_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_Secret = Annotated[str, Meta(max_length=1024)]


class Login(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /login`: a token of the job, or a code of `elasticctl open`."""

    token: _Secret = ""
    code: _Secret = ""


class LoginState(Struct, frozen=True):
    """The session of a page: its role, or None if there is no session; its key after a login."""

    role: str | None
    key: str = ""


class Nothing(Struct, frozen=True):
    """The body of a request that says everything by its path."""


_decode = msgspec.json.Decoder(Login).decode


class PageRoutes:
    """The handlers of these routes."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, str]] = {}  # and the tag of each, by name

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        mount(app, _OWN, self)

    async def get_file(self, request: web.Request) -> web.Response:
        """Answer with a file of the page."""
        name = request.path.rpartition("/")[2] or "index.html"
        body, tag = await self._read(name)
        headers = {**HEADERS, "ETag": tag}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        kind = CONTENT_TYPES[Path(name).suffix]
        return web.Response(body=body, headers=headers, content_type=kind, charset="utf-8")

    async def _read(self, name: str) -> tuple[bytes, str]:
        """Return a file and its tag; each is read once."""
        if name not in self._files:
            body = await asyncio.to_thread((FOLDER / name).read_bytes)
            self._files[name] = body, f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        return self._files[name]

    async def get_login(self, request: web.Request) -> web.Response:
        """Answer whether this page has a session."""
        session = session_of(request, request.app[SESSIONS])
        return json_answer(LoginState(None if session is None else session.caller.role.value))

    async def login(self, request: web.Request) -> web.Response:
        """Begin a session with a token or a code."""
        if HEADER not in request.headers:
            raise Problem(403, "no_page", f"a login needs the header {HEADER}", "open the page")
        given = await read_json(request, _decode)
        sessions = request.app[SESSIONS]
        caller = (
            sessions.redeem(given.code, _now())
            if given.code
            else request.app[TOKENS].identify(bearer(given.token))
        )
        if caller is None:
            raise _not_known(given)
        begun = sessions.begin(caller, request.cookies, _now(), request[PEER])
        if begun is None:
            raise _no_session(caller)
        answer = json_answer(LoginState(begun.caller.role.value, begun.key))
        answer.set_cookie(
            sessions.cookie,
            begun.cookie,
            httponly=True,
            samesite="Strict",
            secure=request.secure,
            path="/",
        )
        return answer

    async def logout(self, request: web.Request) -> web.Response:
        """End the sessions of this browser; a token has none."""
        sessions, answer = request.app[SESSIONS], web.Response(status=204)
        answer.del_cookie(sessions.cookie, path="/")
        session = request.get(SESSION)
        if session is not None and request.transport is not None:
            session.cuts.discard(request.transport.abort)  # all but this request
            sessions.end(session)
        return answer

    async def make_code(self, request: web.Request) -> web.Response:
        """Make a code with which a browser may log in once."""
        code = request.app[SESSIONS].make_code(caller_of(request), _now(), request[PEER])
        if code is None:
            raise _no_session(caller_of(request))
        return json_answer(LoginCode(code, CODE_S))


def _not_known(given: Login) -> Problem:
    if given.code:
        problem = "the code in this address has been used, or is older than five minutes"
        return Problem(401, "unauthorized", problem, "run elasticctl open again, or paste a token")
    hint = "paste the first line of the file token-operator or token-reader in the run's folder"
    return Problem(401, "unauthorized", "this is no token of this run", hint)


def _no_session(caller: Caller) -> Problem:
    problem = f"a token of role {caller.role.value} opens no page"
    return Problem(403, "no_session", problem, "use the run's file token-operator or token-reader")


def _now() -> float:
    return asyncio.get_running_loop().time()


_OWN = (
    *(Route("GET", path, None, PageRoutes.get_file, ANY) for path in ("/", *PAGE_FILES)),
    Route("GET", contract.LOGIN_PATH, None, PageRoutes.get_login, LoginState),
    Route(
        "POST",
        contract.LOGIN_PATH,
        None,
        PageRoutes.login,
        LoginState,
        Login,
        errors=("401 unauthorized", "403 no_session"),
        note="it has a cookie and a key, which goes in the header `X-Elastic` with each request",
    ),
    Route("POST", "/logout", PEOPLE, PageRoutes.logout, None, Nothing, optional=True),
    Route(
        "POST",
        contract.LOGIN_CODES_PATH,
        OPERATORS,
        PageRoutes.make_code,
        LoginCode,
        Nothing,
        optional=True,
    ),
)
ROUTES = (*live.ROUTES, *_OWN)


def parts(serving: Serving) -> tuple[RoutePart, ...]:
    """Return what answers these routes."""
    status = serving.status
    stream = live.Live(status.status, serving.driver.history, serving.log, status.one_stream)
    return stream, PageRoutes()
