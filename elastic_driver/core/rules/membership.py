"""Rounds of a job whose workers speak to us: survivors keep their process.

Called each time the job looks at itself. A loss is handled at once, growth and removal at a
step boundary; booting workers are not waited for while enough others are ready. Times are
monotonic seconds.
"""

from __future__ import annotations

from elastic_driver.core.documents import Failure
from elastic_driver.core.rules import (
    boundary,
    drain,
    final_checkpoint,
    hangs,
    placement,
    preemption,
    units,
)
from elastic_driver.core.rules.endings import record_loss
from elastic_driver.core.rules.outcome import KILLED, Cause
from elastic_driver.core.rules.rounds import RoundState
from elastic_driver.core.rules.workers import News, Worker, WorkerState
from elastic_driver.core.state import JobState


def advance(job: JobState, now: float) -> None:
    """Do what the present state asks for; called again until nothing more is decided."""
    if job.some_leave:
        _stop_newcomers(job)
    if job.round.stalls:
        _end_hangs(job, now)
    if job.end is not None or job.leavers_unsettled:
        return  # who was to go may have to stay, now that another hangs: the next look knows
    if job.round.state is RoundState.COMPLETE:
        _watch_changes(job, now)
    if job.round.state is RoundState.CLOSING:
        boundary.watch(job, now)
        _watch_leaving(job, now)
    if job.end is None and not job.finishing:
        _fill_slots(job, now)
    if job.end is None and job.round.state is RoundState.FORMING:
        _watch_forming(job, now)


def _stop_newcomers(job: JobState) -> None:
    """Those that have to go and never took part: they have nothing to leave."""
    for worker in job.registry.having(WorkerState.STARTING, WorkerState.READY):
        if worker.leaving and worker.admitted is None:
            job.stop_worker(worker, worker.leaving)


# ---- a round that trains -----------------------------------------------------------------


def _watch_changes(job: JobState, now: float) -> None:
    """Growth and removal: coalesced by the last call, then a notice to leave at a boundary."""
    if job.first_success is not None:
        return
    staying = [
        w for w in job.registry.having(WorkerState.RUNNING, WorkerState.READY) if not w.leaving
    ]
    fitting = units.fit(staying, job.settings)
    newcomers = [w for w in fitting if w.state is WorkerState.READY]
    leavers = [w for w in job.registry.having(WorkerState.RUNNING) if w.leaving]
    if not newcomers and not leavers:
        job.round.change_since = None
        return
    if job.round.change_since is None:
        job.round.change_since = now
    reason = leavers[0].leaving if leavers else f"{newcomers[0].id} is ready to join"
    at = job.round.change_since + job.settings.last_call
    all_leave = not newcomers and len(leavers) == job.registry.count(WorkerState.RUNNING)
    if all_leave and _newcomers_in_sight(job):
        # Whoever leaves now takes the state along: train on until somebody can take it over.
        at = job.round.change_since + job.settings.elastic_timeout
        at = min(at, drain.hand_over_until(job, leavers))
        reason = f"{reason}; nobody to take over yet"
    elif not job.finishing and (until := drain.waits_until(job, leavers)) is not None:
        at, reason = max(at, until), f"{reason}; its replacements are booting"
    if job.passed(at, now, f"change is coming: {reason}"):
        boundary.leave(job, now, reason)


def _newcomers_in_sight(job: JobState) -> bool:
    if job.finishing:
        return False
    booting = any(not w.leaving for w in job.registry.having(WorkerState.STARTING))
    return booting or bool(job.fleet.starting()) or bool(placement.free_slots(job, 1))


# ---- a round that its members leave ------------------------------------------------------


def _watch_leaving(job: JobState, now: float) -> None:
    still_in = job.registry.count(WorkerState.RUNNING)
    if still_in:
        _hurry_stragglers(job, now)
        timeout = job.settings.elastic_timeout
        waiting = f"{still_in} workers have not left round {job.round.number} yet"
        if not job.passed(job.round.since + timeout, now, waiting):
            return
        if job.round.at_boundary:
            # Whoever commits once an hour is not to lose that hour to a planned change, and
            # one that hangs loses its lease: so this only says what is going on.
            job.round.since = now
            job.announce(
                "boundary_overdue",
                f"no step boundary for {timeout:g} s; does the script call commit()?",
            )
            return
        for worker in job.registry.having(WorkerState.RUNNING):
            give_up_worker(job, worker, f"did not leave the round within {timeout:g} s", now)
        return
    if job.first_success is None or job.registry.count(WorkerState.READY):
        job.open_next_round(now, f"everybody has left round {job.round.number}")


