"""Rounds of a job whose workers never speak to us: every change restarts them all.

Also the first round of a job of which nobody knows yet what kind it is. Called each time the
job looks at itself. Ranks are given at birth; a round is complete when all its processes
were started. Times are monotonic seconds.
"""

from __future__ import annotations

from elastic_driver.core.rules import placement, units
from elastic_driver.core.rules.outcome import KILLED, Cause, Kind, Loss
from elastic_driver.core.rules.rounds import RoundState
from elastic_driver.core.rules.workers import ACTIVE, OCCUPYING, Worker, WorkerState
from elastic_driver.core.state import JobState


def advance(job: JobState, now: float) -> None:
    """Do what the present state asks for; called again until nothing more is decided."""
    if job.round.state is RoundState.CLOSING:
        _watch_stopping(job, now)
    if job.end is None and job.round.state is RoundState.FORMING:
        _watch_forming(job, now)
    if job.end is not None or job.first_success is not None or not job.round.placed:
        return
    if job.losses:
        _watch_losses(job, now)
    else:
        _watch_changes(job, now)


def _watch_stopping(job: JobState, now: float) -> None:
    left = job.registry.count(*OCCUPYING)
    if left == 0:
        job.open_next_round(now, f"every worker of round {job.round.number} has stopped")
        return
    timeout = job.settings.elastic_timeout
    if job.passed(job.round.since + timeout, now, f"{left} workers have not stopped yet"):
        job.give_up(job.settings.min_np, 0, timeout)


# ---- a round that forms ------------------------------------------------------------------


def _watch_forming(job: JobState, now: float) -> None:
    if not job.round.placed:
        if job.first_success is None:
            _place(job, now)
        return
    if _wait_for_processes(job, now) or job.losses:
        return
    if job.round.started_at is None:
        job.round.started_at = now
    if job.kind is Kind.UNDECLARED:
        waiting = "to see whether the script calls elastic.init()"
        if not job.passed(job.round.started_at + job.settings.plain_after, now, waiting):
            return
        job.kind = Kind.PLAIN
    job.complete_round(_placed(job), now, "every process was started")


def _wait_for_processes(job: JobState, now: float) -> bool:
    missing = sum(1 for w in job.registry.having(WorkerState.STARTING) if not w.pid)
    if not missing:
        return False
    assert job.round.placed_at is not None  # noqa: S101 - set together with `placed`
    timeout = job.settings.start_timeout
    waiting = f"{missing} processes have not been started yet"
    if job.passed(job.round.placed_at + timeout, now, waiting):
        placed = len(job.round.placed)
        job.give_up(placed, placed - missing, timeout)
    return True


def _placed(job: JobState) -> list[Worker]:
    return [job.registry.workers[worker_id] for worker_id in job.round.placed]


def _place(job: JobState, now: float) -> None:
    """Start the round's workers once enough slots have agents."""
    settings, round_ = job.settings, job.round
    first = round_.number == 1
    need = job.at_most_wanted(settings.start_np if first else settings.min_np)
    free = placement.free_slots(job, placement.room_left(job))
    where = placement.founding_slots(job)
    have = len(free)
    shortage = units.shortage(len({host for host, _ in free}), settings)
    waiting = shortage or f"{have} of at least {need} slots have an agent"
    timeout = settings.start_timeout if first else settings.elastic_timeout
    if job.passed(round_.since + timeout, now, waiting):
        if first and settings.start_min_np is not None:
            need = min(need, settings.start_min_np)
        if have < need or not where:
            job.give_up(need, have, now - round_.since, shortage)
            return
    if have < max(need, 1) or not where:
        round_.slots_since = None
        return
    if round_.slots_since is None:
        round_.slots_since = now
    more_to_come = bool(job.fleet.starting()) and have != job.wanted
    if more_to_come and not job.passed(round_.slots_since + settings.last_call, now, waiting):
        return
    reason = f"round {round_.number} starts on {len(where)} slots"
    started = placement.place(job, where, founders=True, awaited=True, reason=reason)
    round_.placed_at, round_.need = now, min(need, len(started))
    round_.placed = tuple(w.id for w in sorted(started, key=lambda w: w.place.rank))


# ---- a round that breaks or changes ------------------------------------------------------


def _watch_losses(job: JobState, now: float) -> None:
    """Restart after a failure, once it is known whether the others fail by themselves too."""
    assert job.first_loss_at is not None  # noqa: S101 - set with the first of `losses`
    first = job.losses[0]
    if not _comes_from_outside(job, first) and job.registry.count(*ACTIVE):
        waiting = "to see whether every worker fails"
        if not job.passed(job.first_loss_at + job.settings.settle, now, waiting):
            return
    job.budget.count(now, fruitless=True, whole_round=True)
    exceeded = job.budget.exceeded()
    if exceeded is not None:
        job.fail(exceeded)
        return
    _restart(job, now, f"{first.failure.worker} {first.reason}")


def _comes_from_outside(job: JobState, loss: Loss) -> bool:
    """Whether a loss is surely not the script's own doing, so that its peers need no watching.

    No program ends itself by SIGKILL; other signals may be a crash that all its peers share.
    """
    if loss.cause in (Cause.HUNG, Cause.AGENT):
        return True
    return loss.cause is Cause.SIGNAL and (job.fruitful or loss.failure.exit_code == KILLED)


def _watch_changes(job: JobState, now: float) -> None:
    if job.round.state is RoundState.CLOSING:
        return
    leavers = (w.leaving for w in job.registry.having(*ACTIVE) if w.leaving)
    reason = job.round.broken or next(leavers, "")
    complete = job.round.state is RoundState.COMPLETE
    if not reason and complete and placement.founding_slots(job):
        reason = "there are slots for more workers"
    if not reason:
        job.round.change_since = None
        return
    if job.round.change_since is None:
        job.round.change_since = now
    at = job.round.change_since + job.settings.last_call
    if job.round.broken or job.passed(at, now, f"change is coming: {reason}"):
        _restart(job, now, reason)


def _restart(job: JobState, now: float, reason: str) -> None:
    """Stop every worker; the next round is placed when the last one is gone."""
    if not job.close_round(now, reason, at_boundary=False):
        return
    job.restart_count += 1
    job.stop_all(f"restart: {reason}")
    job.forget_losses()
