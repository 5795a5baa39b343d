"""How an agent shows that it lives, and why it ends.

An agent ends when the driver orders it, when a signal asks for it, or when it has no driver any
more (no next one came in time, this host is cut off, the token is unknown, the keys are sealed).

Batch systems and clouds send SIGTERM before they take a machine away, Slurm also what `--signal`
names. The agent reports the first of these signals to the driver, which has the workers leave at a
step boundary and then orders the agent to end. Shortly before the time is over, the agent stops the
workers that are still here. More of these signals are about the same leaving: they come from Slurm,
from the process that keeps the agent and passes them on, and again.

Until then an agent sends heartbeats and answers probes. Each heartbeat promises the next one within
a time, the length of its lease. This time follows from how late the agent's recent heartbeats were,
with everything that can delay them: scheduling on this machine, the network, the driver. So it is
short on a quiet network and grows under load by itself. An agent that gets no answer for that time,
and cannot connect to the driver's machine at all, asks the other hosts of its round. If it reaches
more than half of them, itself counted, the driver's machine is lost or cut off, and the world goes
on without it. Otherwise this host is cut off: the driver takes it for lost after the same time.

Probes come to a port of the agent, to which a driver that has taken over announces itself too.
Everybody may connect: what is answered tells nothing (`elastic_driver.reachability`), and what is
believed is signed (`elastic_driver.reachability`). Connections that say nothing keep nobody out,
however many they are: each peer (`rendezvous.fairness`) has a share of the places. Times are
seconds.
"""

import asyncio
import contextlib
import os
import signal
import socket
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, cast

from elastic_driver.errors import ExitCode
from elastic_driver.reachability import MAX_LINE, READ, probe
from elastic_driver.words import orders as documents
from elastic_driver.words.wire_events import HostLeaving
from launcher.agent.command_line import AgentConfig
from launcher.agent.driver_link import DriverLink, NoDriverError
from launcher.agent.worker_orders import Workers
from launcher.edge import TO_LEAVE
from rendezvous.client import RendezvousClient
from rendezvous.client_connections import parse_url
from rendezvous.errors import RefusedError, RendezvousError, UnreachableError
from rendezvous.fairness import THIS_MACHINE, Peers, of_user
from rendezvous.wire import Set, Written, expect

# ---- heartbeats ---------------------------------------------------------------------------


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


# ---- probes -------------------------------------------------------------------------------


LINE_S = 2.0  # for the lines of a connection to arrive
MOST = 256  # connections at the same time; one more, and the oldest of the peer with most has to go
SHARE = MOST // 4  # of one peer
WAITING = 4096  # connections that the kernel holds until they are accepted
AT_ONCE = 64  # that are accepted in one turn of the loop
QUESTIONS = 2  # that one connection may ask


