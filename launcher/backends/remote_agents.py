"""Agents on other machines, started through a program that reaches them: ssh, srun or mpirun.

On the host `launcher.agent.remote` keeps the agent. The program's connection carries the token to
the host and the workers' output back, and ends with the agent. When the connection breaks, the
agent goes on, and the backend waits for its end over a new connection. So it does for an agent that
an earlier driver has started. To kill an agent, the backend opens another connection. If the host
cannot be reached, the driver ignores the agent from then on, and the agent ends when it has not
reached the driver for the heartbeat timeout. Each program has its own `RemoteShell`.

One asyncio loop on one thread, started with the first agent, serves all connections. At most
`AT_ONCE` connections are being set up at the same time.
"""

import asyncio
import concurrent.futures
import hmac
import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from elastic_driver.console import Console
from elastic_driver.errors import ClusterError
from elastic_driver.runtime.backend import (
    Backend,
    BackendJob,
    OnClosed,
    OnLost,
)
from elastic_driver.runtime.discovery import Hosts
from elastic_driver.token_roles import agent_token
from launcher.agent.remote import up_in
from launcher.backends.base import AgentPlan, agent_arguments, unfollowed
from launcher.backends.remote_shell import (
    EMPTY_AFTER_S,
    END_STDIN_S,
    FILES,
    ONLY_INTERACTIVE,
    Client,
    Login,
    OnLines,
    RemoteShell,
    precheck,
    quoted,
)
from launcher.network import endpoint_for
from rendezvous.auth import read_credentials, read_token_file
from rendezvous.errors import TokenError

AT_ONCE = 32  # connections being set up; more would overload the hosts and our cores
START_S = 60.0  # from the start of the connection until the agent is up
END_STDIN_BEFORE_S = 15.0  # if our command does not run by then, it is seen what reads stdin
END_S = 15.0  # for one attempt to kill an agent
CLOSE_S = 6.0  # the same, when the job is over
SURELY_UP_S = 3.0  # if no end was reported by then, only the connection to the agent is lost
SURELY_SEEN_S = 1.0  # for a connection to show the end of an agent that was killed
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
_LAST_WORDS_S = 3.0
_NAME_CHARS = 16
_MAX_SAID = 4096
_OURS = (b"[", b"elasticrun:")  # how lines of workers and agents begin


@dataclass(eq=False)
class _RemoteAgent:
    """An agent, from the driver's request until its end was reported to the driver."""

    host: str
    incarnation: int
    on_lost: OnLost
    adopted: bool = False  # an earlier driver has started it
    name: str = ""  # of its folder on the host
    client: Client | None = None
    up: asyncio.Event = field(default_factory=asyncio.Event)
    said: bytes = b""  # stderr: all of it until the agent is up, then only the program's own lines
    life: asyncio.Task[None] | None = None
    death: asyncio.Task[None] | None = None  # kills the agent, then reports its end to the driver

    @property
    def key(self) -> tuple[str, int]:
        """The host and the incarnation, as the driver knows them."""
        return self.host, self.incarnation


