"""The agents that the local backend runs: their starts, their lives and their ends.

The agent of a single host is executed. With several hosts, agents are forked from a warm parent
that has imported for all of them, and each has a warm parent of its own from the start. A driver
that goes on with an earlier one's agents imports soon after it has found them. If hosts may come at
any time, one more agent is kept ready, a *spare*, which becomes the agent of the next host
(`launcher.agent.spare`). If agents cannot be forked, they are executed.

Everything here runs on the loop of `LocalBackend`, but for `abort` and `of_earlier`. The kernel
ends the warm parent with the loop's thread. Times are seconds.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_driver import contract
from elastic_driver.console import say
from elastic_driver.runtime.backend import OnLost
from elastic_driver.words.orders import JobSpec
from launcher.agent import processes, stdin
from launcher.agent.folders import sweep_scratch
from launcher.agent.processes import ProcessSpec, StartError
from launcher.agent.spare import SPARE_FLAG, send_arguments
from launcher.agent.warm.command import NotWarmable
from launcher.agent.warm.plan import plan_for
from launcher.agent.warm.starter import WorkerStarter
from launcher.backends.adopted import AdoptedProcess, end_marked, find_agent
from launcher.backends.base import AgentPlan, describe_end, unfollowed

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
        self._env, self._read_spec = dict(env), read_spec
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
                self._starter.launch(plan_for(self._read_spec(incarnation), os.environ))
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
            with stdin.of_this_process() as given:
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
