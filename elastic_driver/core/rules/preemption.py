"""The whole job goes away with notice: told by itself, or by the last of its hosts.

All workers leave after one common step, put the state on disk (`farewell`), and the job ends with
a sentence that says how to go on. Half of the time is for reaching the boundary; then it is left
at once, back at the last commit, lest nothing be written. A job that other hosts may come to does
not end because its present ones go: it waits for them as for any lack of hosts. Called by the job
machine and `elastic`. Times are monotonic seconds.
"""

from __future__ import annotations

from elastic_driver.core.events import JobLeaving
from elastic_driver.core.pending import Departure
from elastic_driver.core.rules.notices import time_to_leave
from elastic_driver.core.rules.outcome import Kind
from elastic_driver.core.rules.rounds import RoundState
from elastic_driver.core.rules.workers import WorkerState
from elastic_driver.core.state import JobState
from elastic_driver.errors import ExitCode

BOUNDARY_SHARE = 0.5  # of the time; the rest is for writing


def told(job: JobState, event: JobLeaving, now: float) -> None:
    """Somebody says that the whole job has to be gone in so many seconds."""
    if job.departure is not None:
        job.ignore(f"the job is ending already: {job.departure.reason}")
        return
    _begin(job, event.reason, now, now + time_to_leave(event.deadline))


def look(job: JobState, now: float) -> None:
    """See whether all hosts go away; where the job is to end, see that it does so in time."""
    if job.departure is None:
        _consider(job, now)
    departure = job.departure
    if departure is None:
        return
    if job.kind is not Kind.ELASTIC:
        _end(job, "its workers are told to stop; they did not ask to be told earlier")
    elif job.passed(departure.end_by, now, f"the job is ending: {departure.reason}"):
        _end(job, _too_late(job))
    elif job.round.state is RoundState.CLOSING and job.registry.count(WorkerState.RUNNING):
        _hurry(job, departure, now)


def over(job: JobState) -> None:
    """Everybody has left, and what could be written is: the job ends."""
    if job.farewell is not None and job.farewell.done:
        _end(job, f"{job.farewell.outcome}; {_how_to_go_on(job)}")
    else:
        _end(job, "no worker held a state that was worth keeping")


def _begin(job: JobState, reason: str, now: float, end_by: float) -> None:
    leave_by = now + (end_by - now) * BOUNDARY_SHARE
    job.departure = Departure(reason, leave_by, end_by)
    job.capacity_changed = True
    job.announce("job_leaving", f"{reason}; within {end_by - now:.3g} s")


def _consider(job: JobState, now: float) -> None:
    """Every host that there is has had its notice, and there will be no others."""
    hosts = job.hosts.order
    if not job.settings.fixed_hosts or not hosts or job.first_success is not None:
        return
    drains = [job.hosts.drained(host.name) for host in hosts]
    noticed = [drain for drain in drains if drain is not None and drain.leave_by is not None]
    if len(noticed) < len(hosts):
        return
    last = max(noticed, key=lambda drain: drain.leave_by or now)
    every = "every host goes away" if len(hosts) > 1 else "its only host goes away"
    _begin(job, f"{every} ({last.reason})", now, max(now, last.leave_by or now))


def _hurry(job: JobState, departure: Departure, now: float) -> None:
    """Leave at once what is not left at a boundary in time; then go without those who cannot."""
    if job.round.at_boundary:
        if job.passed(departure.leave_by, now, "workers are to reach a step boundary"):
            job.leave_round(now, "no step boundary in time; the job is ending")
        return
    at = max(departure.leave_by, job.round.since + job.settings.settle)
    waiting = "others have not left yet, and the job is ending"
    if job.registry.count(WorkerState.READY) and job.passed(at, now, waiting):
        for worker in job.registry.having(WorkerState.RUNNING):
            job.stop_worker(worker, "it did not leave in time, and the job is ending")


def _too_late(job: JobState) -> str:
    if job.farewell is None or job.farewell.done:
        return f"workers had not left their step in time; {_from_the_newest()}"
    step = job.farewell.request.step
    return f"the state of step {step} could not be written in time; {_from_the_newest()}"


def _how_to_go_on(job: JobState) -> str:
    assert job.farewell is not None  # noqa: S101 - the caller has looked
    if job.farewell.folder:
        return "started again, the job goes on from there"
    return _from_the_newest()


def _from_the_newest() -> str:
    return "started again, the job goes on from the newest complete checkpoint, if there is one"


def _end(job: JobState, what: str) -> None:
    assert job.departure is not None  # noqa: S101 - the callers have looked
    job.finish(int(ExitCode.TERMINATED), f"{job.departure.reason}: {what}")
