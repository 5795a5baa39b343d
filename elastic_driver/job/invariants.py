"""The invariants of a job after every event; each violation is one sentence.

Checked by every test, by the simulation after each event, and by `elasticrun --debug`. Only
reads; O(hosts + workers).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from elastic_driver.contract import host_of_worker
from elastic_driver.job.decisions import Decision, GiveOrder, PublishWorld, StartAgent
from elastic_driver.job.fleet import AgentState
from elastic_driver.job.parts import JobParts
from elastic_driver.job.rounds import CLOSED, CLOSING, COMPLETE
from elastic_driver.job.workers import ACTIVE, OCCUPYING, RUNNING, SPARES, STARTING, WorkerState
from elastic_driver.words.orders import StartWorkerOrder, World


def violations(job: JobParts, decided: Sequence[Decision]) -> list[str]:
    """Return every violation; `decided` are the decisions on the last event."""
    sizes = (_round, _ranks, _sizes, _units)
    checks = (_workers, _adoption, _slots, _spares, *sizes, _replacement, _finishing, _waiting)
    return [*_decisions(job, decided), *chain.from_iterable(check(job) for check in checks)]


def _decisions(job: JobParts, decided: Sequence[Decision]) -> Iterator[str]:
    for decision in decided:
        if not decision.reason:
            yield f"{decision} has no reason"
        if isinstance(decision, PublishWorld):
            yield from _world(job, decision.world)
        match decision:
            # An order that is repeated was given when the host was usable.
            case (
                StartAgent(host=host)
                | GiveOrder(host=host, order=StartWorkerOrder(), repeated=False)
            ):
                if not job.hosts.is_usable(host):
                    hindrance = job.hosts.hindrance(host)
                    what = "not there" if hindrance is None else f"in {hindrance.value}"
                    yield f"{host} gets a worker or an agent though it is {what}"


def _world(job: JobParts, world: World) -> Iterator[str]:
    """Check a world when it is published; later, some of its members may be gone."""
    settings, name = job.settings, f"round {world.round}"
    ranks = [member.place.rank for member in world.members]
    if ranks != list(range(world.size)) or any(m.place.size != world.size for m in world.members):
        yield f"the ranks of {name} are {ranks}, not 0 to {world.size - 1}"
    members = [worker for m in world.members if (worker := job.workers.workers.get(m.worker))]
    complete = len(members) == world.size  # a member that ended at once may be forgotten already
    oldest = min(members, key=lambda worker: worker.age) if members and complete else None
    if oldest is not None and oldest.place.rank != 0:
        yield f"the oldest member of {name}, {oldest.id}, is rank {oldest.place.rank}"
    least = min(settings.min_np, settings.start_min_np or settings.min_np)
    if world.size < least and job.outcome.first_success is None:
        yield f"{name} has {world.size} members, at least {least} are required"
    most = settings.max_np
    if most is not None and world.size > max(most, 1 + _handing_over(job)):
        yield f"{name} has {world.size} members, at most {settings.max_np} are allowed"


def _workers(job: JobParts) -> Iterator[str]:
    seen = 0
    for state in WorkerState:
        for worker in job.workers.having(state):
            seen += 1
            if worker.state is not state or job.workers.workers.get(worker.id) is not worker:
                yield f"{worker.id} is filed under {state.value} but is {worker.state.value}"
    if seen != len(job.workers.workers):
        yield f"{len(job.workers.workers)} workers are known but {seen} are filed by state"
    for worker in job.workers.having(*OCCUPYING):
        if not job.fleet.is_up(worker.host):
            yield f"{worker.id} has a process but its host has no agent that is up or awaited"
        if worker not in job.workers.on_host(worker.host):
            yield f"{worker.id} is not filed under its host"


def _adoption(job: JobParts) -> Iterator[str]:
    awaited = {a.host for a in job.fleet.agents.values() if a.state is AgentState.AWAITED}
    if awaited != job.fleet.awaited.keys():
        yield f"agents are awaited on {sorted(awaited)}, filed are {sorted(job.fleet.awaited)}"
    if awaited and job.ending.end is None and job.effects.alarm is None:
        yield f"the agents on {sorted(awaited)} are awaited without a deadline"


def _slots(job: JobParts) -> Iterator[str]:
    taken = Counter((w.host, w.slot) for w in job.workers.having(*OCCUPYING) if not w.spare)
    for (host, slot), count in taken.items():
        if count > 1:
            yield f"{count} processes share slot {slot} of {host}"


def _spares(job: JobParts) -> Iterator[str]:
    for worker in job.workers.workers.values():
        if worker.spare and worker.state in ACTIVE:
            yield f"{worker.id} is {worker.state.value} but is a spare, in no slot"
        if not worker.spare and worker.state in SPARES:
            yield f"{worker.id} is {worker.state.value} but has a slot"
    for host, count in Counter(worker.host for worker in job.workers.having(*SPARES)).items():
        if count > job.settings.spares:
            yield f"{host} has {count} spares, at most {job.settings.spares} are allowed"


def _round(job: JobParts) -> Iterator[str]:
    current = job.rounds.current
    running = {worker.id for worker in job.workers.having(RUNNING)}
    if current.state not in (COMPLETE, CLOSING) and running:
        yield f"round {current.number} is {current.state.value} but {sorted(running)} are running"
    if strangers := running - set(current.members):
        yield f"{sorted(strangers)} are running but are no members of round {current.number}"
    if current.state is CLOSED:
        yield f"round {current.number} is closed but no next round was opened"
    repairs = current.repairs or job.outcome.finishing
    if job.rounds.repair and current.state is COMPLETE and not repairs:
        yield f"round {current.number} goes on though its ranks hold different states"
    limit = job.settings.reset_limit
    if limit is not None and job.rounds.resets > limit and not job.outcome.finishing:
        yield f"round {current.number} exceeds the reset limit of {limit}"


def _ranks(job: JobParts) -> Iterator[str]:
    current = job.rounds.current
    if current.state is not COMPLETE:
        return
    known = (job.workers.workers.get(worker_id) for worker_id in current.members)
    running = [w for w in known if w is not None and w.state is RUNNING]
    if len({w.place.rank for w in running}) != len(running):
        yield f"two members of round {current.number} have the same rank"
    for worker in running:
        place = worker.place
        if (worker.host, worker.slot) != (place.host, place.slot):
            yield f"{worker.id} was given the place of {place.host}.{place.slot}"
        if place.size != len(current.members):
            yield f"{worker.id} believes in {place.size} ranks of {len(current.members)}"
        if not (place.local_rank < place.local_size and place.cross_rank < place.cross_size):
            yield f"{worker.id} has a local or cross rank beyond its size"
    hosts = [w.host for w in sorted(running, key=lambda w: w.place.rank)]
    changes = sum(1 for before, after in pairwise(hosts) if before != after)
    if hosts and changes + 1 != len(set(hosts)):
        yield f"the ranks of a host are not contiguous in round {current.number}"


def _sizes(job: JobParts) -> Iterator[str]:
    most = job.settings.max_np
    size = job.workers.count(RUNNING)
    if most is None:
        return
    if size > max(most, 1 + _handing_over(job)):
        yield f"round {job.rounds.current.number} has {size} members, at most {most} are allowed"
    if job.ending.end is None and job.workers.active() > most:
        yield f"{job.workers.active()} workers take part, at most {most} are allowed"


def _handing_over(job: JobParts) -> int:
    """Return the number of members that leave: one may hand its state over to the only other."""
    return sum(worker.leaving != "" for worker in job.workers.having(RUNNING))


def _units(job: JobParts) -> Iterator[str]:
    current, settings = job.rounds.current, job.settings
    if current.state is not COMPLETE or job.outcome.first_success is not None:
        return
    hosts = len({host_of_worker(worker) for worker in current.members})
    if hosts % settings.node_unit:
        yield f"round {current.number} has {hosts} hosts, no multiple of {settings.node_unit}"
    if hosts < settings.min_hosts:
        yield f"round {current.number} has {hosts} hosts, {settings.min_hosts} are required"
    if settings.max_hosts is not None and hosts > settings.max_hosts:
        yield f"round {current.number} has {hosts} hosts, at most {settings.max_hosts} are allowed"


def _replacement(job: JobParts) -> Iterator[str]:
    replacement = job.drains.replacement
    if replacement is None or job.ending.end is not None:
        return
    worker = job.workers.workers.get(replacement.worker)
    if worker is None or worker.state not in ACTIVE or not worker.leaving:
        yield f"{replacement.worker} is being replaced but does not leave"
    if job.rounds.current.number != replacement.round:
        yield f"{replacement.worker} is being replaced in round {replacement.round}, which is over"
    if replacement.target in job.hosts.distrusted:
        yield f"{replacement.worker} is being replaced on {replacement.target}, which is slow too"


def _finishing(job: JobParts) -> Iterator[str]:
    if job.outcome.first_success is None or job.ending.end is not None:
        return
    newcomers = [w.id for w in job.workers.having(STARTING) if not w.is_member]
    if newcomers:
        yield f"a worker has finished but {newcomers} are still being started"


def _waiting(job: JobParts) -> Iterator[str]:
    outcome, current, deadline = job.outcome, job.rounds.current, job.effects.alarm
    if job.ending.end is not None:
        if deadline is not None:
            yield "the job has ended but still waits for a moment"
        return
    elastic, complete = outcome.elastic, current.state is COMPLETE
    # Scripts that do not speak to us end when they like, once one of them has succeeded.
    runs_out = not elastic and outcome.first_success is not None
    if not complete and deadline is None and not runs_out:
        yield f"round {current.number} is {current.state.value} without a deadline"
    if complete and not job.workers.count(*ACTIVE):
        yield f"round {current.number} is complete but has no worker"
    if elastic and job.placement.unsettled:
        yield "slots have changed but placement has not looked at them"
