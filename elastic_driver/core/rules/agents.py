"""News of agents: one is up, one is lost, one does not come up.

With its agent a host's workers are gone. The agent is started again in place, or its host put in
cool-down. Times are monotonic seconds.
"""

from dataclasses import dataclass

from elastic_driver.core.decisions import Announce
from elastic_driver.core.events import AgentLost, AgentReady
from elastic_driver.core.rules.base import Rule
from elastic_driver.core.rules.endings import Endings
from elastic_driver.core.rules.fleet import AgentNews, AgentState, HostAgent
from elastic_driver.core.rules.outcome import Cause
from elastic_driver.core.rules.placement import Placement
from elastic_driver.core.rules.workers import ACTIVE, RUNNING, Worker, WorkerNews


@dataclass(slots=True)
class Agents(Rule):
    """Decides what follows from the news of agents."""

    endings: Endings
    placement: Placement

    def on_ready(self, event: AgentReady, now: float) -> None:
        """Note that an agent is up and its host's slots can be used."""
        agent = self.fleet.ready(event)
        if agent is None:
            late = f"agent {event.host}.{event.incarnation} is not the one that is awaited"
            self.effects.ignore(late)
            return
        self.capacity.note_change()
        number, at = self.rounds.current.number, f"at {agent.address}"
        self.effects.decide(Announce("agent_started", at, number, agent.host, pid=event.pid))

    def on_lost(self, event: AgentLost, now: float) -> None:
        """Record that an agent has ended, or is silent, and its workers with it."""
        agent = self.fleet.current(event.host, event.incarnation)
        if agent is None:
            self.effects.ignore(f"agent {event.host}.{event.incarnation} is not the present one")
            return
        reason = event.reason or "no reason was given"
        self.effects.announce("agent_lost", reason, host=event.host)
        was_up = agent.state is AgentState.READY
        self.fleet.apply(agent, AgentNews.LOST)
        there = self.workers.on_host(event.host)
        failed = [worker for worker in there if self._lose_worker(worker, now)]
        if failed and self.outcome.first_success is None and self.outcome.end is None:
            self.endings.count_failure(now, member=any(worker.is_member for worker in failed))
        if self.outcome.end is None:
            self._host_without_agent(agent, reason, now, was_up=was_up)

    def advance(self, now: float) -> None:
        """Give up an agent that takes longer than `start_timeout` to come up."""
        for agent in self.fleet.starting()[:1]:
            timeout = self.settings.start_timeout
            waiting = f"the agent on {agent.host} starts"
            if self.effects.due_or_set_alarm(agent.asked_at + timeout, now, waiting):
                self.placement.stop_agent(agent, "it did not come up in time")
                late = f"agent not up within {timeout:g} s"
                self._host_without_agent(agent, late, now, was_up=False)

    def _lose_worker(self, worker: Worker, now: float) -> bool:
        """Record that a worker died with its agent; return whether that is a failure."""
        failed = not worker.leaving and worker.state in ACTIVE
        was_running = worker.state is RUNNING
        if worker.leaving:
            self.workers.apply(worker, WorkerNews.TOLD_TO_STOP)
        self.workers.apply(worker, WorkerNews.EXITED_NONZERO)
        self.effects.announce("worker_lost", "its agent was lost", worker)
        if failed:
            self.endings.record_loss(worker, Cause.AGENT, now)
        elif worker.leaving:
            self.rounds.left_early(worker, now, running=was_running)
        return failed

    def _host_without_agent(
        self, agent: HostAgent, reason: str, now: float, *, was_up: bool
    ) -> None:
        """Start the agent again in place, or put its host in cool-down."""
        self.capacity.note_change()
        host = agent.host
        if self.hosts.drained(host) is not None:
            return  # it went early, and was to go: no trouble of the host's
        cooldown = self.hosts.agent_failed(host, now, reason, started=was_up)
        if cooldown is not None:
            self.effects.announce("host_blacklisted", cooldown, host=host)
        elif self.hosts.usable(host) and not self.outcome.finishing:
            self.placement.start_agent(host, now, f"again in place: {reason}")
