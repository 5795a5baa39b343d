"""What must hold of a job after every event, each breach as one sentence.

Run by every test, by the simulation after each event, and by `elasticrun --debug`. Only
reads; O(hosts + workers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from elastic_driver.contract import host_of_worker
from elastic_driver.core.job import Job
from elastic_driver.core.rules.outcome import Kind
from elastic_driver.core.rules.rounds import RoundState
from elastic_driver.core.rules.workers import ACTIVE, OCCUPYING, Worker, WorkerState
from elastic_driver.core.state import JobState


def check(job: Job) -> list[str]:
    """Every sentence that is violated; empty for a job in order."""
    state = job.state
    return [
        *_workers(state),
        *_slots(state),
        *_round(state),
        *_ranks(state),
        *_sizes(state),
        *_units(state),
        *_replacing(state),
        *_finishing(state),
        *_waiting(job),
    ]


def _workers(job: JobState) -> Iterator[str]:
    seen = 0
    for state in WorkerState:
        for worker in job.registry.having(state):
            seen += 1
            if worker.state is not state or job.registry.workers.get(worker.id) is not worker:
                yield f"{worker.id} is filed under {state.value} but is {worker.state.value}"
    if seen != len(job.registry.workers):
        yield f"{len(job.registry.workers)} workers are known but {seen} are filed by state"
    for worker in job.registry.having(*OCCUPYING):
        if worker.host not in job.fleet.agents:
            yield f"{worker.id} has a process but its host has no agent"
        if worker not in job.registry.on_host(worker.host):
            yield f"{worker.id} is not filed under its host"


def _slots(job: JobState) -> Iterator[str]:
    taken = Counter((w.host, w.slot) for w in job.registry.having(*OCCUPYING))
    for (host, slot), count in taken.items():
        if count > 1:
            yield f"{count} processes share slot {slot} of {host}"


def _round(job: JobState) -> Iterator[str]:
    round_ = job.round
    running = {worker.id for worker in job.registry.having(WorkerState.RUNNING)}
    if round_.state not in (RoundState.COMPLETE, RoundState.CLOSING) and running:
        yield f"round {round_.number} is {round_.state.value} but {sorted(running)} are running"
    if strangers := running - set(round_.members):
        yield f"{sorted(strangers)} are running but are no members of round {round_.number}"
    if round_.state is RoundState.CLOSED:
        yield f"round {round_.number} is closed but no next round was opened"
    limit = job.settings.reset_limit
    if limit is not None and round_.number - 1 > limit and not job.finishing:
        yield f"round {round_.number} exceeds the reset limit of {limit}"


def _ranks(job: JobState) -> Iterator[str]:
    if job.round.state is not RoundState.COMPLETE:
        return
    known = (job.registry.workers.get(worker_id) for worker_id in job.round.members)
    running = [w for w in known if w is not None and w.state is WorkerState.RUNNING]
    if len({w.place.rank for w in running}) != len(running):
        yield f"two members of round {job.round.number} have the same rank"
    for worker in running:
        place = worker.place
        if (worker.host, worker.slot) != (place.host, place.slot):
            yield f"{worker.id} was given the place of {place.host}.{place.slot}"
        if place.size != len(job.round.members):
            yield f"{worker.id} believes in {place.size} ranks of {len(job.round.members)}"
        if not (place.local_rank < place.local_size and place.cross_rank < place.cross_size):
            yield f"{worker.id} has a local or cross rank beyond its size"
    hosts = [w.host for w in sorted(running, key=lambda w: w.place.rank)]
    changes = sum(1 for before, after in pairwise(hosts) if before != after)
    if hosts and changes + 1 != len(set(hosts)):
        yield f"the ranks of a host are not contiguous in round {job.round.number}"


def _sizes(job: JobState) -> Iterator[str]:
    most = job.settings.max_np
    if most is None:
        return
    if job.size > most:
        yield f"round {job.round.number} has {job.size} members, at most {most} are allowed"
    if job.end is None and job.registry.active() > most:
        yield f"{job.registry.active()} workers take part, at most {most} are allowed"


def _units(job: JobState) -> Iterator[str]:
    if job.round.state is not RoundState.COMPLETE or job.first_success is not None:
        return
    settings = job.settings
    hosts = len({host_of_worker(worker) for worker in job.round.members})
    if hosts % settings.node_unit:
        yield f"round {job.round.number} has {hosts} hosts, no multiple of {settings.node_unit}"
    if hosts < settings.min_hosts:
        yield f"round {job.round.number} has {hosts} hosts, at least {settings.min_hosts} are asked"
    if settings.max_hosts is not None and hosts > settings.max_hosts:
        yield f"round {job.round.number} has {hosts} hosts, at most {settings.max_hosts} are asked"


def _replacing(job: JobState) -> Iterator[str]:
    replacement = job.replacing
    if replacement is None or job.end is not None:
        return
    worker = job.registry.workers.get(replacement.worker)
    if worker is None or worker.state not in ACTIVE or not worker.leaving:
        yield f"{replacement.worker} is being replaced but is not one that leaves"
    if job.round.number != replacement.round:
        yield f"{replacement.worker} is being replaced in round {replacement.round}, which is over"
    if job.hosts.distrusted(replacement.target):
        yield f"{replacement.worker} is being replaced on {replacement.target}, which is slow too"


def _finishing(job: JobState) -> Iterator[str]:
    if job.first_success is None or job.end is not None:
        return
    newcomers = [w.id for w in job.registry.having(WorkerState.STARTING) if _is_stranger(w)]
    if newcomers:
        yield f"a worker has finished but {newcomers} are still being started"


def _is_stranger(worker: Worker) -> bool:
    return worker.admitted is None and not worker.founder


def _waiting(job: Job) -> Iterator[str]:
    state, deadline = job.state, job.deadline()
    if state.end is not None:
        if deadline is not None:
            yield "the job has ended but still waits for a moment"
        return
    if state.born is None:
        return
    # Scripts that do not speak to us end when they like, once one of them has succeeded.
    runs_out = state.kind is not Kind.ELASTIC and state.first_success is not None
    if state.round.state is not RoundState.COMPLETE and deadline is None and not runs_out:
        yield f"round {state.round.number} is {state.round.state.value} without a deadline"
    if state.round.state is RoundState.COMPLETE and not state.registry.count(*ACTIVE):
        yield f"round {state.round.number} is complete but nobody is in it"
    if state.kind is Kind.ELASTIC and state.leavers_unsettled:
        yield "slots have changed but nobody has looked at them"