class ProbePort:
    """Answers the questions of probes; hands another line, one for a connection, to `on_line`.

    `answer` returns the answer to a line, None if it is no question. The other line is answered
    with `READ`, whatever it says.
    """

    def __init__(
        self, answer: Callable[[bytes], bytes | None], on_line: Callable[[bytes], None]
    ) -> None:
        self.answer, self.on_line = answer, on_line
        self.open = dict[str, dict[_Connection, None]]()  # by peer, the oldest first
        self._listener: socket.socket | None = None
        self._peers: Peers | None = None
        self._known = {of_user(user) for user in (os.getuid(), 0)}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = set[asyncio.Task[None]]()

    async def listen(self, address: str, ports: Sequence[int] = (0,)) -> int:
        """Answer from now on; return the port, or 0 if that is not possible.

        `ports`: those to listen at, of which the first free one is taken; 0: any.

        Without it the driver notices the loss of this host later; that is no reason to end.
        """
        loop = self._loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            found = await loop.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
            for port in ports:
                with contextlib.suppress(OSError):
                    family, *_, (host, *_rest) = found[0]
                    self._listener = socket.create_server(
                        (str(host), port), family=family, backlog=WAITING
                    )
                    self._listener.setblocking(False)
                    self._peers = Peers()
                    loop.add_reader(self._listener, self._accept)
                    return int(self._listener.getsockname()[1])
        return 0

    def close(self) -> None:
        """Refuse connections from now on; may be called again."""
        if self._listener is not None and self._loop is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        if self._peers is not None:
            self._peers.close()
        for connections in tuple(self.open.values()):
            for connection in tuple(connections):
                connection.abort()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if self._listener is None or self._peers is None:
                return
            try:
                accepted, name = self._listener.accept()
            except OSError:  # nobody is there any more, or there is no descriptor
                return
            peer = self._peers.of(accepted, name)
            is_stranger = peer.startswith(THIS_MACHINE) and peer not in self._known
            if is_stranger and len(self.open.get(peer, ())) >= SHARE:
                accepted.close()  # at once, which costs least
                continue
            accepted.setblocking(False)
            task = asyncio.get_running_loop().create_task(self._serve(accepted, peer))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _serve(self, accepted: socket.socket, peer: str) -> None:
        own = self.open.get(peer, {})
        if len(own) >= SHARE:
            next(iter(own)).abort()
        elif sum(map(len, self.open.values())) >= MOST:
            next(iter(self.open[max(self.open, key=lambda each: len(self.open[each]))])).abort()
        connection = _Connection(self)
        self.open.setdefault(peer, {})[connection] = None
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: connection, accepted)
        except OSError:  # the client has gone already
            accepted.close()
            self.ended(connection)

    def ended(self, connection: "_Connection") -> None:
        """Forget a connection."""
        for peer, own in self.open.items():
            if connection in own:
                del own[connection]
                if not own:
                    del self.open[peer]
                return


