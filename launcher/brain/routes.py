"""The routes of the Brain's server, beside the store: reports of jobs come in, the status goes out.

| route | does |
|---|---|
| `POST /v1/events` | a `JobReport` or a `JobOver`, by a job about itself |
| `GET /v1/status` | jobs, hosts, who has which slots, and why |
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from elastic_driver.brain.documents import JobOver, JobReport
from elastic_driver.brain.messages import JobEnded, JobHeard
from elastic_driver.contract import STATUS_PATH
from rendezvous.auth import Caller, Role
from rendezvous.web import JSON, Problem, caller_of, forbidden, read_json
from rendezvous.wire import EVENTS_PATH, UNREADABLE

STATUS_WAIT_S = 5.0
_ACCEPTED = b'{"accepted":true}'
_decode: Callable[[bytes], JobReport | JobOver] = msgspec.json.Decoder(JobReport | JobOver).decode
Take = Callable[[JobHeard | JobEnded], bool]  # False: there are too many messages
AskStatus = Callable[[Callable[[bytes], None]], None]


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
    """Handlers of the routes above; `take` and `ask_status` may be called by any thread."""

    def __init__(self, take: Take, ask_status: AskStatus) -> None:
        self._take, self._ask_status = take, ask_status

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        app.router.add_post(EVENTS_PATH, self.post_event)
        app.router.add_get(STATUS_PATH, self.get_status, allow_head=False)

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
        found: concurrent.futures.Future[bytes] = concurrent.futures.Future()

        def settle(document: bytes) -> None:
            if found.set_running_or_notify_cancel():  # the client may have gone
                found.set_result(document)

        self._ask_status(settle)
        try:
            body = await asyncio.wait_for(asyncio.wrap_future(found), STATUS_WAIT_S)
        except asyncio.TimeoutError:
            problem = f"no status within {STATUS_WAIT_S:g} s"
            raise Problem(503, "busy", problem, "ask again in a moment") from None
        return web.Response(body=body, content_type=JSON)


def _event(job: str, said: JobReport | JobOver) -> JobHeard | JobEnded:
    return JobHeard(job, said) if isinstance(said, JobReport) else JobEnded(job, said)


def job_of_lease(key: str) -> str | None:
    """Return the job whose lease this is; None: it is none of a job."""
    scope, _, rest = key.partition("/")
    job, _, name = rest.rpartition("/")
    return job if scope == "jobs" and name == "lease" else None


def status_document(url: str, started: float, cluster: Any) -> bytes:
    """Return the status as JSON."""
    jobs = [
        {
            "job": job.name,
            "state": "live" if job.is_live else "silent",
            "arrived": job.arrived,
            "min": job.report.least,
            "max": job.report.most,
            "weight": job.report.weight,
            "held": job.report.held,
            "granted": job.granted,
            "holding": job.report.holding,
            "grant": job.grants[-1].number if job.grants else 0,
            "carried_out": job.report.carried_out,
            "reason": job.reason,
        }
        for job in cluster.jobs.values()
    ]
    used = dict.fromkeys(cluster.hosts, 0)
    for job in cluster.jobs.values():
        for host, slots in job.granted.items():
            used[host] = used.get(host, 0) + slots
    hosts = [{"host": h, "slots": cluster.hosts.get(h, 0), "granted": n} for h, n in used.items()]
    document = {
        "url": url,
        "started": started,
        "jobs": jobs,
        "hosts": hosts,
        "measured": sorted(cluster.figures),
    }
    return msgspec.json.encode(document)
