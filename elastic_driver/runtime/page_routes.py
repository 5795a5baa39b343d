"""The page of a job: its files, and the login by which a browser gets a session.

| route | answer |
|---|---|
| `GET /` and `GET /assets/…` | the page, without any data of the job |
| `GET /login` | `LoginState`: whether this page has a session |
| `POST /login` | a token or a code becomes a session: a cookie, and a key for the page alone |
| `POST /logout` | 204; the sessions of this browser end |
| `POST /v1/login-codes` | a code for one login, for `elasticctl open` |

The files are the committed bundle in `elastic_driver/page/`, which `make page` builds. No script
can read the cookie, and no other origin the key (`rendezvous.sessions`). A login has a header that
pages of others cannot send, so nobody logs a browser in to a session of his own.
"""

import asyncio
import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Meta, Struct

from elastic_driver import contract
from elastic_driver.rights import PAGE_FILES
from elastic_driver.words.orders import LoginCode
from rendezvous.auth import Caller, bearer
from rendezvous.sessions import CODE_S, HEADER
from rendezvous.web import (
    PEER,
    SESSION,
    SESSIONS,
    TOKENS,
    Problem,
    caller_of,
    json_answer,
    read_json,
    session_of,
)

FOLDER = Path(__file__).resolve().parent.parent / "page"
CONTENT_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"),
        *("img-src 'self' data:", "form-action 'self'", "frame-ancestors 'none'"),
        "base-uri 'none'",
    )
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

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        for path in ("/", *PAGE_FILES):
            app.router.add_get(path, _file(path), allow_head=False)
        app.router.add_get(contract.LOGIN_PATH, self.get_login, allow_head=False)
        app.router.add_post(contract.LOGIN_PATH, self.login)
        app.router.add_post(contract.LOGOUT_PATH, self.logout)
        app.router.add_post(contract.LOGIN_CODES_PATH, self.make_code)

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


def _file(path: str) -> Handler:
    """Return the handler of one file of the page; it is read once."""
    name = "index.html" if path == "/" else path.rpartition("/")[2]
    found: list[tuple[bytes, str]] = []

    async def get(request: web.Request) -> web.Response:
        """Answer with a file of the page."""
        if not found:
            body = await asyncio.to_thread((FOLDER / name).read_bytes)
            found.append((body, f'"{hashlib.sha256(body).hexdigest()[:16]}"'))
        body, tag = found[0]
        headers = {**HEADERS, "ETag": tag}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        kind = CONTENT_TYPES[Path(name).suffix]
        return web.Response(body=body, headers=headers, content_type=kind, charset="utf-8")

    return get


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
