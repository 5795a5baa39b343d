"""Agents on this machine: each is a child of the driver's process.

Several names of this machine (localhost, 127.0.0.2, its own name) are separate hosts, each with an
agent of its own. An agent's stdin is a pipe whose other end only this process holds: when the
driver dies, even by SIGKILL, the agents see it close. This process is a child subreaper: processes
that a killed agent leaves behind become its children and are ended here.

The agent of a single host is executed. With several hosts, agents are forked from a warm parent
that has imported for all of them, and each has a warm parent of its own from the start (docs/adr/
0011). A driver that goes on with an earlier one's agents imports soon after it has found them. If
hosts may come at any time, one more agent is kept ready, a *spare*, which becomes the agent of the
next host (docs/adr/0012). If agents cannot be forked, they are executed.

An agent that an earlier driver has started is not our child, and the kernel does not hand us what
it leaves behind. `AdoptedProcess` and `end_marked` look at all processes of this user, and take one
for the job's only if it was started with the job's variables (`contract.JOB_MARK` is no other
job's). An agent is this user's, though root can read all users' variables, and anybody may have
these.

One asyncio loop on one thread, started with the first agent, runs `LocalAgents`, but for its
`abort` and `of_earlier`. The kernel ends the warm parent with the loop's thread. Times are seconds.
"""

import asyncio
import contextlib
import itertools
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from elastic_driver import contract
from elastic_driver.console import say
from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.runtime.backend import Backend, BackendJob, OnLost
from elastic_driver.runtime.discovery import Hosts
from elastic_driver.words.orders import JobSpec, decode
from launcher.agent import processes
from launcher.agent.command_line import SPARE_FLAG, send_arguments
from launcher.agent.folders import sweep_scratch
from launcher.agent.processes import ProcessSpec, StartError, is_of_this_user, readable
from launcher.agent.warm.starter import WorkerStarter
from launcher.agent.warm.warm_plan import NotWarmable, warm_plan_for
from launcher.backends.base import AgentPlan, agent_arguments, describe_end, unfollowed
from launcher.network import is_this_machine, meeting_address, own_address
from rendezvous.auth import read_credentials
from rendezvous.client import RendezvousClient

# ---- agents of an earlier driver ----------------------------------------------------------


_LOOK_AGAIN_S = 0.02
_LOOKS = 10  # at the parents of a process; more only where some are hidden from us


@dataclass(frozen=True)
class AdoptedProcess:
    """An agent's process, known by a descriptor that never names another process."""

    pid: int
    pidfd: int

    @classmethod
    def open(cls, pid: int, marks: Mapping[str, str]) -> "AdoptedProcess | None":
        """Return the live process with this pid; None if there is none with these variables."""
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError):
            return None
        # Looked at after it was opened: if it has these variables, the descriptor is the agent's.
        with contextlib.ExitStack() as unless_kept:
            unless_kept.callback(os.close, pidfd)
            with contextlib.suppress(psutil.Error):
                if _has(process := psutil.Process(pid), marks) and is_of_this_user(process):
                    unless_kept.pop_all()
                    return cls(pid, pidfd)
        return None

    async def ended(self) -> None:
        """Wait for its end."""
        await readable(self.pidfd)

    def kill(self) -> None:
        """Kill it, if it lives; not after `close`."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Free the descriptor."""
        os.close(self.pidfd)


def find_agent(host: str, incarnation: int, marks: Mapping[str, str]) -> int:
    """Return the pid of an agent of the job by its command line; 0 if there is none."""
    for process in marked(marks):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            given = dict(itertools.pairwise(words))
            named = (given.get("--host"), given.get("--incarnation")) == (host, str(incarnation))
            if named and is_of_this_user(process):
                return process.pid
    return 0


def marked(marks: Mapping[str, str]) -> Iterator[psutil.Process]:
    """Return the live processes of this machine that were started with all these variables."""
    return (process for process in psutil.process_iter() if _has(process, marks))


