"""`GET /v1/live`: the job as it changes, as server-sent events, for the page.

| event | data |
|---|---|
| `hello` | the role of the reader, and the driver's time (unix seconds) |
| `status` | `Picture`; a later one has only what has changed, unless it is `full` |
| `history` | `words.progress.History`: the last hour first, then what is new |
| `events` | a list of new lines of the event log, each with its sentence |
| `end` | the job is over, nothing follows |

One task looks at the job for all readers, and only while there is one. A look has the status once
a second, less often if that takes long: looks take at most 1/`SHARE` of the time. What changed
is encoded once and sent to all. A reader that was too slow for a change gets the whole picture.

A large job is sent in groups: rows for at most `MOST_ROWS` hosts and workers, those in trouble
first, and counts for all. Everything runs on the server's loop. Times are seconds.
"""

import asyncio
import heapq
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct
from msgspec.structs import replace

from elastic_driver import contract
from elastic_driver.job.status import HostStatus, MemberStatus
from elastic_driver.runtime import machine_api
from elastic_driver.runtime.event_log import EventLog, LoggedEvent
from elastic_driver.runtime.status_document import (
    JobDocument,
    RunCounters,
    StartingDocument,
    read_status,
)
from elastic_driver.runtime.status_routes import KEEP_ALIVE_S
from elastic_driver.token_roles import WATCHERS
from elastic_driver.words.log_lines import read_line, sentence
from elastic_driver.words.progress import History, Measured
from rendezvous.auth import Caller
from rendezvous.routes import EVENT_STREAM, Problem, Route, caller_of, mount
from rendezvous.wire import UNREADABLE

LOOK_S, SOON_S = 1.0, 0.2  # between two looks; from an event to the next look
SHARE = 100.0  # the wait after a look is at least this many times as long as the look
LONGEST_S = 10.0  # between two looks, however long they take
MOST_ROWS = 100  # hosts, and workers, that are sent one by one
MOST_EVENTS = 1000  # that a new reader gets
Row = dict[str, Any]


# What is shown before the job begins, and where there is none.
_NO_JOB = JobDocument(
    run_id="",
    endpoint="",
    started=0.0,
    state="checking",
    kind="",
    reason="",
    exit_code=None,
    round=0,
    round_state="",
    size=0,
    wanted=None,
    min_np=0,
    max_np=None,
    members=(),
    hosts=(),
    counters=RunCounters(0, None, 0, 0, 0, None, 0, 0),
    ignored="",
)
_COPIED = (
    *("run_id", "command", "started", "state", "kind", "reason", "round", "round_state"),
    *("size", "wanted", "min_np", "max_np", "slow", "node_check"),
)
_OF_JOB = ("step", "total", "steps_per_s", "samples_per_s", "samples", "numbers")
_OF_WORKER = ("step", "steps_per_s", "samples_per_s", "memory", "cpu")
_OF_HOST = ("cpu", "memory_used", "memory_total", "disk_used", "disk_total", "net_in", "net_out")
_TROUBLE = ("lost", "failure", "stopping", "starting", "ready")


class Picture(Struct):
    """The job, as it is sent. `hosts` and `members` are rows by name; None: the row is gone."""

    full: bool
    job: Row
    hosts: dict[str, Row | None]
    members: dict[str, Row | None]


def picture_of(document: bytes) -> Picture:
    """Return the picture of a status; raises one of `UNREADABLE` if it is no JSON."""
    status = _job_in(document)
    job: Row = {name: getattr(status, name) for name in _COPIED}
    job |= {name: getattr(status.measured, name) for name in _OF_JOB}
    job["goodput"] = status.goodput or {}
    counted = ("failures", "resets", "max_restarts")
    job["counters"] = {name: getattr(status.counters, name) for name in counted}
    states: dict[str, Counter[str]] = {}
    for member in status.members:
        states.setdefault(member.host, Counter())[member.state] += 1
    job["states"] = _sum(states.values())
    job["host_states"] = dict(Counter(host.state for host in status.hosts))
    job["host_count"], job["member_count"] = len(status.hosts), len(status.members)
    slow = {each.worker: f"{each.kind} ×{each.ratio:.2f}" for each in status.slow}
    hosts = _worst(status.hosts, lambda host: _calm(host, states.get(host.host)))
    members = _worst(status.members, lambda m: m.worker not in slow and m.state not in _TROUBLE)
    return Picture(
        True,
        job,
        {host.host: _host_row(host, states.get(host.host), status.measured) for host in hosts},
        {m.worker: _member_row(m, status.measured, slow.get(m.worker, "")) for m in members},
    )


