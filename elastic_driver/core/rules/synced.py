"""Whose state a round went on with: said once, when its first finished step proves it.

The workers find out by themselves, from what each one stood for when the world was formed
(`worker.state_sync.agreement`); this is the same rule, for the event log. Pure.
"""

from __future__ import annotations

from elastic_driver.core.rules.workers import Worker
from elastic_driver.core.state import JobState


def step_in_round(job: JobState) -> None:
    """A member has finished a step: all of them have the same state, and it trains."""
    if job.round.stepped:
        return
    job.round.stepped = True
    found = (job.registry.workers.get(worker_id) for worker_id in job.round.members)
    members = [worker for worker in found if worker is not None]
    trained = [worker for worker in members if worker.version >= 0]
    clean = [worker for worker in trained if worker.clean]
    source = max(clean or trained or members, key=lambda w: (w.version, -w.place.rank))
    receivers = [worker for worker in members if _receives(worker, source)]
    if not trained:
        reason = f"{source.id}'s first values, or those of its checkpoint"
    elif receivers:
        reason = f"{len(receivers)} of {len(members)} took over {source.id}'s"
    else:
        reason = "everybody had it already"
    step = source.version if trained else None
    job.announce("state_synced", reason, source, step=step, receivers=len(receivers))


def _receives(worker: Worker, source: Worker) -> bool:
    if worker is source:
        return False
    whole = source.clean and worker.clean and worker.version >= 0
    return not whole or worker.version != source.version
