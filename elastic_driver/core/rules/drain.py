"""Hosts and workers that are to go in good order: drained by hand, or with a notice of their end.

A drained host is left like one that discovery removed, at a step boundary and without a step
lost, but there is time: where other hosts have room, its workers train on until their
replacements are ready, so that the world need not shrink. The same holds for a single worker with
a notice; its slot is then free for the next one. Called by the job machine; starts and stops
nothing itself. Times are monotonic seconds.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from elastic_driver.core.events import DrainCancelled, DrainRequested, HostLeaving, WorkerLeaving
from elastic_driver.core.rules import placement
from elastic_driver.core.rules.hosts import Drain
from elastic_driver.core.rules.notices import time_to_leave
from elastic_driver.core.rules.outcome import Kind
from elastic_driver.core.rules.workers import ACTIVE, Worker, WorkerState
from elastic_driver.core.state import JobState

REPLACEMENT_SHARE = 0.5  # of a deadline; the rest is for the boundary and for ending processes


def requested(job: JobState, event: DrainRequested, now: float) -> None:
    """Somebody wants the host to be left."""
    _drain(job, event.host, _until(job, event.reason, event.deadline, now))


def noticed(job: JobState, event: HostLeaving, now: float) -> None:
    """An agent says that its host goes away."""
    if job.fleet.current(event.host, event.incarnation) is None:
        job.ignore(f"agent {event.host}.{event.incarnation} is not the present one")
        return
    _drain(job, event.host, _with_notice(job, event, now))


def told(job: JobState, event: WorkerLeaving, now: float) -> None:
    """A worker says that it has to go; its host stays."""
    worker = job.registry.workers.get(event.worker)
    if worker is None or worker.state not in ACTIVE or job.kind is not Kind.ELASTIC:
        job.ignore(f"{event.worker} is gone or going, or has not taken part yet")
        return
    if worker.drain is not None:
        job.ignore(f"{event.worker} has said before that it has to go")
        return
    worker.drain = _with_notice(job, event, now)
    job.capacity_changed = True
    job.announce("worker_leaving", event.reason, worker, deadline=event.deadline)


def cancelled(job: JobState, event: DrainCancelled, _now: float) -> None:
    """The host may be used again; workers that have not left yet stay."""
    if not job.hosts.undrain(event.host):
        job.ignore(f"host {event.host} is not drained")
        return
    job.hosts.trust(event.host)  # whoever looked after it may have cured its slowness, too
    job.capacity_changed = True
    job.announce("drain_cancelled", event.reason, host=event.host)


def waits_until(job: JobState, leavers: list[Worker]) -> float | None:
    """Until when these workers wait for their replacements to be ready; None: not at all."""
    patience = [_patience(job, worker) for worker in leavers]
    until = [at for at in patience if at is not None]
    if not until or len(until) < len(patience):  # others leave now: one change for all
        return None
    return min(until) if _replacements_are_coming(job) else None


def of_worker(job: JobState, worker: Worker) -> Drain | None:
    """The drain for which a worker has to go: its host's, or its own."""
    return job.hosts.drained(worker.host) or worker.drain


def _patience(job: JobState, worker: Worker) -> float | None:
    drain = of_worker(job, worker)
    if drain is not None:
        return drain.replace_until
    replaced = job.replacing is not None and job.replacing.worker == worker.id
    return job.replacing.until if job.replacing is not None and replaced else None


def hand_over_until(job: JobState, leavers: list[Worker]) -> float:
    """Until when workers that all leave may train on for somebody who takes over to come."""
    drains = [of_worker(job, worker) for worker in leavers]
    ends = [d.replace_until for d in drains if d is not None and d.leave_by is not None]
    return min(ends, default=inf)


def slots_come_free(job: JobState) -> bool:
    """Whether others with a notice make room for somebody to whom one can hand the state."""
    going = job.registry.having(WorkerState.READY, WorkerState.STOPPING)
    return sum(1 for w in going if w.drain is not None and job.hosts.usable(w.host)) > 1


def _replacements_are_coming(job: JobState) -> bool:
    if any(not worker.leaving for worker in job.registry.having(WorkerState.STARTING)):
        return True
    if placement.room_left(job) == 0:
        return False
    return bool(job.fleet.starting() or placement.free_slots(job, 1))


def _until(job: JobState, reason: str, deadline: float | None, now: float) -> Drain:
    patience = job.settings.start_timeout
    if deadline is not None:
        patience = min(patience, deadline * REPLACEMENT_SHARE)
    return Drain(reason, now + patience)


def _with_notice(job: JobState, event: HostLeaving | WorkerLeaving, now: float) -> Drain:
    drain = _until(job, event.reason, event.deadline, now)
    return replace(drain, leave_by=now + time_to_leave(event.deadline))


def _drain(job: JobState, host: str, drain: Drain) -> None:
    if not job.hosts.drain(host, drain):
        job.ignore(f"host {host} is not there, or is drained already")
        return
    job.capacity_changed = True
    job.announce("drain_requested", drain.reason, host=host)
    if host not in job.fleet.agents:
        job.announce("host_drained", f"nothing ran there: {drain.reason}", host=host)
