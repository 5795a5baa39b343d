"""Signs of life of an agent: it answers probes and sends heartbeats.

Each heartbeat promises the next one within a time, the length of its lease. This time follows from
how late the agent's recent heartbeats were, with everything that can delay them: scheduling on this
machine, the network, the driver. So it is short on a quiet network and grows under load by itself.
An agent that gets no answer for that time, and cannot connect to the driver's machine at all, is
cut off: the driver takes its host for lost after the same time. Times are seconds.
"""

import asyncio
from dataclasses import dataclass
from typing import cast

from elastic_driver.reachability import probe
from rendezvous.client import RendezvousClient, parse_url
from rendezvous.errors import RefusedError, RendezvousError, UnreachableError
from rendezvous.wire import Set, Written, expect

ANSWER = b"+"
CONNECT_S = 0.6  # for the driver's machine to accept one of several connections
LEAST_MARGIN_S = 0.6  # beyond the interval: two retransmissions of a lost packet
MARGIN_FACTOR = 4.0  # times the largest recent lateness
FIRST_LATENESS_S = 0.25  # assumed while a job starts
FORGET = 0.98  # the share of the largest lateness that is left after one more heartbeat
_PROBES_AT_ONCE = 64


class CutOffError(RendezvousError):
    """The driver's machine cannot be reached: it takes this host for lost."""


class ProbeAnswer(asyncio.Protocol):
    """Sends one byte over each connection, and closes it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer."""
        connection = cast("asyncio.Transport", transport)
        connection.write(ANSWER)
        connection.close()


async def answer_probes(address: str) -> tuple[asyncio.Server | None, int]:
    """Answer probes from now on; return the server and its port, or None and 0.

    Without it the driver notices the loss of this host later; that is no reason to end.
    """
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(ProbeAnswer, address, 0, backlog=_PROBES_AT_ONCE)
    except OSError:
        return None, 0
    return server, server.sockets[0].getsockname()[1]


@dataclass
class Promise:
    """The time within which the next heartbeat comes, learned from those before."""

    interval: float  # between two heartbeats
    most: float  # --heartbeat-timeout
    lateness: float = FIRST_LATENESS_S  # the largest one, forgotten little by little

    def learn(self, late: float) -> None:
        """Take in how much later than planned a heartbeat was answered."""
        self.lateness = max(late, FORGET * self.lateness)

    @property
    def seconds(self) -> float:
        """The length of the next lease."""
        margin = max(LEAST_MARGIN_S, MARGIN_FACTOR * self.lateness)
        return min(self.interval + margin, self.most)


@dataclass
class Heartbeats:
    """Sends the heartbeats of one agent."""

    client: RendezvousClient
    key: str
    promise: Promise

    async def run(self) -> None:
        """Send heartbeats for ever.

        Raises CutOffError, or RendezvousError if the driver has given this agent up.
        """
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            await asyncio.sleep(due - clock())
            lease = self.promise.seconds
            beat = Set(self.key, lease=lease)
            try:
                # The time that the last heartbeat has promised ends with this call's deadline.
                patience = max(lease - (clock() - due), CONNECT_S)
                await asyncio.to_thread(self._send, beat, patience)
            except UnreachableError as error:
                await self._see_whether_cut_off(error)
                due = clock()  # and nothing is learned: the driver itself is stopped or slow
            except RefusedError as error:
                raise RendezvousError(f"it has given this agent up ({error})") from error
            else:
                self.promise.learn(clock() - due)
                due = max(due + self.promise.interval, clock())

    def _send(self, beat: Set, deadline: float) -> None:
        expect(self.client.batch(beat, deadline=deadline)[0], Written)

    async def _see_whether_cut_off(self, error: UnreachableError) -> None:
        """Raise CutOffError if the driver's machine accepts no connection."""
        address = parse_url(self.client.url)
        host, port = str(address.hostname), int(address.port or 0)
        if await probe(host, port, CONNECT_S, speaks=False) == "silent":
            raise CutOffError(f"this host is cut off from it ({error})") from error
