"""`POST /v1/logs`: agents send the lines of their workers. `GET /v1/logs`: readers get them.

The answer to an agent says how long it has to wait before it sends again: all hosts together send
a bounded number of requests and bytes per second, however many they are. An agent sends a request
again if it got no answer; lines that are known already are not kept twice. Runs on the server's
loop; files are read by a thread.
"""

import asyncio
from weakref import WeakValueDictionary

import msgspec
from aiohttp import web

from elastic_driver import contract, token_roles
from elastic_driver.runtime.worker_logs import LogPage, LogQuery, WorkerLogs, read_page
from elastic_driver.token_roles import AGENTS, PEOPLE
from elastic_driver.words.progress import LogsTaken, WorkerLines
from rendezvous.auth import Caller
from rendezvous.routes import JSON, Problem, Route, caller_of, forbidden, mount, read_json

LEAST_WAIT_S = 0.5  # between two requests of an agent
REQUESTS_PER_S = 200  # of all agents together
BYTES_PER_S = 4 << 20  # of all agents together
_decode = msgspec.json.Decoder(WorkerLines).decode


class LogRoutes:
    """The handlers of both routes."""

    def __init__(self, logs: WorkerLogs) -> None:
        self._logs = logs
        self._taken: dict[
            str, tuple[int, int]
        ] = {}  # by host: incarnation, number of its last line
        # Each client's pages are read one after the other, so that one does not use up the threads.
        self._reading: WeakValueDictionary[Caller, asyncio.Lock] = WeakValueDictionary()

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        mount(app, ROUTES, self)

    async def post_lines(self, request: web.Request) -> web.Response:
        """Keep lines of an agent's workers."""
        sent, caller = await read_json(request, _decode), caller_of(request)
        of_others = [x for x in sent.lines if contract.host_of_worker(x.worker) != sent.host]
        if (caller.role is token_roles.AGENT and caller.subject != sent.host) or of_others:
            raise forbidden(f"the agent of {caller.subject} may not write for others")
        incarnation, last = self._taken.get(sent.host, (0, 0))
        known = last if incarnation == sent.incarnation else 0
        again = sent.first <= known
        if incarnation <= sent.incarnation:
            newest = max(known, sent.first + len(sent.lines) - 1)
            self._taken[sent.host] = sent.incarnation, newest
            new = sent.lines[max(0, known + 1 - sent.first) :]
            self._logs.add(sent.host, new, 0 if again else sent.dropped)
        size = request.content_length or 0
        fair = len(self._taken) * max(1 / REQUESTS_PER_S, size / BYTES_PER_S)
        body = msgspec.json.encode(LogsTaken(max(LEAST_WAIT_S, fair)))
        return web.Response(body=body, status=202, content_type=JSON)

    async def get_lines(self, request: web.Request) -> web.Response:
        """Answer with a page of lines."""
        try:
            query = msgspec.convert(dict(request.query), LogQuery, strict=False)
        except msgspec.ValidationError as error:
            problem = f"the query has the wrong form: {error}"
            raise Problem(422, "invalid", problem, "see GET /v1/openapi.json") from error
        reading = self._reading.setdefault(caller_of(request), asyncio.Lock())
        async with reading:
            page = await asyncio.to_thread(read_page, self._logs.folder, query)
        return web.Response(body=msgspec.json.encode(page), content_type=JSON)


ROUTES = (
    Route(
        "POST",
        contract.LOGS_PATH,
        AGENTS,
        LogRoutes.post_lines,
        LogsTaken,
        WorkerLines,
        code=202,
        note="the answer says how long to wait before the next ones",
    ),
    Route(
        "GET",
        contract.LOGS_PATH,
        PEOPLE,
        LogRoutes.get_lines,
        LogPage,
        query=LogQuery,
        note="with the place of the next one, and whether there is more now",
    ),
)
