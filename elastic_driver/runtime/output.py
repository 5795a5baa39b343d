"""Output of agents that have lost their connection to the terminal: `POST /v1/output`.

An agent writes to the terminal of the driver that has started it. When this driver has died, the
agent sends its lines and those of its workers to the next one, which writes them to its own stdout
and stderr. Runs on the server's loop. Times are seconds.
"""

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import web

from elastic_driver import contract
from elastic_driver.console import STALL_S, Console
from elastic_driver.core.documents import OutputLine, OutputLines
from rendezvous.auth import Role
from rendezvous.web import JSON, caller_of, forbidden, read_json

_decode = msgspec.json.Decoder(OutputLines).decode
_STREAMS = {1: "stdout", 2: "stderr"}


class AgentsOutput:
    """Writes the lines of agents to our stdout and stderr, in the order of their numbers.

    Args:
        say: shows a sentence to the user.
        stall: seconds for which a terminal that nothing reads holds an agent up.
    """

    def __init__(self, say: Callable[[str], None], *, stall: float = STALL_S) -> None:
        self._say, self._stall = say, stall
        self._consoles: dict[int, Console] = {}  # by the number of the stream
        self._taken: dict[tuple[str, int], int] = {}  # the last line of each agent

    def add_to(self, app: web.Application) -> None:
        """Mount the route."""
        app.router.add_post(contract.OUTPUT_PATH, self.post_lines)
        app.on_cleanup.append(self._close)

    async def post_lines(self, request: web.Request) -> web.Response:
        """Write lines that are new; the answer comes when they are written.

        If the terminal takes nothing, the answer comes after `stall` seconds, and lines are dropped
        from then on, as an agent drops them that writes to the terminal itself.
        """
        sent, caller = await read_json(request, _decode), caller_of(request)
        if caller.role is Role.AGENT and caller.subject != sent.host:
            raise forbidden(f"the agent of {caller.subject} may not write for {sent.host}")
        agent = sent.host, sent.incarnation
        known = self._taken.get(agent, 0)
        self._taken[agent] = max(known, sent.first + len(sent.lines) - 1)
        self._write(sent.lines[max(0, known + 1 - sent.first) :])
        await asyncio.gather(*(each.drain(self._stall) for each in self._consoles.values()))
        return web.Response(body=b'{"accepted":true}', status=202, content_type=JSON)

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
