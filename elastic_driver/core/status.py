"""What `/v1/status` shows: a frozen picture of the job at one moment.

Built by `Job.snapshot`; read by the HTTP API, `elasticctl` and the metrics. Nothing here
decides. Durations are seconds.
"""

from __future__ import annotations

from msgspec import Struct

from elastic_driver.core.state import JobState


class MemberStatus(Struct, frozen=True):
    """One worker process."""

    worker: str
    host: str
    slot: int
    rank: int
    state: str  # a `WorkerState`
    pid: int  # 0: not known yet
    version: int  # committed steps it brought into the round; −1: none
    leaving: str  # why it has to leave; empty: it stays


class HostStatus(Struct, frozen=True):
    """One discovered host, or a removed one that still has workers."""

    host: str
    slots: int
    # usable | checking (before it gets workers) | cool-down | draining (workers are on it)
    # | drained | removed
    state: str
    cooldown_left: float
    reason: str  # why it is in cool-down, drained, or to be checked
    agent: str  # none | starting | ready
    agent_incarnation: int  # 0: none
    workers: int  # processes on it


class SlowStatus(Struct, frozen=True):
    """A rank that holds the others up; beside the job's picture, as the core does not decide it."""

    rank: int
    host: str
    worker: str
    kind: str  # compute | network
    ratio: float  # its time over the usual one, when it was noticed
    step: int  # when that was


class CounterStatus(Struct, frozen=True):
    """What has been used up, and the limits (None: no limit)."""

    failures: int
    max_restarts: int | None
    fruitless: int
    fruitless_restarts: int
    resets: int
    reset_limit: int | None
    restart_count: int
    ignored_events: int  # late, repeated or out of order


class JobStatus(Struct, frozen=True):
    """The whole job."""

    state: str  # forming | running | changing | finishing | succeeded | failed
    kind: str  # undeclared | elastic | plain
    reason: str  # what the job waits for now, or why it ended
    exit_code: int | None  # None while it lives
    round: int
    round_state: str
    size: int  # members of the newest complete round that are still in it
    wanted: int | None  # workers aimed at; None: as many as there are slots
    min_np: int
    max_np: int | None
    members: tuple[MemberStatus, ...]
    hosts: tuple[HostStatus, ...]
    counters: CounterStatus
    ignored: str  # the last event that changed nothing


def snapshot(job: JobState, now: float) -> JobStatus:
    """The picture of `job` at `now`; O(hosts + workers)."""
    end = job.end
    return JobStatus(
        state=_state(job),
        kind=job.kind.value,
        reason=end.reason if end else job.waiting,
        exit_code=end.exit_code if end else None,
        round=job.round.number,
        round_state=job.round.state.value,
        size=job.size,
        wanted=job.wanted,
        min_np=job.settings.min_np,
        max_np=job.settings.max_np,
        members=tuple(
            MemberStatus(
                worker=worker.id,
                host=worker.host,
                slot=worker.slot,
                rank=worker.place.rank,
                state=worker.state.value,
                pid=worker.pid,
                version=worker.version,
                leaving=worker.leaving,
            )
            for worker in sorted(
                job.registry.workers.values(), key=lambda worker: (worker.place.rank, worker.age)
            )
        ),
        hosts=_hosts(job, now),
        counters=CounterStatus(
            failures=job.budget.failures,
            max_restarts=job.settings.max_restarts,
            fruitless=job.budget.fruitless,
            fruitless_restarts=job.settings.fruitless_restarts,
            resets=job.round.number - 1,
            reset_limit=job.settings.reset_limit,
            restart_count=job.restart_count,
            ignored_events=job.ignored_events,
        ),
        ignored=job.ignored,
    )


def _state(job: JobState) -> str:
    if job.end is not None:
        return "succeeded" if job.end.exit_code == 0 else "failed"
    if job.first_success is not None:
        return "finishing"
    if job.round.state.value == "complete":
        return "running"
    return "changing" if job.round.number > 1 or job.round.state.value == "closing" else "forming"


def _hosts(job: JobState, now: float) -> tuple[HostStatus, ...]:
    known = [(host.name, host.slots) for host in job.hosts.order]
    present = {name for name, _ in known}
    known += [(name, 0) for name in job.fleet.agents if name not in present]
    return tuple(_host(job, name, slots, now) for name, slots in known)


def _host(job: JobState, name: str, slots: int, now: float) -> HostStatus:
    agent = job.fleet.agents.get(name)
    left = job.hosts.cooldown_left(name, now)
    workers = len(job.registry.on_host(name))
    return HostStatus(
        host=name,
        slots=slots,
        state=_host_state(job, name, workers),
        cooldown_left=left,
        reason=_host_reason(job, name),
        agent=agent.state.value if agent else "none",
        agent_incarnation=agent.incarnation if agent else 0,
        workers=workers,
    )


def _host_reason(job: JobState, name: str) -> str:
    drain = job.hosts.drained(name)
    if drain is not None:
        return drain.reason
    slow = "slow: the last choice" if job.hosts.distrusted(name) else ""
    return job.hosts.cooldown_reason(name) or job.hosts.held_reason(name) or slow


def _host_state(job: JobState, name: str, workers: int) -> str:
    if name not in job.hosts:
        return "removed"
    if job.hosts.drained(name) is not None:
        return "draining" if workers else "drained"
    if job.hosts.cooldown_reason(name):
        return "cool-down"
    return "usable" if job.hosts.usable(name) else "checking"
