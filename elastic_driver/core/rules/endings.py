"""What the end of a worker means: for its host, for the round, and for the job.

Called by the job machine when a worker exits, hangs or loses its agent, and each time it
looks at itself. Starts nothing. Times are monotonic seconds.
"""

from __future__ import annotations

from elastic_driver.core.documents import Failure
from elastic_driver.core.rules.outcome import Cause, Kind, Loss, exit_status, failed_by_itself
from elastic_driver.core.rules.rounds import RoundState
from elastic_driver.core.rules.workers import ACTIVE, Worker, WorkerState
from elastic_driver.core.state import JobState

PLAIN_FRUIT_S = 30.0  # a plain round that lived this long got somewhere: it cannot tell us
_ENDED_BADLY = (Cause.OWN, Cause.VICTIM)  # a non-zero exit status, whosever fault


def is_member(worker: Worker) -> bool:
    """Whether the worker is, or was about to be, one of the present world."""
    return worker.admitted is not None or worker.founder


def record_success(job: JobState, now: float) -> None:
    """A member has finished its script: from now on nothing is started any more."""
    if job.first_success is None:
        job.first_success = now


def record_loss(job: JobState, worker: Worker, failure: Failure, cause: Cause, now: float) -> None:
    """Enter a worker's failure into the books: the round's, its host's and the budget's."""
    reason = _describe(failure, cause)
    member = is_member(worker)
    _note_plain_fruit(job, now)
    job.losses.append(Loss(failure, cause, reason, member))
    job.first_loss_at = now if job.first_loss_at is None else job.first_loss_at
    job.last_loss_at = now
    job.vacated.append((worker.host, worker.slot))
    job.capacity_changed = True
    if cause not in (Cause.VICTIM, Cause.AGENT):
        _blame_host(job, worker, reason, now)
        if job.first_success is None:
            count_failure(job, now, member=member)
    if member and job.kind is Kind.ELASTIC and job.end is None:
        job.leave_round(now, f"{worker.id} {reason}")


def count_failure(job: JobState, now: float, *, member: bool) -> None:
    """Take one failure from the budget; an elastic job ends here where it is exceeded.

    A plain round counts once, however many of its workers fall; it is judged when they have.
    """
    if job.kind is not Kind.ELASTIC:
        return
    stands = job.round.state is RoundState.COMPLETE and job.round.stepped and not member
    job.budget.count(now, fruitless=not stands)
    job.restart_count += 1
    reason = job.budget.exceeded()
    if reason is not None:
        job.fail(reason)


def _blame_host(job: JobState, worker: Worker, reason: str, now: float) -> None:
    got_somewhere = worker.stepped or _plain_fruit(job, now)
    if job.settings.host_failures is None and got_somewhere:
        return
    cooldown = job.hosts.worker_failed(worker.host, now, f"{worker.id} {reason}")
    if cooldown is not None:
        job.announce("host_blacklisted", cooldown, host=worker.host)


def _plain_fruit(job: JobState, now: float) -> bool:
    return (
        job.kind is Kind.PLAIN
        and job.round.state is RoundState.COMPLETE
        and now - job.round.since >= PLAIN_FRUIT_S
    )


def _note_plain_fruit(job: JobState, now: float) -> None:
    if _plain_fruit(job, now):
        job.fruitful = True
        job.budget.step_finished()


def _describe(failure: Failure, cause: Cause) -> str:
    if cause is Cause.HUNG:
        return "stopped giving signs of life"
    if cause is Cause.AGENT:
        return "was lost with its agent"
    code = failure.exit_code
    text = f"was killed by signal {-code}" if code < 0 else f"exited {code}"
    return f"{text} after losing a peer" if cause is Cause.VICTIM else text


# ---- verdicts ----------------------------------------------------------------------------


def judge(job: JobState, now: float) -> None:
    """End the job if its workers' ends say so."""
    if job.first_success is not None:
        _judge_finish(job, now)
    elif job.losses and not _anybody_left(job):
        _judge_wipe_out(job)


def _anybody_left(job: JobState) -> bool:
    """Whether someone of the present world lives (a newcomer does not carry it on)."""
    if job.round.state is RoundState.FORMING or job.kind is not Kind.ELASTIC:
        return job.registry.count(*ACTIVE) > 0
    return any(
        worker.admitted is not None
        for worker in job.registry.having(WorkerState.READY, WorkerState.RUNNING)
    )


def _judge_wipe_out(job: JobState) -> None:
    if not failed_by_itself(job.losses, kind=job.kind, fruitful=job.fruitful):
        if job.kind is Kind.ELASTIC:
            job.forget_losses()  # restart everything: the budget was asked at each failure
        return
    if job.settings.max_restarts:  # the user asked for restarts; the budget bounds them
        if job.kind is Kind.ELASTIC:
            job.forget_losses()
        return
    members = sum(1 for loss in job.losses if loss.member)
    when = "after training had begun" if job.fruitful else "before anyone finished a step"
    if job.kind is not Kind.ELASTIC:
        when = "by themselves"
    job.fail(f"all {members} workers failed {when}: not restarted (--max-restarts N restarts)")


def _judge_finish(job: JobState, now: float) -> None:
    for worker in job.registry.having(WorkerState.STARTING, WorkerState.READY):
        if not is_member(worker) or _stands_by(job, worker):
            job.stop_worker(worker, "the job is finishing: nobody new joins")
    _dismiss_servers(job)
    bad = next((x for x in job.losses if x.member and x.cause in _ENDED_BADLY), None)
    left = job.registry.count(*ACTIVE)
    if bad is not None and (left == 0 or job.kind is not Kind.ELASTIC):
        job.finish(
            exit_status(bad.failure),
            f"rank {bad.failure.rank} on {bad.failure.host} {bad.reason}, others exited 0",
            bad.failure,
        )
    elif left == 0:
        job.finish(0, "every worker that was left finished its script")
    else:
        _announce_grace(job, left, now)


def _stands_by(job: JobState, worker: Worker) -> bool:
    """Whether it took part once, and the present world went on without it (whole node units)."""
    outside = worker.state is WorkerState.READY and worker.id not in job.round.members
    return outside and job.round.state is RoundState.COMPLETE


def _dismiss_servers(job: JobState) -> None:
    """Stop TensorFlow tasks that never end by themselves once the training they serve is over."""
    if job.tf is None:
        return
    left = list(job.registry.having(*ACTIVE))
    if not any(job.tf.essential((worker.host, worker.slot)) for worker in left):
        for worker in left:
            job.stop_worker(worker, "the training it served is done")


def _announce_grace(job: JobState, left: int, now: float) -> None:
    assert job.first_success is not None  # noqa: S101 - the caller has looked
    waiting = f"a worker has finished; {left} still running"
    if not job.passed(job.first_success + job.settings.grace_period, now, waiting):
        return
    job.waiting = waiting
    if not job.grace_over:
        job.grace_over = True
        grace = job.settings.grace_period
        job.announce("grace_period_passed", f"{waiting} after {grace:g} s; waiting for them")
