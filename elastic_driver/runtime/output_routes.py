"""The routes by which agents send lines of workers, and by which readers get them.

`POST /v1/output`: an agent writes to the terminal of the driver that has started it. When this
driver has died, the agent sends its lines and those of its workers to the next one, which writes
them to its own stdout and stderr. The number of the last line is in the journal before the answer,
so the driver after this one writes no line again.

`POST /v1/logs`: lines that are kept (`worker_logs`), for `GET /v1/logs`. The answer to an agent
says how long it has to wait before it sends again: all hosts together send a bounded number of
requests and bytes per second, however many they are. An agent sends a request again if it got no
answer; lines that are known already are not kept twice.

Runs on the server's loop; files are read by a thread. Times are seconds.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias
from weakref import WeakValueDictionary

import msgspec
from aiohttp import web

from elastic_driver import contract, token_roles
from elastic_driver.console import STALL_S, Console
from elastic_driver.runtime.worker_logs import LogPage, LogQuery, WorkerLogs, read_page
from elastic_driver.token_roles import AGENTS, PEOPLE
from elastic_driver.words.progress import LogsTaken, OutputLine, OutputLines, WorkerLines
from rendezvous.auth import Caller
from rendezvous.routes import (
    JSON,
    Accepted,
    Problem,
    Route,
    accepted,
    caller_of,
    forbidden,
    mount,
    read_json,
)

_decode = msgspec.json.Decoder(OutputLines).decode
_STREAMS = {1: "stdout", 2: "stderr"}
_NUMBERS = "job/output/"  # prefix of keys in the journal; clients cannot have keys of `job/` there
_JOURNAL_S = 0.25  # for the journal; lines are not held up by one that is away
# Keeps values for the next driver, then calls back from any thread.
Keep: TypeAlias = Callable[[dict[str, bytes | None], Callable[[], None]], None]


def without_numbers(keys: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the keys of an earlier driver's users, without the numbers of lines."""
    return {key: value for key, value in keys.items() if not key.startswith(_NUMBERS)}


class AgentsOutput:
    """Writes the lines of agents to our stdout and stderr, in the order of their numbers.

    Args:
        say: shows a sentence to the user.
        stall: seconds for which a terminal that nothing reads holds an agent up.
        keep: keeps the numbers of lines for the next driver; None: nothing does.
        kept: the keys that earlier drivers have kept.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        stall: float = STALL_S,
        keep: Keep | None = None,
        kept: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        self._say, self._stall, self._keep = say, stall, keep
        self._consoles: dict[int, Console] = {}  # by the number of the stream
        # The last line of each agent, by the key of its number in the journal.
        self._taken = {key: int(n) for key, n in kept.items() if key.startswith(_NUMBERS)}

    def add_to(self, app: web.Application) -> None:
        """Mount the route."""
        mount(app, _OUTPUT_ROUTES, self)
        app.on_cleanup.append(self._close)

    async def post_lines(self, request: web.Request) -> web.Response:
        """Write lines that are new; the answer comes when they are written.

        If the terminal takes nothing, the answer comes after `stall` seconds, and lines are dropped
        from then on, as an agent drops them that writes to the terminal itself.
        """
        sent, caller = await read_json(request, _decode), caller_of(request)
        if caller.role is token_roles.AGENT and caller.subject != sent.host:
            raise forbidden(f"the agent of {caller.subject} may not write for {sent.host}")
        agent = f"{_NUMBERS}{sent.host}/{sent.incarnation}"
        known = self._taken.get(agent, 0)
        self._taken[agent] = last = max(known, sent.first + len(sent.lines) - 1)
        self._write(sent.lines[max(0, known + 1 - sent.first) :])
        await asyncio.gather(*(each.drain(self._stall) for each in self._consoles.values()))
        if last > known and self._keep is not None:
            await self._note(self._keep, agent, last)
        return accepted()

    async def _note(self, keep: Keep, agent: str, last: int) -> None:
        """Wait until the journal has the number, but not for long."""
        loop, noted = asyncio.get_running_loop(), asyncio.Event()

        def kept() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(noted.set)

        keep({agent: b"%d" % last}, kept)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(noted.wait(), _JOURNAL_S)

    def _write(self, lines: tuple[OutputLine, ...]) -> None:
        for stream, name in _STREAMS.items():
            if stream not in self._consoles:
                console = Console(stream, name, on_trouble=self._say, stall=self._stall)
                self._consoles[stream] = console
            text = "".join(f"{line.text}\n" for line in lines if line.stream == stream)
            self._consoles[stream].write(text.encode())

    async def _close(self, _app: web.Application) -> None:
        for console in self._consoles.values():
            await console.drain(self._stall)
            console.close()


_OUTPUT_ROUTES = (
    Route(
        "POST",
        contract.OUTPUT_PATH,
        AGENTS,
        AgentsOutput.post_lines,
        Accepted,
        OutputLines,
        note="they go to elasticrun's stdout and stderr",
    ),
)


# ---- lines that are kept -------------------------------------------------------------------


LEAST_WAIT_S = 0.5  # between two requests of an agent
REQUESTS_PER_S = 200  # of all agents together
BYTES_PER_S = 4 << 20  # of all agents together
_decode_kept = msgspec.json.Decoder(WorkerLines).decode


class LogRoutes:
    """The handlers of both routes."""

    def __init__(self, logs: WorkerLogs) -> None:
        self._logs = logs
        # By host: incarnation, number of its last line.
        self._taken: dict[str, tuple[int, int]] = {}
        # Each client's pages are read one after the other, so that one does not use up the threads.
        self._reading: WeakValueDictionary[Caller, asyncio.Lock] = WeakValueDictionary()

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        mount(app, _LOG_ROUTES, self)

    async def post_lines(self, request: web.Request) -> web.Response:
        """Keep lines of an agent's workers."""
        sent, caller = await read_json(request, _decode_kept), caller_of(request)
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


_LOG_ROUTES = (
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

ROUTES = (*_OUTPUT_ROUTES, *_LOG_ROUTES)
