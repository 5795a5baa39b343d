"""Output of agents that have lost their connection to the terminal: `POST /v1/output`.

An agent writes to the terminal of the driver that has started it. When this driver has died, the
agent sends its lines and those of its workers to the next one, which writes them to its own stdout
and stderr. The number of the last line is in the journal before the answer, so the driver after
this one writes no line again. Runs on the server's loop. Times are seconds.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import msgspec
from aiohttp import web

from elastic_driver import contract, token_roles
from elastic_driver.console import STALL_S, Console
from elastic_driver.token_roles import AGENTS
from elastic_driver.words.progress import OutputLine, OutputLines
from rendezvous.routes import Accepted, Route, accepted, caller_of, forbidden, mount, read_json

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
        mount(app, ROUTES, self)
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


ROUTES = (
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
