"""The status of a job, as `/v1/status` shows it: a frozen picture at one moment.

Made by `Job.status`; read by the HTTP API, `elasticctl` and the metrics. Nothing here
decides. Durations are seconds.
"""

from msgspec import Struct

from elastic_driver.job.hosts import Hindrance, outlook, reason_of
from elastic_driver.job.parts import JobParts
from elastic_driver.job.rounds import CLOSING, COMPLETE
from elastic_driver.job.workers import RUNNING, Worker


class MemberStatus(Struct, frozen=True):
    """The status of one worker process."""

    worker: str
    host: str
    slot: int
    rank: int  # −1: a spare, which has none
    state: str  # a `WorkerState`
    pid: int  # 0: not known yet
    version: int  # committed steps it brought into the round; −1: none
    leaving: str  # why it has to leave; empty: it stays
    cpus: str = ""  # the processors that it is bound to, as 0-3,8; empty: to none


class HostStatus(Struct, frozen=True):
    """The status of one discovered host, or of a removed one that still has workers."""

    host: str
    slots: int
    # usable | checking (before it gets workers) | cool-down | pausing (before the next restart)
    # | unreachable (it is probed) | draining (workers are on it) | drained | removed
    state: str
    cooldown_left: float  # of the cool-down or the pause
    reason: str  # why it is in this state
    agent: str  # none | starting | ready
    agent_incarnation: int  # 0: none
    workers: int  # in its slots
    evidence: tuple[str, ...] = ()  # that its agent is lost; it is being confirmed
    suspected_for: float = 0.0  # since the first evidence


class SlowStatus(Struct, frozen=True):
    """A rank that slows the others down; no part of `JobStatus`: the job measures no ranks."""

    rank: int
    host: str
    worker: str
    kind: str  # compute | network
    ratio: float  # its time over the usual one, when it was noticed
    step: int  # when that was


class CounterStatus(Struct, frozen=True):
    """Counters, and their limits (None: no limit)."""

    failures: int
    max_restarts: int | None
    fruitless: int
    fruitless_restarts: int
    resets: int
    reset_limit: int | None
    restart_count: int
    ignored_events: int  # late, repeated or out of order


class JobStatus(Struct, frozen=True):
    """The status of the whole job."""

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
    suspicions: dict[str, int] = {}  # how often agents were suspected, by evidence
    round_age: float = 0.0  # since the round entered its state
    plan: int = 0  # the number of the newest plan that was carried out; 0: none
    grant: int = 0  # the number of the Brain's newest grant; 0: none


def status_of(job: JobParts, now: float) -> JobStatus:
    """Return the picture of `job` at `now`; O(hosts + workers)."""
    settings, outcome, current = job.settings, job.outcome, job.rounds.current
    end, budget = job.ending.end, outcome.budget
    known = {host.name: host.slots for host in job.hosts.known.values()}
    reason = job.effects.waiting
    hosts = outlook(job.hosts, now)
    if hosts and current.state is not COMPLETE:
        reason = f"{reason}; {hosts}" if reason else hosts
    known.update({name: 0 for name in job.fleet.agents if name not in known})
    by_rank = sorted(job.workers.workers.values(), key=lambda w: (w.spare, w.place.rank, w.age))
    return JobStatus(
        state=_state(job),
        kind=outcome.kind.value,
        reason=end.reason if end else reason,
        exit_code=end.exit_code if end else None,
        round=current.number,
        round_state=current.state.value,
        size=job.workers.count(RUNNING),
        wanted=job.capacity.wanted,
        min_np=job.capacity.least,
        max_np=job.capacity.most,
        members=tuple(map(_member, by_rank)),
        hosts=tuple(_host(job, name, slots, now) for name, slots in known.items()),
        counters=CounterStatus(
            failures=budget.failures,
            max_restarts=settings.max_restarts,
            fruitless=budget.fruitless,
            fruitless_restarts=settings.fruitless_restarts,
            resets=job.rounds.resets,
            reset_limit=settings.reset_limit,
            restart_count=outcome.restart_count,
            ignored_events=job.effects.ignored_events,
        ),
        ignored=job.effects.ignored,
        suspicions={**job.suspicion.found},
        round_age=max(0.0, now - current.since),
        plan=job.capacity.newest_plan,
        grant=job.inventory.newest_grant,
    )


def _member(w: Worker) -> MemberStatus:
    rank = -1 if w.spare else w.place.rank
    return MemberStatus(
        w.id, w.host, w.slot, rank, w.state.value, w.pid, w.version, w.leaving, w.cpus
    )


def _state(job: JobParts) -> str:
    outcome, current = job.outcome, job.rounds.current
    if job.ending.end is not None:
        return "succeeded" if job.ending.end.exit_code == 0 else "failed"
    if outcome.first_success is not None:
        return "finishing"
    if current.state is COMPLETE:
        return "running"
    later = current.number > 1 or current.state is CLOSING
    return "changing" if later else "forming"


def _host(job: JobParts, name: str, slots: int, now: float) -> HostStatus:
    hosts = job.hosts
    agent = job.fleet.agents.get(name)
    workers = len(job.workers.in_slots(name))
    hindrance = hosts.hindrance(name)
    if name not in hosts.known:
        state = "removed"
    elif hindrance is Hindrance.DRAINED and workers:
        state = "draining"
    else:
        state = "usable" if hindrance is None else hindrance.value
    reason = reason_of(hosts, name, now)
    if state == "usable" and agent and not workers and job.placement.room_left() == 0:
        reason = reason or "stands by to replace a host that is lost"
    health = (state, hosts.cooldown_left(name, now), reason)
    up = ("none", 0) if agent is None else (agent.state.value, agent.incarnation)
    suspect = job.suspicion.suspects.get(name)
    doubt = () if suspect is None else (tuple(suspect.evidence), now - suspect.since)
    return HostStatus(name, slots, *health, *up, workers, *doubt)
