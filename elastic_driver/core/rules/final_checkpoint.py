"""The last checkpoint: whoever leaves last puts the state on disk first.

As long as somebody who stays holds the state, it is handed over in memory. When all who hold it
have to go (a notice to all of them, every host removed), they are asked, between two rounds and
so at a common step, to write it together where it has a `checkpoint_dir`. The request changes
nothing else: who is asked stays READY, and may be in the next round after all. Called by
`elastic`; stops nobody. Times are monotonic seconds.
"""

from __future__ import annotations

from elastic_driver.core.decisions import PublishSave
from elastic_driver.core.documents import SaveRequest
from elastic_driver.core.events import WorkerSaved
from elastic_driver.core.pending import Farewell
from elastic_driver.core.rules.workers import Worker, WorkerState
from elastic_driver.core.state import JobState


def is_going_on(job: JobState, now: float) -> bool:
    """Whether those who leave are still needed to write; asks them to where nobody has yet.

    Only for a moment in which everybody has left the round, and nobody who stays can receive it.
    """
    holders = _holders(job)
    if not holders:
        return False
    known = job.farewell
    if known is None or known.request.step != holders[0].version:
        known = job.farewell = _ask(job, holders, _until(job, holders, now), now)
    elif not known.done and not _all_there(known, holders):
        known = job.farewell = _ask(job, holders, known.until, now)
    if known.done:
        return False
    step = known.request.step
    if not job.passed(known.until, now, f"step {step} is being written to disk"):
        return True
    _finish(job, known, problem="it could not be written in time; raise --grace-period")
    return False


def told(job: JobState, event: WorkerSaved) -> None:
    """A worker says how it went: the first of those asked for all, any of them of trouble."""
    known = job.farewell
    if known is None or known.done or known.request.number != event.number:
        job.ignore(f"{event.worker} has saved what nobody asks for (any more)")
        return
    members = known.request.members
    if event.worker not in members or (event.worker != members[0] and not event.problem):
        job.ignore(f"{event.worker} is not the one to say that step {known.request.step} is saved")
        return
    _finish(job, known, folder=event.folder, problem=event.problem)


def _holders(job: JobState) -> list[Worker]:
    """Those who hold the newest state, exactly as it was after its last step, by rank."""
    clean = [w for w in job.registry.having(WorkerState.READY) if w.clean and w.version > 0]
    newest = max((w.version for w in clean), default=0)
    return sorted((w for w in clean if w.version == newest), key=lambda w: w.age)


def _all_there(known: Farewell, holders: list[Worker]) -> bool:
    return set(known.request.members) <= {worker.id for worker in holders}


def _until(job: JobState, holders: list[Worker], now: float) -> float:
    """When the first of them is going to be stopped."""
    if job.departure is not None:
        return job.departure.end_by
    drains = [job.hosts.drained(worker.host) or worker.drain for worker in holders]
    ends = [drain.leave_by for drain in drains if drain is not None and drain.leave_by is not None]
    return min([now + job.settings.grace_period, *ends])


def _ask(job: JobState, holders: list[Worker], until: float, now: float) -> Farewell:
    job.saves += 1
    step = holders[0].version
    reason = f"all who hold step {step} leave: {holders[0].leaving}"
    members = tuple(worker.id for worker in holders)
    request = SaveRequest(job.saves, step, members, max(0.0, until - now), reason)
    if now < until:
        job.decide(PublishSave(request, reason))
    return Farewell(request, until)


def _finish(job: JobState, known: Farewell, *, folder: str = "", problem: str = "") -> None:
    known.done, known.folder, known.problem = True, folder, problem
    job.announce("state_saved" if folder else "state_not_saved", known.outcome)
