"""Whose state a round went on with: said once, when its first finished step proves it.

The workers find out by themselves, from what each one stood for when the world was formed
(`worker.state_sync.agreement`); this is the same rule, for the event log. Pure.
"""

from __future__ import annotations

from elastic_driver.core.state import JobState
from elastic_driver.core.state_version import StateVersion, receivers_of, source_of


def step_in_round(job: JobState) -> None:
    """A member has finished a step: all of them have the same state, and it trains."""
    if job.round.stepped:
        return
    job.round.stepped = True
    found = (job.registry.workers.get(worker_id) for worker_id in job.round.members)
    members = [worker for worker in found if worker is not None]
    states = [StateVersion(worker.version, worker.clean) for worker in members]
    source = source_of(states)
    if source is None:
        return
    receivers = receivers_of(states, source)
    worker, step = members[source], states[source].steps if states[source].trained else None
    if step is None:
        reason = f"{worker.id}'s first values, or those of its checkpoint"
    elif receivers:
        reason = f"{len(receivers)} of {len(members)} took over {worker.id}'s"
    else:
        reason = "everybody had it already"
    job.announce("state_synced", reason, worker, step=step, receivers=len(receivers))