class _Connection(asyncio.Protocol):
    def __init__(self, port: ProbePort) -> None:
        self._port = port
        self._data = b""
        self._questions = 0
        self._transport: asyncio.Transport | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._is_over = False

    def abort(self) -> None:
        """End the connection at once."""
        self._is_over = True
        self._port.ended(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._is_over:
            self._transport.abort()
        else:
            self._patience = asyncio.get_running_loop().call_later(LINE_S, self.abort)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None  # noqa: S101 - `connection_made` came before
        self._data += data
        while b"\n" in self._data[:MAX_LINE]:
            line, _, self._data = self._data.partition(b"\n")
            answer = self._port.answer(line)
            self._questions += 1
            if answer is None:
                self._port.on_line(line)
            self._transport.write(answer or READ)
            if answer is None or self._questions >= QUESTIONS:
                self._transport.close()
                return
        if len(self._data) >= MAX_LINE:
            self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        self._port.ended(self)
        if self._patience is not None:
            self._patience.cancel()


ORPHAN_GRACE_S = 5.0  # for workers whose driver is gone, or whose agent got a signal


class Lifetime:
    """The life of one agent on the running loop, until it has a reason to end.

    The agent sets `link` and `workers` once it has them. `notice`: the seconds in which it leaves
    in good order after a signal; 0: a signal ends it at once. `say` shows a sentence;
    `on_driver_gone` is called when there will be no driver any more.
    """

    def __init__(
        self,
        config: AgentConfig,
        say: Callable[[str], None],
        on_driver_gone: Callable[[], None],
    ) -> None:
        self.link: DriverLink | None = None
        self.workers: Workers | None = None
        self.notice = 0.0
        self.reason = ""
        self.exit_code = 0
        self.driver_gone = False
        self.waited_in_vain = False  # for the next driver
        self._config = config
        self._say = say
        self._on_driver_gone = on_driver_gone
        self._over = asyncio.Event()  # set with the reason, the status, and the driver's state
        self._tasks: list[asyncio.Task[None]] = []
        self._leave_timer: asyncio.TimerHandle | None = None  # runs after `_announce`

    @property
    def is_over(self) -> bool:
        """True once there is a reason to end."""
        return self._over.is_set()

    async def until_over(self) -> None:
        """Wait for a reason to end."""
        await self._over.wait()
        if self._leave_timer is not None:
            self._leave_timer.cancel()

    async def end_tasks(self) -> None:
        """End what `spawn` has begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def listen(self) -> None:
        """Watch the reasons to end on the running loop."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_bug)
        for number in (signal.SIGINT, signal.SIGHUP, *TO_LEAVE):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._config.lifeline:
            loop.add_reader(0, self._on_lifeline)

    def _on_signal(self, number: signal.Signals) -> None:
        """Leave in good order if the signal announces the end of the host; otherwise end."""
        if number not in TO_LEAVE:
            self.end(f"got {number.name}", 128 + number, ORPHAN_GRACE_S)
        elif not self.is_over and self._leave_timer is None:
            if self.notice:
                self._announce(number)
            else:
                self.end(f"got {number.name}", 128 + number, ORPHAN_GRACE_S)

    def _announce(self, number: signal.Signals) -> None:
        """Report that this host goes away, and end in time even if the driver does nothing.

        If there is no driver, the workers leave by themselves.
        """
        notice = self.notice
        patience = documents.time_to_leave(self.notice)
        reason = f"its agent got {number.name}"
        if self.link is not None:
            agent = self._config.host, self._config.incarnation
            self.link.report(HostLeaving(*agent, notice, reason))
        self._say(f"got {number.name}: leaving this host within {notice:g} s")
        if self.link is not None and self.link.absent:
            self.end(f"got {number.name} without a driver", 128 + number, 0.0, notice=notice)
            return
        late = f"got {number.name}, and workers were still here {patience:g} s later"
        loop = asyncio.get_running_loop()
        self._leave_timer = loop.call_later(
            patience, self.end, late, 128 + number, notice - patience
        )

    def _on_lifeline(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(0, 4096):
                asyncio.get_running_loop().remove_reader(0)
                link, why = self.link, "its pipe to us has closed"
                if self.workers is not None:
                    self.workers.read_nothing()
                if self._config.kept or link is None or not link.waits:
                    self._lose_driver(why)
                elif not self.is_over:
                    link.driver_died(why)

    def _on_bug(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException):
            self._say_trace(error)
        self.end(f"a bug of ours: {context.get('message')}", ExitCode.BUG, 0.0)

    def _lose_driver(self, why: str, grace: float = ORPHAN_GRACE_S, notice: float = 0.0) -> None:
        reason = f"the driver is gone: {why}"
        self.end(reason, ExitCode.UNAVAILABLE, grace, driver_gone=True, notice=notice)

    def end(
        self,
        reason: str,
        exit_code: int,
        grace: float,
        *,
        driver_gone: bool = False,
        notice: float = 0.0,
        interrupt: bool = False,
    ) -> None:
        """Begin to end: workers leave within `notice` seconds, or are killed in `grace` seconds.

        `interrupt`: they get SIGINT before SIGTERM.
        If it is called again, the shorter time counts, and the first reason unless the driver is
        gone.
        """
        if driver_gone or not self.is_over:
            self.reason = reason
            self.exit_code = int(exit_code)
            self.driver_gone = driver_gone
        self._over.set()
        if driver_gone:  # also for a driver that comes now
            self._on_driver_gone()
            for task in self._tasks:
                task.cancel()
        if self.workers is not None and notice:
            self.workers.leave(notice)
        elif self.workers is not None:
            self.workers.stop_all(grace, interrupt=interrupt)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a part of the agent until it ends."""
        self._tasks.append(asyncio.create_task(self._guarded(work)))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a part of the agent; its failure is the agent's end."""
        try:
            await work
        except CutOffError as error:  # the others train on without our workers
            self._lose_driver(str(error), grace=0.0)
        except NoDriverError as error:
            self.waited_in_vain = True
            self._lose_driver(str(error), notice=self.notice)
        except RendezvousError as error:
            self._lose_driver(str(error))
        except Exception as error:
            self._say_trace(error)
            self.end(f"a bug of ours: {error!r}", ExitCode.BUG, 0.0)

    def _say_trace(self, error: BaseException) -> None:
        for line in "".join(traceback.format_exception(error)).splitlines():
            self._say(line)