def _has(process: psutil.Process, marks: Mapping[str, str]) -> bool:
    with contextlib.suppress(psutil.Error, OSError):  # of another user, or it has just ended
        return marks.items() <= process.environ().items()
    return False


def _line_of(process: psutil.Process) -> set[int]:
    """Return the pids of a process and its ancestors, as far as we may see them.

    It looks again if one of them ends meanwhile: its children have other parents then.
    """
    line: list[int] = []
    for _ in range(_LOOKS):
        line = [process.pid]
        with contextlib.suppress(psutil.Error):
            while parent := psutil.Process(line[-1]).ppid():
                line.append(parent)
            break
    return set(line)


async def end_marked(
    marks: Mapping[str, str], of_others: Callable[[], set[int]], patience: float
) -> None:
    """Kill the processes with these variables, but for those below a pid that `of_others` returns.

    It looks again until none is left, or for `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while left := [p for p in marked(marks) if not of_others() & _line_of(p)]:
        for process in left:
            with contextlib.suppress(psutil.Error):  # psutil compares the time of its start
                process.kill()
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(_LOOK_AGAIN_S)


# ---- all agents of this machine -----------------------------------------------------------


CALM_S = 2.0  # without a new agent, before a spare is started that would slow the others down
STRANGERS_S = 5.0  # between two looks for ended processes that nobody else reaps
LAST_RESORT_S = 2.0  # for the kernel to end killed processes
AGENT = (sys.executable, "-m", "launcher.agent")
_SPARE = ("", 0)  # no host and no incarnation: the key of the agent that waits for them


@dataclass(eq=False)
class LocalAgent:
    """An agent, from the driver's request until its end was reported to the driver."""

    plan: AgentPlan
    on_lost: OnLost
    life: "asyncio.Task[None] | None" = None
    pid: int = 0  # 0: it is not started yet
    lifeline: int = -1  # the writing end of its stdin
    adopted: AdoptedProcess | None = None  # None: it is our child

    @property
    def key(self) -> tuple[str, int]:
        """The host and the incarnation, as the driver knows them."""
        return self.plan.host, self.plan.incarnation


