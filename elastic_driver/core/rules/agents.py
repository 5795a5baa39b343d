"""What follows from the news of agents: one is up, one is lost, one does not come up.

With its agent a host's workers are gone. The agent is started again in place, or its host put in
cool-down. Called by the job machine; starts and stops nothing itself. Times are monotonic seconds.
"""

from __future__ import annotations

from elastic_driver.core.decisions import Announce
from elastic_driver.core.documents import Failure
from elastic_driver.core.events import AgentLost, AgentReady
from elastic_driver.core.rules import endings, placement
from elastic_driver.core.rules.fleet import Agent, AgentState
from elastic_driver.core.rules.outcome import KILLED, Cause
from elastic_driver.core.rules.workers import ACTIVE, News, Worker, WorkerState
from elastic_driver.core.state import JobState


def ready(job: JobState, event: AgentReady, _now: float) -> None:
    """An agent is up, and its host's slots can be used."""
    agent = job.fleet.ready(event)
    if agent is None:
        job.ignore(f"agent {event.host}.{event.incarnation} is not the one that is awaited")
        return
    job.capacity_changed = True
    job.decide(
        Announce(
            "agent_started",
            f"at {agent.address}",
            round=job.round.number,
            host=agent.host,
            pid=agent.pid,
        )
    )


def lost(job: JobState, event: AgentLost, now: float) -> None:
    """An agent's process has ended, or it is silent."""
    agent = job.fleet.current(event.host, event.incarnation)
    if agent is None:
        job.ignore(f"agent {event.host}.{event.incarnation} is not the present one")
        return
    job.announce("agent_lost", event.reason, host=event.host)
    job.fleet.drop(event.host)
    failed = [w for w in job.registry.on_host(event.host) if _lose_with_agent(job, w, now)]
    if failed and job.first_success is None and job.end is None:
        member = any(endings.is_member(worker) for worker in failed)
        endings.count_failure(job, now, member=member)
    if job.end is None:
        _host_without_agent(job, agent, event.reason, now)


def watch_starting(job: JobState, now: float) -> None:
    """Give up an agent that takes longer than `start_timeout` to come up."""
    for agent in job.fleet.starting()[:1]:
        timeout = job.settings.start_timeout
        if job.passed(agent.asked_at + timeout, now, f"the agent on {agent.host} starts"):
            placement.stop_agent(job, agent, "it did not come up in time")
            _host_without_agent(job, agent, f"agent not up within {timeout:g} s", now)


def _lose_with_agent(job: JobState, worker: Worker, now: float) -> bool:
    """A worker died with its agent; whether that is a failure."""
    expected = bool(worker.leaving) or worker.state not in ACTIVE
    was_running = worker.state is WorkerState.RUNNING
    if worker.leaving:
        job.registry.apply(worker, News.TOLD_TO_STOP)
    job.registry.apply(worker, News.EXITED_NONZERO)
    job.announce("worker_lost", "its agent was lost", worker)
    if not expected:
        place = worker.place
        failure = Failure(worker.id, place.rank, worker.host, worker.pid, KILLED)
        endings.record_loss(job, worker, failure, Cause.AGENT, now)
    elif worker.leaving:
        job.left_early(worker, now, running=was_running)
    return not expected


def _host_without_agent(job: JobState, agent: Agent, reason: str, now: float) -> None:
    """The agent is gone: start it again in place, or put its host in cool-down."""
    job.capacity_changed = True
    if job.hosts.drained(agent.host) is not None:
        return  # it went early, and was to go: no trouble of the host's
    was_up = agent.state is AgentState.READY
    cooldown = job.hosts.agent_failed(agent.host, now, reason, started=was_up)
    if cooldown is not None:
        job.announce("host_blacklisted", cooldown, host=agent.host)
    elif job.hosts.usable(agent.host) and not job.finishing:
        placement.start_agent(job, agent.host, now, f"again in place: {reason}")
