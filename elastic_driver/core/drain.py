"""Hosts that are to be left in good order: drained by hand, or with a notice of their end.

A drained host is left like one that discovery removed, at a step boundary and without a step
lost, but there is time: where other hosts have room, its workers train on until their
replacements are ready, so that the world need not shrink. Called by the job machine; starts and
stops nothing itself. Times are monotonic seconds.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from elastic_driver.core import placement
from elastic_driver.core.events import DrainCancelled, DrainRequested, HostLeaving
from elastic_driver.core.hosts import Drain
from elastic_driver.core.notices import time_to_leave
from elastic_driver.core.registry import Worker, WorkerState
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
    by_hand = _until(job, event.reason, event.deadline, now)
    _drain(job, event.host, replace(by_hand, leave_by=now + time_to_leave(event.deadline)))


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


def _patience(job: JobState, worker: Worker) -> float | None:
    drain = job.hosts.drained(worker.host)
    if drain is not None:
        return drain.replace_until
    replaced = job.replacing is not None and job.replacing.worker == worker.id
    return job.replacing.until if job.replacing is not None and replaced else None


def hand_over_until(job: JobState, leavers: list[Worker]) -> float:
    """Until when workers that all leave may train on for somebody who takes over to come."""
    drains = [job.hosts.drained(worker.host) for worker in leavers]
    ends = [d.replace_until for d in drains if d is not None and d.leave_by is not None]
    return min(ends, default=inf)


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


def _drain(job: JobState, host: str, drain: Drain) -> None:
    if not job.hosts.drain(host, drain):
        job.ignore(f"host {host} is not there, or is drained already")
        return
    job.capacity_changed = True
    job.announce("drain_requested", drain.reason, host=host)
    if host not in job.fleet.agents:
        job.announce("host_drained", f"nothing ran there: {drain.reason}", host=host)
