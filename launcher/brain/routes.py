"""The routes of the Brain's server, beside the store: reports of jobs come in, the status goes out.

| route | does |
|---|---|
| `POST /v1/events` | a `JobReport` or a `JobOver`, by a job about itself |
| `GET /v1/status` | jobs, hosts, who has which slots, and why |
| `POST /v1/jobs/{job}:forget` | frees the slots of a silent job; 404, 409 `heard` |
"""

import asyncio
import concurrent.futures
import ipaddress
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web
from msgspec.structs import replace

from elastic_driver import token_roles
from elastic_driver.brain.grants import JobOver, JobReport
from elastic_driver.brain.messages import JobEnded, JobHeard
from elastic_driver.contract import EVENTS_PATH, STATUS_PATH
from elastic_driver.runtime.run_dir import MAX_RUN_ID_CHARS, is_run_id
from launcher.brain.intake import MOST_JOBS
from rendezvous.auth import Caller
from rendezvous.routes import JSON, PEER, Problem, caller_of, forbidden, read_json
from rendezvous.wire import UNREADABLE

ANSWER_S = 5.0
AHEAD_S = 86400.0  # by which the clock of a job's host may differ
FIRST_PORT = 1024  # no driver listens below
FORGET_PATH = "/v1/jobs/{job}:forget"
_ACCEPTED = b'{"accepted":true}'
_decode: Callable[[bytes], JobReport | JobOver] = msgspec.json.Decoder(JobReport | JobOver).decode
_Answer = TypeVar("_Answer")
# Takes what a job says, and who has connected, if that is known; returns why not, or "".
Take = Callable[[JobHeard | JobEnded, str | None], str]
AskStatus = Callable[[Callable[[bytes], None]], None]
AskForget = Callable[[str, Callable[[bool | None], None]], None]  # the reply: see `is_silent`


def problem_with(caller: Caller, said: JobReport | JobOver) -> Problem | None:
    """Return why a caller may not say this; None: it may."""
    if caller.role is not token_roles.JOB:
        return forbidden("only the token of a job reports a job")
    if not is_run_id(caller.subject):
        hint = f"use letters, digits, '.', '_' and '-', at most {MAX_RUN_ID_CHARS}"
        return Problem(422, "invalid", "the token is of no job's name", hint)
    if said.began > time.time() + AHEAD_S:
        return Problem(422, "invalid", "the job begins in the future", "set the clock of its host")
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
        self._places: dict[str, str] = {}  # where drivers listen, as their own addresses show

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
        if problem_with(caller, said) is not None or self._is_elsewhere(caller.subject, said):
            return None
        if self._take(_event(caller.subject, said), None):
            return None
        answer(202, _ACCEPTED)
        return lambda: None

    async def post_event(self, request: web.Request) -> web.Response:
        """Take in a report, or say why not."""
        said, caller = await read_json(request, _decode), caller_of(request)
        if (problem := problem_with(caller, said)) is not None:
            raise problem
        if isinstance(said, JobReport):
            said = self._reachable(caller.subject, said, request.remote or "")
        if why := self._take(_event(caller.subject, said), request[PEER]):
            raise Problem(429, "too_many", why, "try again in a moment")
        return web.Response(body=_ACCEPTED, status=202, content_type=JSON)

    def _is_elsewhere(self, job: str, said: JobReport | JobOver) -> bool:
        """Return whether a report names a place that its own address has not shown yet."""
        if isinstance(said, JobOver):
            self._places.pop(job, None)
            return False
        return bool(said.liveness) and self._places.get(job) != said.liveness

    def _reachable(self, job: str, said: JobReport, peer: str) -> JobReport:
        """Return a report whose driver listens where it comes from; else nobody looks there."""
        if not listens_at(said.liveness, peer):
            return replace(said, liveness="")
        while len(self._places) >= MOST_JOBS:
            del self._places[next(iter(self._places))]
        self._places[job] = said.liveness
        return said

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


def listens_at(liveness: str, peer: str) -> bool:
    """Return whether HOST:PORT is a place where a client of this address may listen."""
    host, _, port = liveness.rpartition(":")
    try:
        place, client = (ipaddress.ip_address(text.strip("[]")) for text in (host, peer))
    except ValueError:
        return False
    mapped = getattr(client, "ipv4_mapped", None)
    own = place == (client if mapped is None else mapped)
    return own and port.isascii() and port.isdigit() and FIRST_PORT <= int(port[:9]) < 65536


def _event(job: str, said: JobReport | JobOver) -> JobHeard | JobEnded:
    return JobHeard(job, said) if isinstance(said, JobReport) else JobEnded(job, said)


def job_of_lease(key: str) -> str | None:
    """Return the job whose lease this is; None: it is none of a job."""
    scope, _, rest = key.partition("/")
    job, _, name = rest.rpartition("/")
    return job if scope == "jobs" and name == "lease" else None