def _hurry_stragglers(job: JobState, now: float) -> None:
    """Once a member has left at the boundary, nobody can finish another step without it.

    So a member that does not follow soon missed the notice and waits for its peer: telling it to
    leave at once costs it nothing, and nothing else would end that wait.
    """
    if not job.round.at_boundary:
        return
    ready = job.registry.having(WorkerState.READY)
    gone = next((w for w in ready if w.left == job.round.number), None)
    if gone is None:
        return
    if job.round.left_since is None:
        job.round.left_since = now
    at = job.round.left_since + job.settings.settle
    if job.passed(at, now, f"{gone.id} has left round {job.round.number}; others follow"):
        reason = f"{gone.id} has left round {job.round.number} and others have not"
        job.leave_round(now, reason)


def _end_hangs(job: JobState, now: float) -> None:
    for worker, reason, stall in hangs.culprits(job, now):
        give_up_worker(job, worker, reason, now, stack=stall.stack)


def give_up_worker(job: JobState, worker: Worker, reason: str, now: float, **evidence: str) -> bool:
    """A worker hangs: have it killed, and go on without it; False where that is no news."""
    if not job.registry.apply(worker, News.LOST):
        return False
    job.order_kill(worker, reason)
    heard = job.fleet.is_ready(worker.host)
    job.announce("worker_hung" if heard else "worker_lost", reason, worker, **evidence)
    failure = Failure(worker.id, worker.place.rank, worker.host, worker.pid, KILLED)
    record_loss(job, worker, failure, Cause.HUNG, now)
    return True


# ---- a round that forms ------------------------------------------------------------------


def _fill_slots(job: JobState, now: float) -> None:
    """Start replacements and newcomers; before any step was finished, not at once."""
    if not job.placement_due:
        return
    if not job.fruitful and job.last_loss_at is not None:
        waiting = "to see whether every worker fails before anyone is started again"
        if not job.passed(job.last_loss_at + job.settings.settle, now, waiting):
            return
    job.placement_due = False
    founders = job.round.state is RoundState.FORMING and not any(
        w.admitted is not None for w in job.registry.having(WorkerState.READY)
    )
    reason = "a free slot" if job.round.number > 1 or not founders else "the first round"
    # In the first round a replacement does not hold up those who are ready and enough.
    awaited = founders and not job.round.placed
    where = placement.free_slots(job, placement.room_left(job))
    placement.place(job, where, founders=founders, awaited=awaited, reason=reason)


def _watch_forming(job: JobState, now: float) -> None:
    if job.first_success is not None:
        _watch_last_round(job, now)
        return
    if _founders_boot(job, now):
        return
    ready = [w for w in job.registry.having(WorkerState.READY) if not w.leaving]
    if _would_be_lost(job, ready) and final_checkpoint.is_going_on(job, now):
        return
    if job.departure is not None:
        preemption.over(job)
        return
    _release_leavers(job, ready)
    fitting = units.fit(ready, job.settings)
    if any(w.admitted is not None for w in ready):
        if len(fitting) >= job.settings.min_np:
            _complete(job, ready, now, _why_complete(job))
        else:
            _give_up_below(job, job.settings.min_np, ready, now)
        return
    need = _need_of_a_fresh_round(job, ready, fitting, now)
    if need is not None and len(fitting) >= max(need, 1):
        _complete(job, ready, now, "every worker is ready")


def _founders_boot(job: JobState, now: float) -> bool:
    """Whether the first round waits for workers that were started for it, and nothing else matters.

    Seen without a look at each, for that would cost the square of their number.
    """
    if job.round.number > 1 or job.some_leave or job.departure is not None:
        return False
    if not any(worker.awaited for worker in job.registry.having(WorkerState.STARTING)):
        return False
    return not job.passed(_fresh_until(job), now, _fresh_waiting(job))


def _fresh_until(job: JobState) -> float:
    """Until when workers that were started together are waited for."""
    since = job.round.since if job.round.placed_at is None else job.round.placed_at
    return since + job.settings.start_timeout