class LocalAgents:
    """The agents on this machine that a driver has started or adopted.

    Args:
        env: the variables that mark the processes of this job.
        read_spec: returns the job's specification for an agent of this incarnation.
        several: there will be agents of more than one host.
        grows: more hosts may come at any time; implies `several`.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        read_spec: Callable[[int], JobSpec],
        *,
        several: bool,
        grows: bool,
    ) -> None:
        self._env = dict(env)
        self._read_spec = read_spec
        self._several, self._grows = several or grows, grows
        self._agents: dict[tuple[str, int], LocalAgent] = {}
        self._lives = set[asyncio.Task[None]]()  # also of agents that are no longer wanted
        self._first: str | None = None  # host that had an agent
        self._starter = WorkerStarter(_say, self._env)
        self._launched = False  # whether the starter has had a warm parent
        self._calm: asyncio.TimerHandle | None = None
        self._importing: asyncio.Task[None] | None = None
        self._resumed = False  # there were agents of an earlier driver
        self._closed = False

    # ---- on any thread -------------------------------------------------------------------

    def abort(self) -> None:
        """End a wait for a warm parent that is stopped."""
        self._starter.abort()

    def of_earlier(
        self, host: str, incarnation: int, pid: int, on_lost: OnLost
    ) -> LocalAgent | None:
        """Return an agent that an earlier driver has started; None if its process is not here."""
        found = AdoptedProcess.open(pid, self._env)
        if found is None:
            return None
        return LocalAgent(AgentPlan(host, incarnation, ()), on_lost, pid=pid, adopted=found)

    # ---- on the loop ---------------------------------------------------------------------

    def reap_strangers(self) -> None:
        """Reap what other parts of this process have left, such as helpers of a discovery."""
        processes.reap_strangers()
        asyncio.get_running_loop().call_later(STRANGERS_S, self.reap_strangers)

    def begin(self, agent: LocalAgent) -> None:
        """Make the spare this agent, or start the agent."""
        self._expect(agent.plan.host)
        if not self._give_spare(agent):
            self._add(agent)

    def _expect(self, host: str) -> None:
        """Prepare for agents of more than one host."""
        self._first = self._first or host
        self._several |= host != self._first
        if not self._grows and not (self._resumed and self._several):
            return
        if self._calm is not None:
            self._calm.cancel()
        act = self._add_spare if self._grows else self._import
        self._calm = asyncio.get_running_loop().call_later(CALM_S, act)

    def adopt(self, agent: LocalAgent) -> None:
        """Watch an agent that an earlier driver has started."""
        if agent.adopted is not None and agent.key not in self._agents:
            self._resumed = True
            self._expect(agent.plan.host)
            self._agents[agent.key] = agent
            self._begin_life(agent, self._follow(agent, agent.adopted))

    def _begin_life(self, agent: LocalAgent, life: Coroutine[Any, Any, None]) -> None:
        agent.life = asyncio.get_running_loop().create_task(life)
        self._lives.add(agent.life)
        agent.life.add_done_callback(self._lives.discard)

    async def _follow(self, agent: LocalAgent, process: AdoptedProcess) -> None:
        """Wait for an adopted agent's end, clean up after it, and tell the driver."""
        host = agent.plan.host
        try:
            await process.ended()
            left = {**self._env, contract.HOSTNAME: host}
            await end_marked(left, self._pids, LAST_RESORT_S)
            sweep_scratch()
            self._over(agent, f"the agent on {host} has ended")
        except Exception as error:
            process.kill()
            self._over(agent, unfollowed(host, error))
        finally:
            process.close()

    def _pids(self) -> set[int]:
        """Return the pids of our agents that live."""
        return {agent.pid for agent in self._agents.values() if agent.pid}

    def _add(self, agent: LocalAgent) -> None:
        self._agents[agent.key] = agent
        self._begin_life(agent, self._live(agent, self._several))

    def _add_spare(self) -> None:
        if _SPARE not in self._agents:
            plan = AgentPlan(*_SPARE, (*AGENT, SPARE_FLAG), self._env)
            self._add(LocalAgent(plan, lambda _reason: None))

    def _import(self) -> None:
        """Start a warm parent for the next agents; that of an earlier driver has ended."""
        self._importing = asyncio.get_running_loop().create_task(self._warm(1))

    def _give_spare(self, agent: LocalAgent) -> bool:
        """Make the spare this agent; return False if there is none."""
        spare = self._agents.get(_SPARE)
        if spare is None or not spare.pid:
            return False
        try:
            send_arguments(spare.lifeline, agent.plan.argv[len(AGENT) :])
        except OSError:  # it has ended
            return False
        del self._agents[_SPARE]
        spare.plan, spare.on_lost = agent.plan, agent.on_lost
        self._agents[spare.key] = spare
        return True

    async def _live(self, agent: LocalAgent, fork: bool) -> None:
        """Follow an agent from its start to its end, which the driver hears of once."""
        try:
            if fork:
                await self._warm(agent.plan.incarnation)
            self._start(agent)
            reason = await self._end_of(agent)
        except (StartError, OSError) as error:
            host = agent.plan.host
            reason = f"cannot start an agent on {host}: {error}; is the machine out of processes?"
        except Exception as error:  # of any kind: a job must not wait for an agent without end
            reason = unfollowed(agent.plan.host, error)
        if agent.lifeline >= 0:
            os.close(agent.lifeline)  # which ends an agent that cannot be watched
        self._over(agent, reason)

    def _over(self, agent: LocalAgent, reason: str) -> None:
        del self._agents[agent.key]
        if not self._closed:
            agent.on_lost(reason)

    async def _warm(self, incarnation: int) -> None:
        """Wait until agents can be forked; a warm parent that is lost meanwhile ends the wait."""
        if not self._launched:
            self._launched = True
            try:
                self._starter.launch(warm_plan_for(self._read_spec(incarnation), os.environ))
            except NotWarmable:
                pass
            except Exception as error:  # any: without a warm parent, agents still start
                _say(f"agents on this machine import for themselves: {error!r}")
        await self._starter.ready(for_next=False)

    def _start(self, agent: LocalAgent) -> None:
        """Start the agent in a session of its own, which Ctrl-C in our terminal does not reach."""
        own, agent.lifeline = os.pipe2(os.O_CLOEXEC)
        plan = agent.plan
        env = {**os.environ, **plan.env}
        try:
            with processes.stdin_for_workers() as given:
                spec = ProcessSpec(plan.argv, env, str(plan.cwd), 1, 2, own, given)
                agent.pid = self._starter.start(spec)
        finally:
            os.close(own)

    async def _end_of(self, agent: LocalAgent) -> str:
        """Wait for an agent's end and clean up after it; return the reason for the driver."""
        await processes.wait_for_end(agent.pid)
        orphans: set[int] = set()

        def look() -> set[int]:
            """Return the processes that agents left to us: of the agent's session or with our mark.

            Other children of this process (a library's user may have some) have neither, and
            processes whose agent lives are not our children.
            """
            here = set(processes.children())  # before asking for those that are not orphans
            here -= self._starter.own_pids()
            for pid in here - {other.pid for other in self._agents.values()}:
                if processes.stems_from(pid, agent.pid, self._env):
                    orphans.add(pid)
            return orphans

        await processes.end_all(look, LAST_RESORT_S)
        sweep_scratch()
        return describe_end(agent.plan.host, processes.reap(agent.pid) or 0)

    def kill(self, key: tuple[str, int]) -> None:
        """Kill an agent; one that an earlier driver has started is looked for."""
        agent = self._agents.get(key)
        if agent is None and key != _SPARE and (pid := find_agent(*key, self._env)):
            agent = self.of_earlier(*key, pid, lambda _reason: None)
            if agent is not None:
                self.adopt(agent)
        if agent is None or agent.life is None:
            return
        if agent.adopted is not None:
            agent.adopted.kill()
        elif not agent.pid:
            agent.life.cancel()
            host = agent.plan.host
            self._over(agent, f"the agent on {host} was no longer wanted before it had begun")
        else:
            os.kill(agent.pid, signal.SIGKILL)

    async def close(self, grace: float) -> None:
        """Wait for the ends of all agents, and kill those that live after `grace` seconds."""
        self._closed = True
        if self._calm is not None:
            self._calm.cancel()
        if self._importing is not None:
            self._importing.cancel()
        for agent in tuple(self._agents.values()):
            if not agent.pid or agent.key == _SPARE:
                self.kill(agent.key)
        for patience in (grace, LAST_RESORT_S):
            if lives := [agent.life for agent in self._agents.values() if agent.life is not None]:
                await asyncio.wait(lives, timeout=patience)
            for agent in self._agents.values():
                if agent.adopted is not None:
                    agent.adopted.kill()
            processes.kill_trees(a.pid for a in self._agents.values() if a.adopted is None)
        if self._lives:  # that were cancelled, and what they do at last
            await asyncio.wait(self._lives, timeout=LAST_RESORT_S)
        self._starter.close()
        if self._resumed:  # an agent that has not reported to us may have left something
            await end_marked(self._env, set, LAST_RESORT_S)
            sweep_scratch()


