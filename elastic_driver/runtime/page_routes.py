"""The page of a job: its files, and the login by which a browser gets a session.

| route | answer |
|---|---|
| `GET /` and `GET /assets/…` | the page, without any data of the job |
| `GET /login` | `LoginState`: whether this browser has a session |
| `POST /login` | a token or a code becomes a session, whose secret is in a cookie |
| `POST /logout` | 204; the session ends |
| `POST /v1/login-codes` | a code for one login, for `elasticctl open` |

The files are the committed bundle in `elastic_driver/page/`, which `make page` builds. A login is a
form or JSON. The cookie is for this site only, and no script can read it.
"""

import asyncio
import hashlib
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Meta, Struct

from elastic_driver import contract
from elastic_driver.core.documents import LoginCode
from rendezvous.access import PAGE_FILES
from rendezvous.auth import Caller, bearer
from rendezvous.sessions import CODE_S, HEADER, may_act
from rendezvous.web import SESSIONS, TOKENS, Problem, caller_of, json_answer, read_json

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
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_FORM = "application/x-www-form-urlencoded"
_Secret = Annotated[str, Meta(max_length=1024)]


class Login(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /login`: a token of the job, or a code of `elasticctl open`."""

    token: _Secret = ""
    code: _Secret = ""


class LoginState(Struct, frozen=True):
    """The session of a browser: its role, or None if there is no session."""

    role: str | None


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
        """Answer whether this browser has a session."""
        caller = request.app[SESSIONS].caller(request.cookies, _now())
        return json_answer(LoginState(None if caller is None else caller.role.value))

    async def login(self, request: web.Request) -> web.Response:
        """Begin a session with a token or a code."""
        by_form = request.content_type == _FORM
        given = await read_json(request, decode_form if by_form else _decode)
        sessions = request.app[SESSIONS]
        caller = (
            sessions.redeem(given.code, _now())
            if given.code
            else request.app[TOKENS].identify(bearer(given.token))
        )
        if caller is None:
            raise _not_known(given)
        begun = sessions.begin(caller, _now())
        if begun is None:
            raise _no_session(caller)
        secret, owner = begun
        answer = json_answer(LoginState(owner.role.value))
        if by_form:
            answer = web.Response(status=303, headers={"Location": "/"})
        answer.set_cookie(
            sessions.cookie,
            secret,
            httponly=True,
            samesite="Strict",
            secure=request.secure,
            path="/",
        )
        return answer

    async def logout(self, request: web.Request) -> web.Response:
        """End the session of this browser."""
        if not may_act(request.method, request.headers):
            raise Problem(403, "no_page", f"a request by cookie needs the header {HEADER}")
        sessions = request.app[SESSIONS]
        sessions.end(request.cookies)
        answer = web.Response(status=204)
        answer.del_cookie(sessions.cookie, path="/")
        return answer

    async def make_code(self, request: web.Request) -> web.Response:
        """Make a code with which a browser may log in once."""
        code = request.app[SESSIONS].make_code(caller_of(request), _now())
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


def decode_form(body: bytes) -> Login:
    """Return the login in a form; raises `UNREADABLE` errors."""
    fields = parse_qs(body.decode(), max_num_fields=4)
    return msgspec.convert({name: values[-1] for name, values in fields.items()}, Login)


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