def _fresh_need(job: JobState) -> int:
    first = job.round.number == 1
    return job.at_most_wanted(job.round.need if first else job.settings.min_np)


def _fresh_waiting(job: JobState) -> str:
    ready, booting = (job.registry.count(s) for s in (WorkerState.READY, WorkerState.STARTING))
    return f"{ready} of at least {_fresh_need(job)} workers are ready, {booting} are booting"


def _watch_last_round(job: JobState, now: float) -> None:
    """After a success: those who are left form a round of their own, however few."""
    ready = list(job.registry.having(WorkerState.READY))
    booting = job.registry.count(WorkerState.STARTING)
    timeout = job.settings.start_timeout
    if booting and not job.passed(job.round.since + timeout, now, f"{booting} workers are booting"):
        return
    if ready:
        _complete(job, ready, now, "the workers that are left finish together")
        return
    for worker in job.registry.having(WorkerState.STARTING):
        job.stop_worker(worker, f"not ready within {timeout:g} s, and the job is finishing")


def _need_of_a_fresh_round(
    job: JobState, ready: list[Worker], fitting: list[Worker], now: float
) -> int | None:
    """How many are enough where nobody trains yet; None: those started together are waited for."""
    settings, first, need = job.settings, job.round.number == 1, _fresh_need(job)
    booting = any(w.awaited for w in job.registry.having(WorkerState.STARTING))
    if not first and len(fitting) < max(need, 1):
        _give_up_below(job, need, ready, now)
        return None
    if not job.passed(_fresh_until(job), now, _fresh_waiting(job)):
        return None if booting else need
    if first and settings.start_min_np is not None:
        need = min(need, settings.start_min_np)
    if first and len(fitting) < max(need, 1):
        job.give_up(need, len(ready), now - job.round.since, _shortage(job, ready))
        return None
    return need


def _why_complete(job: JobState) -> str:
    lost = next((loss for loss in job.losses if loss.member), None)
    return f"without {lost.failure.worker}, which {lost.reason}" if lost else "membership changed"


def _give_up_below(job: JobState, need: int, ready: list[Worker], now: float) -> None:
    """Below the minimum for too long: the job ends."""
    at = job.round.since + job.settings.elastic_timeout
    shortage = _shortage(job, ready)
    if job.passed(at, now, shortage or f"{len(ready)} of at least {need} workers are ready"):
        job.give_up(need, len(ready), now - job.round.since, shortage)


def _shortage(job: JobState, ready: list[Worker]) -> str:
    return units.shortage(len({worker.host for worker in ready}), job.settings)


def _complete(job: JobState, ready: list[Worker], now: float, reason: str) -> None:
    members = ready
    if job.first_success is None:
        holders = _state_holders(job, ready)
        shares = units.shares(ready, job.settings, holders)[: job.wanted]
        members = units.fit(shares, job.settings)
    job.complete_round(members, now, reason)
    if job.first_success is None:
        job.forget_losses()
        _release_leavers(job, members)


# ---- workers that have to leave ----------------------------------------------------------


def _state_holders(job: JobState, ready: list[Worker]) -> list[Worker]:
    """The worker that has to leave but alone holds the newest state: it hands it over first."""
    newest = max((w.version for w in ready if w.clean), default=-1)
    leavers = [w for w in job.registry.having(WorkerState.READY) if w.leaving and w.clean]
    best = max(leavers, key=lambda w: w.version, default=None)
    room = job.wanted is None or job.wanted >= 2  # beside it somebody has to receive
    return [best] if best is not None and best.version > newest and room else []


def _would_be_lost(job: JobState, ready: list[Worker]) -> bool:
    """Whether only workers that leave hold the newest state, and nobody can receive it."""
    newest = max((w.version for w in ready if w.clean), default=-1)
    waiting = job.registry.having(WorkerState.READY)
    ahead = any(w.leaving and w.clean and w.version > newest for w in waiting)
    return ahead and not (ready and _state_holders(job, ready))


def _release_leavers(job: JobState, ready: list[Worker]) -> None:
    """Stop those who have left the round and have to go, unless their state is still needed."""
    needed: list[Worker] = []
    if ready or _newcomers_in_sight(job) or drain.slots_come_free(job):
        needed = _state_holders(job, ready)
    for worker in job.registry.having(WorkerState.READY):
        if worker.leaving and worker not in needed:
            job.stop_worker(worker, worker.leaving)
