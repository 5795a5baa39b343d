"""The end of a worker, and what it means for its host, for the round, and for the job.

Called when a worker exits, hangs or loses its agent. Starts nothing. Times are monotonic seconds.
"""

from dataclasses import dataclass

from elastic_driver.core.documents import Failure
from elastic_driver.core.rules.base import Rule
from elastic_driver.core.rules.outcome import (
    KILLED,
    Cause,
    Loss,
    ScriptKind,
    exit_status,
    failed_by_itself,
)
from elastic_driver.core.rules.rounds import COMPLETE, FORMING
from elastic_driver.core.rules.workers import ACTIVE, READY, RUNNING, STARTING, Worker, WorkerNews
from elastic_driver.core.tf_config import TfLayout

PLAIN_PROGRESS_S = 30.0  # a plain round that lived this long got somewhere: it cannot tell us
_ENDED_BADLY = (Cause.OWN, Cause.VICTIM)  # a non-zero exit status, whosever fault


@dataclass(slots=True)
class Endings(Rule):
    """Records failures, and ends the job where its workers' ends say so."""

    tf: TfLayout | None
    grace_over: bool = False  # the others' grace period has passed, and it was said

    def give_up_worker(self, worker: Worker, reason: str, now: float, **evidence: str) -> bool:
        """Have a worker that hangs killed, and go on without it; False where that is no news."""
        if not self.workers.apply(worker, WorkerNews.LOST):
            return False
        self.orders.kill(worker, reason)
        heard = self.fleet.is_ready(worker.host)
        event = "worker_hung" if heard else "worker_lost"
        self.effects.announce(event, reason, worker, **evidence)
        self.record_loss(worker, Cause.HUNG, now)
        return True

    def record_loss(
        self, worker: Worker, cause: Cause, now: float, exit_code: int = KILLED, log_tail: str = ""
    ) -> None:
        """Record a worker's failure against the round, its host and the budget."""
        rank, member = worker.place.rank, worker.is_member
        failure = Failure(worker.id, rank, worker.host, worker.pid, exit_code, log_tail)
        reason = _describe(failure, cause)
        if self._plain_progress(now):
            self.outcome.step_finished()
        self.outcome.record(Loss(failure, cause, reason, member), now)
        self.capacity.note_change(vacated=(worker.host, worker.slot))
        if cause not in (Cause.VICTIM, Cause.AGENT):
            self._blame_host(worker, reason, now)
            if self.outcome.first_success is None:
                self.count_failure(now, member=member)
        if member and self.outcome.elastic and self.outcome.end is None:
            self.rounds.leave(now, f"{worker.id} {reason}")

    def count_failure(self, now: float, *, member: bool) -> None:
        """Take one failure from the budget; an elastic job ends here where it is exceeded.

        A plain round counts once, however many of its workers fall; it is judged when they have.
        """
        if not self.outcome.elastic:
            return
        current = self.rounds.current
        stands = current.state is COMPLETE and current.stepped and not member
        self.outcome.restarted()
        self.outcome.count_failure(now, fruitless=not stands)

    def _blame_host(self, worker: Worker, reason: str, now: float) -> None:
        got_somewhere = worker.stepped or self._plain_progress(now)
        if self.settings.host_failures is None and got_somewhere:
            return
        cooldown = self.hosts.worker_failed(worker.host, now, f"{worker.id} {reason}")
        if cooldown is not None:
            self.effects.announce("host_blacklisted", cooldown, host=worker.host)

    def _plain_progress(self, now: float) -> bool:
        current = self.rounds.current
        trains = current.state is COMPLETE and now - current.since >= PLAIN_PROGRESS_S
        return trains and self.outcome.kind is ScriptKind.PLAIN

    # ---- verdicts ------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """End the job if its workers' ends say so."""
        if self.outcome.first_success is not None:
            self._judge_finish(now)
        elif self.outcome.losses and not self._world_lives():
            self._judge_wipe_out()

    def _world_lives(self) -> bool:
        """Return whether a worker of the present world lives; a newcomer does not carry it on."""
        if self.rounds.current.state is FORMING or not self.outcome.elastic:
            return self.workers.count(*ACTIVE) > 0
        trained = self.workers.having(READY, RUNNING)
        return any(worker.admitted is not None for worker in trained)

    def _judge_wipe_out(self) -> None:
        outcome, elastic = self.outcome, self.outcome.elastic
        by_itself = failed_by_itself(
            outcome.losses, kind=outcome.kind, has_progress=outcome.has_progress
        )
        if not by_itself or self.settings.max_restarts:  # which the budget bounds
            if elastic:
                self.settle_losses()  # restart everything: the budget was asked at each failure
            return
        members = sum(1 for loss in outcome.losses if loss.member)
        when = "after training had begun" if elastic else "by themselves"
        if elastic and not outcome.has_progress:
            when = "before anyone finished a step"
        hint = "not restarted (--max-restarts N restarts)"
        outcome.fail(f"all {members} workers failed {when}: {hint}")

    def settle_losses(self) -> None:
        """Forget the losses of this round and the workers that have ended."""
        self.outcome.forget_losses()
        self.workers.forget_ended()

    def _judge_finish(self, now: float) -> None:
        for worker in self.workers.having(STARTING, READY):
            if not worker.is_member or self._stands_by(worker):
                self.orders.stop(worker, "the job is finishing: nobody new joins")
        self._dismiss_servers()
        losses, elastic = self.outcome.losses, self.outcome.elastic
        bad = next((loss for loss in losses if loss.member and loss.cause in _ENDED_BADLY), None)
        left = self.workers.count(*ACTIVE)
        if bad is not None and (left == 0 or not elastic):
            failure = bad.failure
            reason = f"rank {failure.rank} on {failure.host} {bad.reason}, others exited 0"
            self.outcome.finish(exit_status(failure), reason, failure)
        elif left == 0:
            self.outcome.finish(0, "every worker that was left finished its script")
        else:
            self._announce_grace(left, now)

    def _stands_by(self, worker: Worker) -> bool:
        """Return whether the present world went on without this earlier member (node units)."""
        current = self.rounds.current
        outside = worker.state is READY and worker.id not in current.members
        return outside and current.state is COMPLETE

    def _dismiss_servers(self) -> None:
        """Stop TensorFlow tasks that never end by themselves once the training is over."""
        if self.tf is None:
            return
        left = list(self.workers.having(*ACTIVE))
        if not any(self.tf.essential((worker.host, worker.slot)) for worker in left):
            for worker in left:
                self.orders.stop(worker, "the training it served is done")

    def _announce_grace(self, left: int, now: float) -> None:
        waiting, grace = f"a worker has finished; {left} still running", self.settings.grace_period
        over_at = (self.outcome.first_success or 0.0) + grace
        if not self.effects.due_or_set_alarm(over_at, now, waiting):
            return
        self.effects.wait_for(waiting)
        if not self.grace_over:
            self.grace_over = True
            late = f"{waiting} after {grace:g} s; waiting for them"
            self.effects.announce("grace_period_passed", late)


def _describe(failure: Failure, cause: Cause) -> str:
    if cause is Cause.HUNG:
        return "stopped giving signs of life"
    if cause is Cause.AGENT:
        return "was lost with its agent"
    code = failure.exit_code
    text = f"was killed by signal {-code}" if code < 0 else f"exited {code}"
    return f"{text} after losing a peer" if cause is Cause.VICTIM else text