def _say(sentence: str) -> None:
    say(f"elasticrun: {sentence}")


# ---- the backend --------------------------------------------------------------------------


SPEC_S = 5.0  # for the rendezvous to return the job's specification, which is there already


class LocalBackend(Backend):
    """Starts agents as children of this process.

    Args:
        endpoint: the rendezvous' URL.
        token_file: the driver's token, of which each agent derives its own. Its path also marks the
            processes of this job. An agent removes it and the endpoint file beside it when this
            process dies without doing that.
        address: the address at which other machines reach this one; None: they need not.
        several: there will be agents of more than one host.
        grows: more hosts may come at any time; implies `several`.
        resumable: another driver may go on with the job, and needs its files.
    """

    def __init__(
        self,
        endpoint: str,
        token_file: Path,
        *,
        address: str | None = None,
        several: bool = False,
        grows: bool = False,
        resumable: bool = False,
    ) -> None:
        self._endpoint, self._address = endpoint, address
        self._resumable = ("--resumable",) if resumable else ()
        self._token_file = token_file.absolute()
        self._env = {contract.JOB_MARK: str(self._token_file)}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._agents = LocalAgents(self._env, self._read_spec, several=several, grows=grows)

    def plan(self, host: str, incarnation: int) -> AgentPlan:
        """Return what `start` executes; raises ClusterError for another machine's name."""
        if not is_this_machine(host):
            raise ClusterError(
                f"{host} is not this machine, and the local backend starts nothing elsewhere; "
                "name localhost, or choose another --backend"
            )
        token_file = str(self._token_file)
        argv = (
            *(*AGENT, *agent_arguments(self._endpoint, host, incarnation)),
            *("--token-file", token_file, "--address", self._address or meeting_address(host)),
            *("--lifeline", "--orphan-file", token_file),
            *("--orphan-file", str(self._token_file.with_name("endpoint.json"))),
            *self._resumable,
        )
        return AgentPlan(host, incarnation, argv, self._env)

    # ---- Backend -------------------------------------------------------------------------

    def describe(self, host: str) -> str:
        """See `Backend.describe`."""
        return shlex.join(self.plan(host, 1).argv)

    def check(self, hosts: Hosts) -> None:
        """See `Backend.check`: another machine would be tried over and over, in vain."""
        for host, slots in hosts:
            if slots and not is_this_machine(host):
                raise UsageError(
                    f"{host} is not this machine, and --backend local starts nothing elsewhere; "
                    "name localhost, or leave the host out"
                )

    def start(self, host: str, incarnation: int, on_lost: OnLost) -> None:
        """See `Backend.start`."""
        try:
            agent = LocalAgent(self.plan(host, incarnation), on_lost)
        except ClusterError as error:
            on_lost(str(error))
            return
        self._call(partial(self._agents.begin, agent))

    def adopt(self, host: str, incarnation: int, pid: int, on_lost: OnLost) -> None:
        """See `AdoptsAgents.adopt`; if its process is not here, its heartbeats say if it lives."""
        if (agent := self._agents.of_earlier(host, incarnation, pid, on_lost)) is not None:
            self._call(partial(self._agents.adopt, agent))

    def kill(self, host: str, incarnation: int) -> None:
        """See `Backend.kill`; an agent that an earlier driver has started is looked for."""
        self._call(partial(self._agents.kill, (host, incarnation)))

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function on the loop, which the first call starts."""
        if self._loop is None:
            processes.become_subreaper()
            self._loop = asyncio.new_event_loop()
            run = self._loop.run_forever
            self._thread = threading.Thread(target=run, name="local-agents", daemon=True)
            self._thread.start()
            self._loop.call_soon_threadsafe(self._agents.reap_strangers)
        self._loop.call_soon_threadsafe(function)

    def close(self, grace: float) -> None:
        """See `Backend.close`."""
        loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        self._agents.abort()  # the loop may wait for a warm parent that is stopped
        asyncio.run_coroutine_threadsafe(self._agents.close(max(grace, 0.0)), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()
        processes.become_subreaper(False)

    def _read_spec(self, incarnation: int) -> JobSpec:
        token, known_by = read_credentials(self._token_file)
        with RendezvousClient(self._endpoint, token, SPEC_S, fingerprint=known_by) as client:
            entry = client.get(contract.spec_key(incarnation))
        if entry is None:
            raise ClusterError("the rendezvous does not have the job's specification")
        return decode(JobSpec, entry.value)


def make_backend(job: BackendJob) -> LocalBackend:
    """Return the backend that is registered as `local`."""
    named = {host for host, slots in job.hosts if slots}
    here = {host for host in named if is_this_machine(host)}
    return LocalBackend(
        job.endpoint,
        job.token_file,
        address=own_address(job.bind_host),
        several=len(here) > 1,
        # Hosts that come are names of this machine if all known ones are.
        grows=job.grows and here == named,
        resumable=job.resumable,
    )