class RemoteBackend(Backend):
    """Starts agents on hosts that are reached through a program."""

    def __init__(self, job: BackendJob, shell: RemoteShell) -> None:
        self._job, self._shell = job, shell
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._on_closed: OnClosed | None = None
        # The following fields belong to the loop's thread.
        self._agents: dict[tuple[str, int], _RemoteAgent] = {}
        self._consoles: tuple[Console, ...] = ()
        self._told_of_stdin: set[str] = set()  # hosts
        self._slots = asyncio.Semaphore(AT_ONCE)

    def plan(self, host: str, incarnation: int, name: str = "NAME") -> AgentPlan:
        """Return what `start` executes; `name` is the agent's folder there.

        Raises ClusterError for a host that cannot be reached.
        """
        job = self._job
        endpoint = endpoint_for(host, job.endpoint, job.bind_host, self.look_up)
        arguments = agent_arguments(endpoint, host, incarnation)
        return AgentPlan(host, incarnation, self._shell.argv(host, "keep", name, *arguments))

    # ---- Backend -------------------------------------------------------------------------

    def describe(self, host: str) -> str:
        """See `Backend.describe`."""
        return shlex.join(self.plan(host, 1).argv)

    def check(self, hosts: Hosts) -> None:  # noqa: ARG002
        """See `Backend.check`."""
        self._shell.check()

    def find_problems(self, hosts: Hosts) -> dict[str, str]:
        """See `Backend.find_problems`."""
        return precheck([host for host, slots in hosts if slots], self._shell, self._job.cwd)

    def look_up(self, host: str) -> str:
        """See `Backend.look_up`."""
        return self._shell.look_up(host)

    def probe_address(self, host: str) -> tuple[str, int] | None:
        """See `Backend.probe_address`."""
        return self._shell.probe_address(host)

    def start(self, host: str, incarnation: int, on_lost: OnLost) -> None:
        """See `Backend.start`."""
        self._call(partial(self._begin, _RemoteAgent(host, incarnation, on_lost)))

    def report_connections(self, on_closed: OnClosed) -> None:
        """See `ReportsConnections.report_connections`."""
        self._on_closed = on_closed

    def adopt(self, host: str, incarnation: int, pid: int, on_lost: OnLost) -> None:  # noqa: ARG002
        """See `AdoptsAgents.adopt`."""
        agent = _RemoteAgent(host, incarnation, on_lost, adopted=True)
        self._call(partial(self._begin, agent))

    def kill(self, host: str, incarnation: int) -> None:
        """See `Backend.kill`; an agent that an earlier driver has started may be unknown."""
        self._call(partial(self._begin_kill, (host, incarnation)))

    def close(self, grace: float) -> None:
        """See `Backend.close`."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._closed = True
            self._loop = None
            self._thread = None
        if loop is None or thread is None:
            return
        over = asyncio.run_coroutine_threadsafe(self._close(max(grace, 0.0)), loop)
        concurrent.futures.wait([over], grace + CLOSE_S + 2 * _LAST_WORDS_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_LAST_WORDS_S)
        if not thread.is_alive():
            loop.close()

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function on the loop, which the first call starts."""
        with self._lock:
            if self._closed:
                return
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.call_soon(self._open_consoles)
                run = self._loop.run_forever
                self._thread = threading.Thread(target=run, name="remote-agents", daemon=True)
                self._thread.start()
            self._loop.call_soon_threadsafe(function)

    # ---- on the loop ---------------------------------------------------------------------

    def _begin(self, agent: _RemoteAgent) -> None:
        earlier = self._agents.get(agent.key)  # of this name, which is being killed
        self._agents[agent.key] = agent
        before = None if earlier is None else earlier.death
        agent.life = asyncio.create_task(self._live(agent, before))

    def _begin_kill(self, key: tuple[str, int]) -> None:
        if (agent := self._agents.get(key)) is None:
            agent = self._agents[key] = _RemoteAgent(*key, lambda _reason: None, adopted=True)
        agent.death = asyncio.create_task(self._kill(agent, END_S))

    async def _live(self, agent: _RemoteAgent, before: asyncio.Task[None] | None) -> None:
        """Keep an agent from the first connection to its end, and tell the driver of that end."""
        try:
            if before is not None:
                await asyncio.wait([before])
            reason = await (self._follow(agent) if agent.adopted else self._attend(agent))
        except (ClusterError, TokenError) as error:
            reason = str(error)
        except OSError as error:
            reason = f"cannot run {self._shell.program} to reach {agent.host}: {error.strerror}"
        except Exception as error:  # of any kind: a job must not wait for an agent without end
            reason = unfollowed(agent.host, error)
            if agent.client is not None:
                agent.client.kill()
        if agent.death is None:
            self._over(agent, reason)

    def _over(self, agent: _RemoteAgent, reason: str) -> None:
        """Tell the driver once that an agent has ended."""
        if self._agents.get(agent.key) is agent:
            del self._agents[agent.key]
            if not self._closed:
                agent.on_lost(reason)

    def _name_of(self, agent: _RemoteAgent) -> str:
        """Return the name of an agent's folder on its host; every driver of the run knows it.

        Raises TokenError. Nobody else can tell the name, because it depends on the token.
        """
        token = read_token_file(self._job.token_file).encode()
        which = f"{agent.host}/{agent.incarnation}".encode()
        return hmac.new(token, which, "sha256").hexdigest()[:_NAME_CHARS]

    async def _attend(self, agent: _RemoteAgent) -> str:
        """Start the agent and wait for its end; return the reason for the driver."""
        async with self._slots:
            ended = await self._connect(agent)
        code = await ended
        said = agent.said.decode(errors="replace")
        if not agent.up.is_set():
            login = Login() if agent.client is None else agent.client.login
            return self._shell.reason(agent.host, code, said, login)
        # A signal that killed the program here has not killed the agent there.
        ending = self._shell.ending(agent.host, code, said) if code >= 0 else None
        if ending is not None:
            return ending
        if code >= 0:
            self._closed_early(agent, said)
        lost = f"lost the {Path(self._shell.program).name} connection to {agent.host}"
        patience = asyncio.get_running_loop().call_later(
            SURELY_UP_S, self._say, f"{lost}; its agent goes on"
        )
        try:
            await self._follow(agent)
        finally:
            patience.cancel()
        return f"the agent on {agent.host} has ended, its connection was lost before"

    def _closed_early(self, agent: _RemoteAgent, said: str) -> None:
        """Tell the driver that the connection to an agent has closed; the agent may still live."""
        if self._on_closed is not None:
            closed = f"its {Path(self._shell.program).name} connection has closed{quoted(said)}"
            self._on_closed(agent.host, agent.incarnation, closed)

    async def _connect(self, agent: _RemoteAgent) -> asyncio.Task[int]:
        """Wait until the agent is up or its client has ended; return the task of that end."""
        token, fingerprint = read_credentials(self._job.token_file)
        said = f"{agent_token(token, agent.host)}\n{fingerprint}\n".encode()
        agent.name = self._name_of(agent)
        # In a thread: the way to the host may have to be looked up.
        plan = await asyncio.to_thread(self.plan, agent.host, agent.incarnation, agent.name)
        heard = partial(self._heard, agent)
        client = await Client.start(
            plan.argv,
            heard,
            self._shell.environ(),
            name=agent.name,
            given=said,
            end_stdin=START_S - END_STDIN_BEFORE_S,
        )
        agent.client = client
        ended = asyncio.create_task(client.ended())
        for console in self._consoles:
            console.attach(client.flow)
            ended.add_done_callback(partial(_detach, console, client))
        if not await _first_of(ended, agent.up):
            client.kill()
            await ended
            late = f"{agent.host}: no agent came up within {START_S:.0f} s"
            if not client.login.reached:
                late += f": {FILES} are not over"
            raise ClusterError(late + quoted(agent.said.decode(errors="replace")))
        return ended

    def _heard(self, agent: _RemoteAgent, stream: int, lines: list[bytes]) -> None:
        """Pass the agent's output on, without what login files printed before it."""
        if stream == 2:
            up = agent.up.is_set()
            said = [line + b"\n" for line in lines if not up or not line.startswith(_OURS)]
            agent.said = (agent.said + b"".join(said))[-_MAX_SAID:]
        elif not agent.up.is_set():
            lines = self._after_up(agent, lines)
        if agent.up.is_set() and lines:
            self._consoles[stream - 1].write(b"\n".join(lines) + b"\n")

    def _after_up(self, agent: _RemoteAgent, lines: list[bytes]) -> list[bytes]:
        """Return the lines after the one that says that the agent is up, if it is here."""
        for number, line in enumerate(lines):
            if (empty := up_in(line, agent.name)) is not None:
                agent.up.set()
                agent.said = b""
                login = Login() if agent.client is None else agent.client.login
                if login.empty > empty and agent.host not in self._told_of_stdin:
                    self._told_of_stdin.add(agent.host)
                    got = f"got an empty line after {EMPTY_AFTER_S:.0f} s"
                    self._say(f"{agent.host}: {FILES} read stdin, and {got}; {ONLY_INTERACTIVE}")
                return lines[number + 1 :]
        return []

    async def _follow(self, agent: _RemoteAgent) -> str:
        """Wait over new connections until the agent is gone, without a deadline.

        If the host is gone too, the agent's lease expires, and `kill` ends this wait. Return the
        reason for the driver.
        """
        delay = FIRST_RETRY_S
        while not await self._saw_end(agent):
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_RETRY_S)
        return f"the agent on {agent.host} has ended"

    async def _saw_end(self, agent: _RemoteAgent) -> bool:
        """Wait for an agent's end on its host; return False if this connection ends before."""
        found = asyncio.Event()
        said = b""
        name = self._name_of(agent)

        def heard(stream: int, lines: list[bytes]) -> None:
            nonlocal said
            if stream == 1 and any(up_in(line, name) is not None for line in lines):
                found.set()
                agent.up.set()
            elif stream == 2:
                said = (said + b"\n".join(lines) + b"\n")[-_MAX_SAID:]

        try:
            async with self._slots:
                agent.client = await self._run(agent, "wait", None, heard)
                ended = asyncio.create_task(agent.client.ended())
                await _first_of(ended, found)
        except OSError:  # no process can be started at this moment
            return False
        code = await ended
        if code > 0 and found.is_set():
            self._closed_early(agent, said.decode(errors="replace"))
        # An agent that was never found may run all the same, in another folder.
        return code == 0 and agent.up.is_set()

    async def _kill(self, agent: _RemoteAgent, patience: float) -> None:
        """End an agent on its host; report its end to the driver even if that fails."""
        alone = "which ends by itself when it has not reached the driver for the heartbeat timeout"
        failed = f"{agent.host} cannot be reached to end its agent, {alone}"
        try:
            client = await self._run(agent, "end", b"", lambda *_: None)
            code = await asyncio.wait_for(client.ended(), patience)
        except (asyncio.TimeoutError, OSError, TokenError):
            code = -1
        except ClusterError as error:  # no agent can be there
            code = -1
            failed = str(error)
        except Exception as error:  # of any kind: the driver waits for the end of this agent
            code = -1
            failed = f"{unfollowed(agent.host, error)}, {alone}"
        if agent.life is not None:
            if code == 0:  # then what waits for it on the host ends, too
                await asyncio.wait([agent.life], timeout=SURELY_SEEN_S)
            agent.life.cancel()
        if agent.client is not None:
            agent.client.kill()
        self._over(agent, f"the agent on {agent.host} was killed" if code == 0 else failed)

    async def _run(
        self, agent: _RemoteAgent, word: str, given: bytes | None, heard: OnLines
    ) -> Client:
        """Run one of `launcher.agent.remote`'s commands on an agent's host."""
        argv = self._shell.argv(agent.host, word, self._name_of(agent))
        patience = None if given is None else END_STDIN_S
        name = self._name_of(agent)
        environ = self._shell.environ()
        return await Client.start(argv, heard, environ, name=name, given=given, end_stdin=patience)

    # ---- output, and the end -------------------------------------------------------------

    def _open_consoles(self) -> None:
        out = Console(1, "stdout", on_trouble=self._say)
        self._consoles = (out, Console(2, "stderr", on_trouble=lambda _sentence: None))

    def _say(self, sentence: str) -> None:
        self._consoles[1].write(f"elasticrun: {sentence}\n".encode())

    async def _close(self, grace: float) -> None:
        lives = [agent.life for agent in self._agents.values() if agent.life is not None]
        if lives:
            await asyncio.wait(lives, timeout=grace)
        left = tuple(self._agents.values())
        for agent in left:
            agent.death = asyncio.create_task(self._kill(agent, CLOSE_S))
        await asyncio.gather(*(agent.death for agent in left if agent.death is not None))
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=_LAST_WORDS_S)  # for clients that were killed
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_LAST_WORDS_S)
        for console in self._consoles:
            await console.drain(_LAST_WORDS_S)
            console.close()


async def _first_of(ended: asyncio.Task[int], up: asyncio.Event) -> bool:
    """Wait until the program has ended or the agent is up; return False after `START_S`."""
    coming = asyncio.create_task(up.wait())
    pending = (ended, coming)
    try:
        done, _ = await asyncio.wait(pending, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
    finally:  # also where the caller is cancelled: nobody else would end this task
        coming.cancel()
    return bool(done)


def _detach(console: Console, client: Client, _ended: object) -> None:
    console.detach(client.flow)
