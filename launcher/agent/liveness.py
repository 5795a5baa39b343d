"""Signs of life of an agent: it answers probes and sends heartbeats.

Each heartbeat promises the next one within a time, the length of its lease. This time follows from
how late the agent's recent heartbeats were, with everything that can delay them: scheduling on this
machine, the network, the driver. So it is short on a quiet network and grows under load by itself.
An agent that gets no answer for that time, and cannot connect to the driver's machine at all, asks
the other hosts of its round. If it reaches more than half of them, itself counted, the driver's
machine is lost or cut off, and the world goes on without it. Otherwise this host is cut off: the
driver takes it for lost after the same time. Times are seconds.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_driver.reachability import probe
from rendezvous.client import RendezvousClient
from rendezvous.client_connections import parse_url
from rendezvous.errors import RefusedError, RendezvousError, UnreachableError
from rendezvous.wire import Set, Written, expect

CONNECT_S = 0.6  # for a machine to accept one of several connections
HEAD_START_S = 0.1  # for the driver's machine to answer, before other hosts are asked
LEAST_MARGIN_S = 0.6  # beyond the interval: two retransmissions of a lost packet
MARGIN_FACTOR = 4.0  # times the largest recent lateness
FIRST_LATENESS_S = 0.25  # assumed while a job starts
FORGET = 0.98  # the share of the largest lateness that is left after one more heartbeat


class CutOffError(RendezvousError):
    """The driver's machine cannot be reached: it takes this host for lost."""


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
    """Sends the heartbeats of one agent.

    `peers`: where other hosts of the present round answer probes; None: there was no round yet.
    `waits`: without a round, nothing ends by itself that a next driver may want. `usage` returns a
    new value for `usage_key`, if there is one; a heartbeat takes it along.
    """

    client: RendezvousClient
    key: str
    promise: Promise
    peers: Sequence[tuple[str, int]] | None = None
    waits: bool = False
    usage_key: str = ""
    usage: Callable[[], bytes | None] = lambda: None

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
        value = self.usage()
        along = () if value is None else (Set(self.usage_key, value),)
        expect(self.client.batch(beat, *along, deadline=deadline)[0], Written)

    async def _see_whether_cut_off(self, error: UnreachableError) -> None:
        """Raise CutOffError if neither the driver's machine nor most hosts accept connections."""
        address = parse_url(self.client.url)
        driver = str(address.hostname), int(address.port or 0)
        others = asyncio.create_task(self._reaches_most())
        try:
            if await _reaches(*driver) or await others:
                return
        finally:
            others.cancel()
        raise CutOffError(f"this host is cut off from it ({error})") from error

    async def _reaches_most(self) -> bool:
        """Return whether connections to more than half of the round's hosts are possible."""
        if self.peers is None:
            return self.waits
        await asyncio.sleep(HEAD_START_S)
        answers = await asyncio.gather(*(_reaches(*peer) for peer in self.peers))
        return 2 * (1 + sum(answers)) > 1 + len(answers)


async def _reaches(address: str, port: int) -> bool:
    """Return whether a machine accepts or refuses connections, and so can be reached."""
    return await probe(address, port, CONNECT_S) != "silent"