def _job_in(document: bytes) -> JobDocument:
    try:
        status = read_status(document)
    except msgspec.ValidationError:
        return _NO_JOB
    if isinstance(status, JobDocument):
        return status
    check = status.node_check if isinstance(status, StartingDocument) else None
    return replace(
        _NO_JOB, run_id=status.run_id, started=status.started, state=status.state, node_check=check
    )


def _sum(counters: Iterable[Counter[str]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return dict(total)


def _worst(rows: tuple[Any, ...], calm: Callable[[Any], Any]) -> Iterable[Any]:
    """Return all rows; of more than `MOST_ROWS`, so many, those first for which `calm` is least."""
    if len(rows) <= MOST_ROWS:
        return rows
    return heapq.nsmallest(MOST_ROWS, rows, key=calm)


def _calm(host: HostStatus, states: Counter[str] | None) -> tuple[bool, bool]:
    well = states is None or states.keys() <= {"running", "spare"}
    return host.state == "usable" and not host.evidence, well


def _host_row(host: HostStatus, states: Counter[str] | None, measured: Measured) -> Row:
    row: Row = {name: getattr(host, name) for name in ("slots", "state", "reason", "agent")}
    row["cooldown_left"] = round(host.cooldown_left)
    row["states"] = dict(states or {})
    row["evidence"] = host.evidence
    usage = measured.hosts.get(host.host)
    if usage is not None:
        row |= {name: getattr(usage, name) for name in _OF_HOST}
        row["gpus"] = [{"used": gpu.used, "name": gpu.name} for gpu in usage.gpus]
    return row


def _member_row(member: MemberStatus, measured: Measured, slow: str) -> Row:
    names = ("host", "slot", "rank", "state", "pid", "leaving")
    row: Row = {name: getattr(member, name) for name in names} | {"slow": slow}
    found = measured.workers.get(member.worker)
    if found is not None:
        row |= {name: getattr(found, name) for name in _OF_WORKER}
    return row


def changes(before: Picture, now: Picture) -> Picture:
    """Return what has changed since the picture before."""
    job = {name: value for name, value in now.job.items() if before.job.get(name) != value}
    hosts, members = _changed(before.hosts, now.hosts), _changed(before.members, now.members)
    return Picture(False, job, hosts, members)


def _changed(
    before: Mapping[str, Row | None], now: Mapping[str, Row | None]
) -> dict[str, Row | None]:
    news = {name: row for name, row in now.items() if before.get(name) != row}
    return news | {name: None for name in before if name not in now}


def event_row(line: bytes) -> Row:
    """Return a line of the event log with its sentence, without what is empty.

    `loss` is there, and true, if a worker was lost.
    """
    facts: Row = msgspec.json.decode(line)
    read = read_line(line)
    text = sentence(facts.get("event", ""), facts.get("reason", ""), facts)
    kept = {name: value for name, value in facts.items() if value not in (None, "", -1)}
    loss = {"loss": True} if read is not None and read.is_loss else {}
    return {**kept, **loss, "text": text}


def _sse(event: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.encode(), msgspec.json.encode(data))


class Live:
    """The handler of the route; one task looks at the job for all readers.

    Args:
        status: returns the status document, or raises Problem.
        history: returns the history since then (unix seconds).
        log: the event log.
        one_stream: counts one stream of a client while its context is open; raises Problem if
            there are too many. It is called with the client and a hint for it.
    """

    def __init__(
        self,
        status: Callable[[], Awaitable[bytes]],
        history: Callable[[float], History],
        log: EventLog,
        one_stream: Callable[[Caller, str], AbstractContextManager[None]],
    ) -> None:
        self._status, self._history, self._log, self._one_stream = status, history, log, one_stream
        self._readers: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._picture, self._current = Picture(True, {}, {}, {}), False
        self._looks, self._until = 0, 0.0  # how many; the last moment of the history
        self._delta = b""  # what the last look has changed
        self._events: deque[tuple[int, bytes]] = deque(maxlen=MOST_EVENTS)  # number, JSON
        self._last_event = 0

    def add_to(self, app: web.Application) -> None:
        """Mount the route."""
        mount(app, ROUTES, self)

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Send the job as it changes, as server-sent events, until it is over."""
        with self._one_stream(caller_of(request), "close a page of this job"):
            response = web.StreamResponse(headers={"Cache-Control": "no-store"})
            response.content_type = EVENT_STREAM
            await response.prepare(request)
            role = caller_of(request).role.value
            await response.write(_sse("hello", {"role": role, "now": time.time()}))
            woken = asyncio.Event()
            self._readers.add(woken)
            try:
                if self._task is None:
                    self._task = asyncio.create_task(self._look_on())
                await self._send(response, woken)
            finally:
                self._readers.discard(woken)
                if not self._readers and self._task is not None:
                    self._task.cancel()
                    self._task = None
            await response.write_eof()
        return response

    async def _send(self, response: web.StreamResponse, woken: asyncio.Event) -> None:
        """Write the whole picture, then what changes, until the log is closed."""
        seen, number, over = -1, 0, False
        while not over:
            ended = self._log.closed  # read first: events logged before the end are sent
            over = ended or self._task is None or self._task.done()
            if ended:
                self._take_events()
            new = [row for n, row in self._events if n > number]
            parts = [b"event: events\ndata: [%b]\n\n" % b",".join(new)] if new else []
            number = self._last_event
            if self._current and seen != self._looks:
                behind, seen = self._looks - seen, self._looks
                parts.append(self._delta if behind == 1 else self._whole())
            if ended:
                parts.append(_sse("end", {}))
            if parts:
                await response.write(b"".join(parts))
            if not over:
                try:
                    await asyncio.wait_for(woken.wait(), KEEP_ALIVE_S)
                except asyncio.TimeoutError:
                    await response.write(b": still here\n\n")
                woken.clear()

    def _whole(self) -> bytes:
        return _sse("status", self._picture) + _sse("history", self._history(0.0))

    # ---- looks -----------------------------------------------------------------------------

    async def _look_on(self) -> None:
        """Look at the job again and again; cancelled when the last reader has gone."""
        loop = asyncio.get_running_loop()
        self._events.clear()
        self._last_event, self._until, self._current = 0, 0.0, False
        try:
            with self._log.listening(lambda: machine_api.call_on(loop, self._news.set)):
                await self._look_until_closed(loop)
        finally:
            self._wake()

    async def _look_until_closed(self, loop: asyncio.AbstractEventLoop) -> None:
        least = due = 0.0
        while not self._log.closed:
            self._news.clear()
            if self._take_events():
                due = min(due, loop.time() + SOON_S)
            if loop.time() >= max(due, least):
                began = loop.time()
                with suppress(Problem, *UNREADABLE):  # it is over, or has too much to do
                    await self._look()
                least = loop.time() + min(SHARE * (loop.time() - began), LONGEST_S)
                due = loop.time() + LOOK_S
            self._wake()
            with suppress(asyncio.TimeoutError):
                pause = max(due, least) - loop.time()
                await asyncio.wait_for(self._news.wait(), max(0.0, pause))
            await asyncio.sleep(SOON_S / 4)  # events often come together

    def _wake(self) -> None:
        for reader in self._readers:
            reader.set()

    async def _look(self) -> None:
        now = picture_of(await self._status())
        history = self._history(self._until)
        self._until = history.t[-1] if history.t else self._until
        delta = changes(self._picture, now)
        self._delta = _sse("status", delta) if delta.job or delta.hosts or delta.members else b""
        if history.t:
            self._delta += _sse("history", history)
        self._picture, self._current = now, True
        self._looks += 1

    def _take_events(self) -> bool:
        """Take in new events of the log; return whether there were any."""
        new: list[LoggedEvent] = self._log.since(self._last_event)[-MOST_EVENTS:]
        for each in new:
            self._last_event = each.n
            self._events.append((each.n, msgspec.json.encode(event_row(each.line))))
        return bool(new)


ROUTES = (Route("GET", contract.LIVE_PATH, WATCHERS, Live.get, EVENT_STREAM),)
