"""The routes of the Brain's server, beside the store: reports of jobs come in, the status goes out.

| route | does |
|---|---|
| `POST /v1/events` | a `JobReport` or a `JobOver`, by a job about itself |
| `GET /v1/status` | jobs, hosts, who has which slots, and why |
| `POST /v1/jobs/{job}:forget` | frees the slots of a silent job; 404, 409 `heard` |
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from elastic_driver.brain.documents import JobOver, JobReport
from elastic_driver.brain.messages import JobEnded, JobHeard
from elastic_driver.contract import STATUS_PATH
from rendezvous.auth import Caller, Role
from rendezvous.web import JSON, Problem, caller_of, forbidden, read_json
from rendezvous.wire import EVENTS_PATH, UNREADABLE

ANSWER_S = 5.0
FORGET_PATH = "/v1/jobs/{job}:forget"
_ACCEPTED = b'{"accepted":true}'
_decode: Callable[[bytes], JobReport | JobOver] = msgspec.json.Decoder(JobReport | JobOver).decode
_Answer = TypeVar("_Answer")
Take = Callable[[JobHeard | JobEnded], bool]  # False: there are too many messages
AskStatus = Callable[[Callable[[bytes], None]], None]
AskForget = Callable[[str, Callable[[bool | None], None]], None]  # the reply: see `is_silent`


def problem_with(caller: Caller, said: JobReport | JobOver) -> Problem | None:
    """Return why a caller may not say this; None: it may."""
    if caller.role is not Role.JOB:
        return forbidden("only the token of a job reports a job")
    if isinstance(said, JobReport) and said.most is not None and said.most < said.least:
        return Problem(
            422,
            "invalid",
            f"a job of at least {said.least} and at most {said.most} workers",
            "raise --max-np, or lower --min-np",
        )
    return None


class BrainRoutes:
    """Handlers of the routes above; what they are given may be called by any thread."""

    def __init__(self, take: Take, ask_status: AskStatus, forget: AskForget) -> None:
        self._take, self._ask_status, self._forget = take, ask_status, forget

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        app.router.add_post(EVENTS_PATH, self.post_event)
        app.router.add_get(STATUS_PATH, self.get_status, allow_head=False)
        app.router.add_post(FORGET_PATH, self.post_forget)

    def take_event(
        self, caller: Caller, _path: str, body: bytes, answer: Callable[[int, bytes], None]
    ) -> Callable[[], object] | None:
        """Take in a report; None leaves the request to `post_event`, which refuses it."""
        try:
            said = _decode(body)
        except UNREADABLE:
            return None
        if problem_with(caller, said) is not None or not self._take(_event(caller.subject, said)):
            return None
        answer(202, _ACCEPTED)
        return lambda: None

    async def post_event(self, request: web.Request) -> web.Response:
        """Take in a report, or say why not."""
        said, caller = await read_json(request, _decode), caller_of(request)
        if (problem := problem_with(caller, said)) is not None:
            raise problem
        if not self._take(_event(caller.subject, said)):
            raise Problem(503, "not_accepting", "the Brain has too much to do", "try again later")
        return web.Response(body=_ACCEPTED, status=202, content_type=JSON)

    async def get_status(self, _request: web.Request) -> web.Response:
        """Answer with the status document."""
        return web.Response(body=await _answered(self._ask_status), content_type=JSON)

    async def post_forget(self, request: web.Request) -> web.Response:
        """Free the slots of a job that is silent."""
        job = request.match_info["job"]
        ask: Callable[[Callable[[bool | None], None]], None] = partial(self._forget, job)
        silent = await _answered(ask)
        if silent is None:
            raise Problem(404, "not_found", f"there is no job {job}", "see elasticbrain status")
        if not silent:
            hint = "end it (elasticctl stop), and its slots are free"
            raise Problem(409, "heard", f"the driver of {job} is heard", hint)
        return web.Response(body=_ACCEPTED, status=202, content_type=JSON)


async def _answered(ask: Callable[[Callable[[_Answer], None]], None]) -> _Answer:
    """Return what the Brain's loop answers."""
    found: concurrent.futures.Future[_Answer] = concurrent.futures.Future()

    def settle(answer: _Answer) -> None:
        if found.set_running_or_notify_cancel():  # the client may have gone
            found.set_result(answer)

    ask(settle)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(found), ANSWER_S)
    except asyncio.TimeoutError:
        problem = f"the Brain has not answered within {ANSWER_S:g} s"
        raise Problem(503, "busy", problem, "ask again in a moment") from None


def _event(job: str, said: JobReport | JobOver) -> JobHeard | JobEnded:
    return JobHeard(job, said) if isinstance(said, JobReport) else JobEnded(job, said)


def job_of_lease(key: str) -> str | None:
    """Return the job whose lease this is; None: it is none of a job."""
    scope, _, rest = key.partition("/")
    job, _, name = rest.rpartition("/")
    return job if scope == "jobs" and name == "lease" else None
