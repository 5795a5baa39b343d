"""The routes of the Brain's server, beside the store: reports of jobs come in, the status goes out.

| route | does |
|---|---|
| `POST /v1/events` | a `JobReport` or a `JobOver`, by a job about itself |
| `GET /v1/status` | jobs, hosts, who has which slots, and why |
| `POST /v1/jobs/{job}:forget` | frees the slots of a silent job; 404, 409 `heard` |

What jobs send is bounded before the Brain's loop sees it (`Intake`). All who may start jobs share
one token, so bounds are by job, and for new names by peer (`rendezvous.fairness`). Of each job one
report waits for the loop, the newest. The loop takes so many reports of a job at once and each
second, and so many new names; who brings few of them has a reserve. When the Brain is full, a job
without slots gives way to a new one: one that nobody speaks for, else one of the peer with the
most. These times are seconds of a monotonic clock.
"""

import asyncio
import concurrent.futures
import ipaddress
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TypeVar

import msgspec
from aiohttp import web
from msgspec.structs import replace

from elastic_driver import token_roles
from elastic_driver.brain.cluster import SILENT_S, Cluster
from elastic_driver.brain.grants import JobOver, JobReport
from elastic_driver.brain.jobs import Job
from elastic_driver.brain.messages import JobDropped, JobEnded, JobHeard
from elastic_driver.contract import EVENTS_PATH, STATUS_PATH
from elastic_driver.runtime.run_dir import MAX_RUN_ID_CHARS, is_run_id
from launcher.brain.setup import FORGET_PATH
from rendezvous.auth import Caller
from rendezvous.routes import JSON, PEER, Problem, caller_of, forbidden, read_json
from rendezvous.wire import UNREADABLE

REPORTS, REPORTS_S = 20.0, 10.0  # of one job at once, and each second
NAMES, NAMES_S = 50.0, 5.0  # of jobs that the Brain does not know
RESERVE, RESERVE_S = 20.0, 2.0  # more of them
OWN, OWN_S = 5.0, 0.2  # of that for one peer
MOST_JOBS = 1000  # that the Brain knows, or will soon
_PEERS = 1000  # of which it is known how much of the reserve they have had


class Bucket:
    """Lets so many things pass at once, and so many more each second."""

    def __init__(self, most: float, each_s: float, now: float) -> None:
        self._most, self._each_s = most, each_s
        self._left, self._at = most, now

    def has_any(self, now: float) -> bool:
        """Return whether one more may pass now."""
        self._left = min(self._most, self._left + (now - self._at) * self._each_s)
        self._at = now
        return self._left >= 1.0

    def take(self, now: float) -> bool:
        """Let one more pass now; return whether it may."""
        if not self.has_any(now):
            return False
        self._left -= 1.0
        return True


@dataclass
class _Known:
    """A job that the Brain knows; `holds`: it may have slots."""

    bucket: Bucket
    peer: str
    heard_at: float
    holds: bool


class _Names:
    """How fast names come that the Brain does not know."""

    def __init__(self, now: float) -> None:
        self._all, self._reserve = Bucket(NAMES, NAMES_S, now), Bucket(RESERVE, RESERVE_S, now)
        self._own: dict[str, Bucket] = {}  # of peers that have needed the reserve

    def take(self, peer: str, now: float) -> bool:
        """Return whether one more name of a peer may come now."""
        if self._all.take(now):
            return True
        if peer not in self._own:
            if len(self._own) >= _PEERS:
                del self._own[next(iter(self._own))]
            self._own[peer] = Bucket(OWN, OWN_S, now)
        own = self._own[peer]
        return own.has_any(now) and self._reserve.take(now) and own.take(now)


