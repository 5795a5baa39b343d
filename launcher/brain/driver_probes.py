"""Whether the drivers of jobs live: each has proved it once, on a connection that the Brain keeps.

The end of that connection is the end of the driver, unless it proves itself again. Whoever has its
port by now cannot: a question is for one run of one job at one address, and says nothing to others.
A connection costs no thread; it ends with its job. Everything runs on one loop; times are seconds.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import socket
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, cast

from elastic_driver.brain.messages import DriverProbed, ProbeDriver
from elastic_driver.reachability import Asked, DriverPresence
from elastic_driver.token_roles import job_token

LOOK_S = 4.0  # to connect and to hear the proof
# A machine that has gone without a word is noticed after half a minute.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}

Run: TypeAlias = tuple[str, float]  # a job, and when the run of it began
Result: TypeAlias = Literal["answered", "refused", "unproved", "silent"]


class Drivers:
    """Connections to drivers that have proved themselves, one for each run.

    `token`: the Brain's own, from which it makes those of jobs. `post` takes the results of looks,
    and "lost" for a connection that has ended.
    """

    def __init__(self, token: str, post: Callable[[DriverProbed], None]) -> None:
        self._token, self._post = token, post
        self.kept: dict[Run, _Connection] = {}

    async def look(self, asked: ProbeDriver) -> None:
        """Post whether a driver lives."""
        kept = self.kept.get((asked.job, asked.began))
        stands = kept is not None and kept.asked.liveness == asked.liveness
        result: Result = "answered" if stands else await self._ask(asked)
        self._post(DriverProbed(asked.job, asked.began, asked.liveness, result))

    async def keep_only(self, places: Mapping[Run, str]) -> None:
        """Close all connections but those of these runs to these addresses."""
        for run, kept in tuple(self.kept.items()):
            if places.get(run) != kept.asked.liveness:
                self._release(run)

    def _release(self, run: Run) -> None:
        if (kept := self.kept.pop(run, None)) is not None:
            kept.close()

    async def _ask(self, asked: ProbeDriver) -> Result:
        """Connect, and keep the connection if the driver proves itself."""
        host, _, port = asked.liveness.rpartition(":")
        try:
            address, number = str(ipaddress.ip_address(host.strip("[]"))), int(port)
        except ValueError:
            return "silent"  # no address of any use here
        token = job_token(self._token, asked.job)
        question = DriverPresence(token, asked.began, asked.liveness).ask()
        connection, proved = _Connection(asked, question, self._ended), False
        try:
            proved = await asyncio.wait_for(connection.ask(address, number), LOOK_S)
        except ConnectionRefusedError:
            return "refused"
        except (OSError, OverflowError, asyncio.TimeoutError):
            return "unproved" if connection.is_made else "silent"
        finally:
            if not proved:
                connection.close()
        if not proved:
            return "unproved"
        run = asked.job, asked.began
        self._release(run)
        self.kept[run] = connection
        return "answered"

    def _ended(self, connection: "_Connection") -> None:
        asked = connection.asked
        if self.kept.get((asked.job, asked.began)) is connection:
            del self.kept[asked.job, asked.began]
            self._post(DriverProbed(asked.job, asked.began, asked.liveness, "lost"))


class _Connection(asyncio.Protocol):
    """One question to a driver; `ended` is called when the connection has ended after a proof."""

    def __init__(
        self, asked: ProbeDriver, question: Asked, ended: Callable[["_Connection"], None]
    ) -> None:
        self.asked, self._question, self._on_end = asked, question, ended
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._proved: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def is_made(self) -> bool:
        """Whether somebody has accepted it."""
        return self._transport is not None

    async def ask(self, address: str, port: int) -> bool:
        """Connect and ask; return whether the answer proves the driver. Raises OSError."""
        await asyncio.get_running_loop().create_connection(lambda: self, address, port)
        return await self._proved

    def close(self) -> None:
        """End it without a word."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        own = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # it has ended already
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                own.setsockopt(socket.IPPROTO_TCP, option, value)
        self._transport.write(self._question.question)

    def data_received(self, data: bytes) -> None:
        right, self._data = self._question.answer, self._data + data
        if self._proved.done() or len(self._data) > len(right):
            self.close()  # a driver says nothing more
        elif len(self._data) == len(right):
            self._settle(hmac.compare_digest(self._data, right))

    def connection_lost(self, _error: Exception | None) -> None:
        self._settle(False)
        self._on_end(self)

    def _settle(self, proved: bool) -> None:
        if not self._proved.done():
            self._proved.set_result(proved)
