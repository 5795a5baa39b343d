"""The parts that all HTTP routes share: the token check, and one shape for errors.

Other rooms' handlers are mounted behind the same middleware. They read typed bodies with
`read_json`, answer with `json_answer`, and raise `Problem` to answer with an error. Any other
exception becomes a 500 that only tells the client where to look.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rendezvous.auth import AUTHORIZATION, is_authorized
from rendezvous.errors import StoppedError
from rendezvous.wire import HEALTH_PATH, ErrorBody, ErrorDetail, encode

log = logging.getLogger(__name__)
T = TypeVar("T")

JSON = "application/json"
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}
_HINTS = {
    404: "check the path; the routes are listed in docs/protocol.md",
    405: "use one of the methods in the Allow header",
    413: "send less at once",
}


class Problem(Exception):
    """Answers a request with an error: status, code for programs, message, hint what to try."""

    def __init__(self, status: int, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.hint = status, code, message, hint


def json_answer(document: msgspec.Struct, status: int = 200) -> web.Response:
    """Return an answer with this document as its JSON body."""
    return web.Response(body=encode(document), status=status, content_type=JSON)


def problem_body(problem: Problem) -> bytes:
    """Return the document for a problem: `{"error": {code, message, hint}}`."""
    return encode(ErrorBody(ErrorDetail(problem.code, problem.message, problem.hint)))


def error_answer(problem: Problem) -> web.Response:
    """Return the answer for a problem."""
    return web.Response(body=problem_body(problem), status=problem.status, content_type=JSON)


async def read_json(request: web.Request, decode: Callable[[bytes], T]) -> T:
    """Return the decoded body; raise Problem 400 (not JSON) or 422 (JSON of another type)."""
    body = await request.read()
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise Problem(422, "invalid", f"the body has the wrong form: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, "malformed", f"the body is not JSON: {error}") from error


def guard(*tokens: str) -> Middleware:
    """Return the middleware that refuses requests without a token and shapes all errors."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        header = request.headers.get(AUTHORIZATION)
        if request.path != HEALTH_PATH and not is_authorized(header, tokens):
            return _unauthorized(header)
        return await shape_errors(request, handler)

    return guarded


async def shape_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Return the handler's answer, or the answer for the exception it raised."""
    try:
        return await handler(request)
    except Problem as problem:
        return error_answer(problem)
    except web.HTTPException as error:
        return _from_aiohttp(request, error)
    except StoppedError as error:
        return error_answer(Problem(503, "stopping", str(error), "try again in a moment"))
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return error_answer(
            Problem(500, "internal", "this request met a bug of ours", "see the driver's log")
        )


def _unauthorized(header: str | None) -> web.Response:
    found = "an unknown token" if header else "no token"
    answer = error_answer(
        Problem(
            401,
            "unauthorized",
            f"the request carries {found}",
            "send Authorization: Bearer <token>, with the token from the job's token file",
        )
    )
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def _from_aiohttp(request: web.Request, error: web.HTTPException) -> web.Response:
    status = error.status
    answer = error_answer(
        Problem(
            status,
            _CODES.get(status, "http_error"),
            f"{request.method} {request.path}: {error.reason}",
            _HINTS.get(status, ""),
        )
    )
    if "Allow" in error.headers:
        answer.headers["Allow"] = error.headers["Allow"]
    return answer