class Intake:
    """The reports that wait. `take` is called by the server's thread, all else by the loop.

    Args:
        post: puts a message into the loop's mailbox; a `str` stands for the report of that job.
        most: jobs that may be known at a time.
    """

    def __init__(
        self,
        post: Callable[[str | JobEnded | JobDropped], None],
        *,
        most: int = MOST_JOBS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._post, self._most, self._clock = post, most, clock
        self._lock = threading.Lock()  # guards all below
        self._waiting: dict[str, JobHeard] = {}
        self._late: dict[str, None] = {}  # jobs whose reports wait until their time has come
        self._jobs: dict[str, _Known] = {}  # the jobs that are known, the newest last
        self._names = _Names(clock())

    def know(self, job: str, *, holds: bool = True) -> None:
        """Note that the Brain knows a job; `holds`: it may have slots."""
        with self._lock:
            if job not in self._jobs:
                self._add(job, "", self._clock(), holds=holds)

    def note(self, job: str, *, holds: bool) -> None:
        """Note whether a job may have slots."""
        with self._lock:
            if (known := self._jobs.get(job)) is not None:
                known.holds = holds

    def forget(self, job: str) -> None:
        """Note that the Brain knows a job no more, unless a report of it waits."""
        with self._lock:
            if job not in self._waiting:
                self._jobs.pop(job, None)

    def knows(self, job: str) -> bool:
        """Return whether the Brain knows a job, or will soon."""
        with self._lock:
            return job in self._jobs

    def take(self, said: JobHeard | JobEnded, peer: str | None = None) -> str:
        """Take in what a job says; return why not: "", or a phrase.

        `peer`: who has connected; None: that is not known here, and a new name has to come again.
        """
        now = self._clock()
        with self._lock:
            known = self._jobs.get(said.job)
            if known is None:
                if peer is None:
                    return "the job is new"
                if not self._names.take(peer, now):
                    return "too many new jobs come at once"
                if isinstance(said, JobHeard):
                    if len(self._jobs) >= self._most and not self._make_room(peer, now):
                        return f"the Brain has {self._most} jobs already"
                    known = self._add(said.job, peer, now, holds=False)
            else:
                known.peer, known.heard_at = peer or known.peer, now
            if isinstance(said, JobEnded):
                if known is not None and not known.bucket.take(now):
                    return f"{said.job} says too much"
                self._post(said)
                return ""
            first = said.job not in self._waiting
            self._waiting[said.job] = said
            if first and known is not None and not known.bucket.take(now):
                self._late[said.job] = None
            elif first:
                self._post(said.job)
        return ""

    def _add(self, job: str, peer: str, now: float, *, holds: bool) -> _Known:
        known = self._jobs[job] = _Known(Bucket(REPORTS, REPORTS_S, now), peer, now, holds)
        return known

    def _make_room(self, peer: str, now: float) -> bool:
        """Have a job without slots give way to a new one of a peer; return whether there is one."""
        idle = {
            job: known
            for job, known in self._jobs.items()
            if not known.holds and job not in self._waiting
        }
        silent = [job for job, known in idle.items() if now - known.heard_at > SILENT_S]
        if silent:
            victim = min(silent, key=lambda job: idle[job].heard_at)
        else:
            counts = Counter(known.peer for known in self._jobs.values())
            most = max((counts[known.peer] for known in idle.values()), default=0)
            if most <= counts[peer] + 1:
                return False
            victim = [job for job, known in idle.items() if counts[known.peer] == most][-1]
        del self._jobs[victim]
        self._post(JobDropped(victim))
        return True

    def release(self) -> None:
        """Put the reports into the mailbox whose time has come."""
        if not self._late:
            return
        now = self._clock()
        with self._lock:
            ready = [
                job
                for job in self._late
                if job not in self._jobs or self._jobs[job].bucket.take(now)
            ]
            for job in ready:
                del self._late[job]
                self._post(job)

    def report_of(self, job: str) -> JobHeard:
        """Return the newest report of a job, which waits no more."""
        with self._lock:
            return self._waiting.pop(job)


# ---- the routes --------------------------------------------------------------------------


ANSWER_S = 5.0
AHEAD_S = 86400.0  # by which the clock of a job's host may differ
FIRST_PORT = 1024  # no driver listens below
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


# ---- the status --------------------------------------------------------------------------


def is_silent(cluster: Cluster, name: str) -> bool | None:
    """Return whether a job, or a former run of it, is not heard; None: there is no such job."""
    runs = [job for job in cluster.runs() if job.name == name]
    return any(not job.is_live for job in runs) if runs else None


def _state(job: Job) -> str:
    """Return "live", "silent", or "ended" if its workers end by themselves now."""
    if job.is_live:
        return "live"
    return "silent" if job.gone_at is None else "ended"


def status_document(url: str, started: float, cluster: Cluster) -> bytes:
    """Return the status as JSON: all jobs, and former runs that may have processes."""
    jobs = [
        {
            "job": job.name,
            "state": _state(job),
            "watched": job.is_watched,
            "arrived": job.arrived,
            "min": job.report.least,
            "max": job.report.most,
            "weight": job.report.weight,
            "held": job.report.held,
            "granted": job.granted,
            "holding": job.report.holding,
            "grant": job.grants[-1].number if job.grants else 0,
            "carried_out": job.report.carried_out,
            "speeds": [job.speeds.at[key] for key in sorted(job.speeds.at)],
            "reason": job.reason,
        }
        for job in cluster.runs()
    ]
    used = dict.fromkeys(cluster.hosts, 0)
    for job in cluster.runs():
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
