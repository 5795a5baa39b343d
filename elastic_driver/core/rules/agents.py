"""News of agents (one is up, one is lost, one does not come up), and leases that expire.

The workers of a host end with its agent. The agent is started again in place, or its host is put in
cool-down, or is probed until it is reachable again. Times are monotonic seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from elastic_driver.core import events as ev
from elastic_driver.core.decisions import Announce, KillAgent
from elastic_driver.core.driver_events import AgentLost, LeaseExpired
from elastic_driver.core.rules.fleet import AgentNews, HostAgent
from elastic_driver.core.rules.hangs import Stacks
from elastic_driver.core.rules.outcome import KILLED, Cause
from elastic_driver.core.rules.placement import Placement
from elastic_driver.core.rules.reports import Reports
from elastic_driver.core.rules.rounds import Rule
from elastic_driver.core.rules.unreachable import Unreachable
from elastic_driver.core.rules.workers import ACTIVE, RUNNING, Worker, WorkerNews
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import host_log_events as host_log
from elastic_driver.words import worker_log_events as worker_log

_LOST = host_log.AgentLost()  # nothing more is known


@dataclass(slots=True)
class Agents(Rule):
    """Decides what follows from the news of agents."""

    reports: Reports
    unreachable: Unreachable
    placement: Placement
    stacks: Stacks

    def on_ready(self, event: ev.AgentUp, now: float) -> None:
        """Record that an agent is up, or has returned, and its host's slots can be used."""
        has_returned = event.host in self.fleet.awaited
        self.fleet.record_up(event)
        self.hosts.record_reached(event.host)
        self.capacity.note_change()
        number, at = self.rounds.current.number, f"at {event.address}"
        what = host_log.AgentReturned() if has_returned else host_log.AgentStarted()
        self.effects.decide(Announce(what, at, number, event.host, pid=event.pid))

    def on_lost(self, event: AgentLost, now: float, what: host_log.AgentLost = _LOST) -> None:
        """Record that an agent has ended, or is silent, and its workers with it."""
        agent = self.fleet.current(event)
        reason, was_up = event.reason or "no reason was given", agent.is_up
        told = event.refused or (event.unreachable and self.hosts.is_lost(event.host))
        if was_up or not told:
            self.effects.announce(what, reason, event.host)
        self.fleet.apply(agent, AgentNews.LOST)
        gone, workers = event.unreachable, self.workers.on_host(event.host)
        self.lose_workers(workers, "its agent was lost", now, silent=gone)
        if self.outcome.end is None:
            if event.refused and not was_up:
                self._leave_alone(event.host, reason, now)
                return
            self._host_without_agent(event.host, reason, now, was_up=was_up, unreachable=gone)

    def on_lease_expired(self, event: LeaseExpired, now: float) -> None:
        """Give up a silent agent or worker; after half the time, ask for stacks."""
        if event.kind == "agent":
            self.give_up(self.fleet.current(ev.AgentEvent(*event.agent)), event.reason, now)
            return
        worker = self.workers.with_process(event, event.owner)
        if event.kind == "half" and worker.state is RUNNING:
            # It may hang with the GIL. It is killed when its lease ends, and can then tell nothing.
            self.stacks.ask(now, f"{worker.id}: {event.reason}")
        elif event.kind == "worker":
            self.stacks.settle()  # before it is killed
            going = worker.leaving or worker.spare
            if going and self.workers.apply(worker, WorkerNews.TOLD_TO_STOP):
                self.effects.kill(worker, event.reason)
                self.rounds.break_for_early_end(worker, now, running=not worker.spare)
            else:
                self.reports.give_up_worker(worker, event.reason, now)

    def give_up(
        self, agent: HostAgent, reason: str, now: float, what: host_log.AgentLost = _LOST
    ) -> None:
        """Treat an agent as lost, and kill it: it may only be cut off, and must not go on."""
        self.effects.decide(KillAgent(agent.host, agent.incarnation, reason))
        lost = AgentLost(agent.host, agent.incarnation, reason, unreachable=True)
        self.on_lost(lost, now, what)

    def advance(self, now: float) -> Iterable[Wait]:
        """Give up an agent that takes longer than `start_timeout` to come up."""
        for agent in tuple(self.fleet.starting.values())[:1]:
            timeout = self.settings.start_timeout
            wait = Wait(agent.asked_at + timeout, f"the agent on {agent.host} starts")
            if not wait.is_over(now):
                yield wait
            else:
                self.placement.stop_agent(agent, "it did not come up in time")
                late = f"agent not up within {timeout:g} s"
                self._host_without_agent(agent.host, late, now, was_up=False)

    def lose_workers(
        self, workers: Iterable[Worker], reason: str, now: float, *, silent: bool = False
    ) -> None:
        """Record that workers are gone for no fault of theirs; together they are one failure."""
        failed = [w for w in workers if self._lose_worker(w, reason, now, silent=silent)]
        if failed and self.outcome.first_success is None and self.outcome.end is None:
            self.reports.count_failure(now, member=any(worker.is_member for worker in failed))

    def _lose_worker(self, worker: Worker, reason: str, now: float, *, silent: bool) -> bool:
        """Record that a worker is gone; return whether that is a failure."""
        failed = not worker.leaving and worker.state in ACTIVE
        was_running = worker.state is RUNNING
        self.workers.record_end(worker, KILLED, as_told=bool(worker.leaving))
        self.effects.announce(worker_log.WorkerLost(), reason, worker)
        if failed:
            self.reports.record_loss(worker, Cause.AGENT, now, silent=silent)
        elif worker.leaving:
            self.rounds.break_for_early_end(worker, now, running=was_running)
        return failed

    def _leave_alone(self, host: str, reason: str, now: float) -> None:
        """Leave a host alone for a while that somebody has to mend; say so once."""
        self.capacity.note_change()
        if self.hosts.drain_of(host) is None and (
            news := self.hosts.count_refusal(host, now, reason)
        ):
            self.effects.announce(host_log.HostRefused(), news, host)

    def _host_without_agent(
        self, host: str, reason: str, now: float, *, was_up: bool, unreachable: bool = False
    ) -> None:
        """Start the agent again in place, have its host probed, or put the host in cool-down."""
        self.capacity.note_change()
        if self.hosts.drain_of(host) is not None:
            return  # the host was drained and its agent ended early: that is no failure
        if unreachable:
            self.unreachable.lose(host, reason, now, started=was_up)
            return
        needed = self.is_needed(host)
        cooldown = self.hosts.agent_failed(host, now, reason, started=was_up, needed=needed)
        if cooldown is not None:
            self.effects.announce(host_log.HostBlacklisted(), cooldown, host)
        elif self.hosts.usable(host) and not self.outcome.finishing:
            self.placement.start_agent(host, now, f"again in place: {reason}")
