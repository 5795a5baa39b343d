"""How the role does, and the end of the job: failures, the budget of restarts, the exit status.

Nothing here changes a worker or a round. Times are monotonic seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from elastic_driver.errors import ExitCode, NotEnoughSlotsError
from elastic_driver.job.decisions import EndJob
from elastic_driver.job.events import StopRequested, takes
from elastic_driver.job.fleet import Effects
from elastic_driver.kernel.tables import saved
from elastic_driver.settings import Settings
from elastic_driver.words import counted
from elastic_driver.words import log_events as log
from elastic_driver.words.findings import Failure

TERMINATED = -15  # the status of a worker that has ended by SIGTERM
KILLED = -9  # the status of a worker that ended with its agent, or is killed for hanging


class ScriptKind(str, Enum):
    """The kind of the script, found by what it does."""

    UNDECLARED = "undeclared"
    ELASTIC = "elastic"
    PLAIN = "plain"


class Cause(str, Enum):
    """The cause of a worker's end."""

    OWN = "own"  # a non-zero exit status of its own
    SIGNAL = "signal"
    VICTIM = "victim"  # it failed because a peer was lost
    HUNG = "hung"
    AGENT = "agent"  # its agent was lost, and it ended with it
    MEMORY = "memory"  # it ran out of memory

    @classmethod
    def of(cls, exit_code: int, *, victim: bool, short: bool = False) -> "Cause":
        """Return the cause of an exit; negative codes are signals. `short`: of memory."""
        if short:
            return cls.MEMORY
        own = cls.SIGNAL if exit_code < 0 else cls.OWN
        return cls.VICTIM if victim else own


class Loss(NamedTuple):
    """One worker's failure."""

    failure: Failure
    cause: Cause
    reason: str
    member: bool  # it was in the round, or the round waited for it
    at: float = 0.0


def exit_status(failure: Failure | None) -> int:
    """Return the job's exit status for this failure: the worker's own, or 128 + its signal."""
    code = 0 if failure is None else failure.exit_code
    return 128 - code if code < 0 else code or 1


def first_failure(losses: Sequence[Loss]) -> Failure | None:
    """Return the failure a round is judged by: the first that no lost peer has caused."""
    own = (loss.failure for loss in losses if loss.cause is not Cause.VICTIM)
    return next(own, losses[0].failure if losses else None)


def failed_by_itself(losses: Sequence[Loss], *, kind: ScriptKind, has_progress: bool) -> bool:
    """Return whether losing all members this way means that the script fails, not the machines.

    An elastic job in which no worker ever finished a step has failed when all its members ended in
    any way, unless all of them ended with their agents. Any other job has failed when every member
    exited non-zero by itself. A script that ran out of memory may find more elsewhere.
    """
    members = [loss for loss in losses if loss.member]
    if any(loss.cause is Cause.MEMORY for loss in members):
        return False
    if kind is ScriptKind.ELASTIC and not has_progress:
        return any(loss.cause is not Cause.AGENT for loss in members)
    return bool(members) and all(loss.cause is Cause.OWN for loss in members)


class Departure(NamedTuple):
    """The end of the whole job: its reason, the limit for a boundary, and the latest end."""

    reason: str
    leave_by: float
    end_by: float


@dataclass(slots=True)
class Budget:
    """The number of failures that the job may still survive.

    With `max_restarts` given, every failure counts. Without it, only fruitless ones count: failures
    in a row with no step finished in between. Those within `settle` seconds of each other are one
    incident (a host's eight workers that die together).
    """

    settings: Settings
    failures: int = saved(0)  # in all
    fruitless: int = saved(0)  # incidents in a row
    _incident_at: float = saved(-math.inf, name="incident_at")

    def count(self, now: float, *, fruitless: bool, whole_round: bool = False) -> None:
        """Count one more failure; `fruitless`: no step was finished since the last one.

        A `whole_round` is judged as one failure: it is an incident of its own, however soon.
        """
        self.failures += 1
        if fruitless and (whole_round or now - self._incident_at >= self.settings.settle):
            self.fruitless += 1
            self._incident_at = now

    def record_step(self) -> None:
        """End the row of fruitless failures: a step was finished."""
        self.fruitless, self._incident_at = 0, -math.inf

    def exceeded(self) -> str | None:
        """Return which limit is exceeded and how to raise it; None while within."""
        limit, row = self.settings.max_restarts, self.settings.fruitless_restarts
        if limit is not None and self.failures > limit:
            failures = counted(self.failures, "failure is", "failures are")
            most = counted(limit, "restart")
            return f"{failures} more than the limit of {most}; raise --max-restarts"
        if limit is None and self.fruitless > row:
            in_a_row = f"{counted(self.fruitless, 'failure')} in a row without a finished step"
            hint = "mend the script, or allow more with --max-restarts"
            return f"{in_a_row} in between, the limit is {counted(row, 'restart')}; {hint}"
        return None


@dataclass(slots=True)
class Ending:
    """The end of the job, and its departure before that."""

    effects: Effects
    departure: Departure | None = saved(None)  # the whole job has to go
    end: EndJob | None = saved(None)

    @takes(StopRequested)
    def on_stop_requested(self, event: StopRequested) -> None:
        """End the job, because a user wants it."""
        self.finish(event.exit_code, event.reason or "a user asked it to stop")

    def depart(self, departure: Departure) -> None:
        """Record that the whole job has to go."""
        self.departure = departure

    def finish(self, exit_code: int, reason: str, failure: Failure | None = None) -> None:
        """End the job; only the first call has an effect."""
        if self.end is None:
            self.effects.announce(log.job_end(exit_code)(), reason)
            self.end = EndJob(int(exit_code), reason, failure)
            self.effects.decide(self.end)


@dataclass(slots=True)
class Outcome:
    """The result of the role so far: progress, losses, and what ends the job."""

    budget: Budget
    ending: Ending
    kind: ScriptKind = saved(ScriptKind.UNDECLARED)
    steps_reported: int = saved(0)  # the first steps of workers in their rounds
    has_progress: bool = saved(False)  # a worker has finished a step in this job
    # Steps in the newest state, as far as workers have told when rounds change.
    committed: int = saved(0)
    committed_in: int = saved(1)  # the training function of that state
    # The same, of the last state that was written when all workers had to leave.
    on_disk: int = saved(0)
    restart_count: int = saved(0)  # how often workers were started again
    losses: list[Loss] = saved(factory=list)  # since the last round was completed
    last_loss_at: float | None = saved(None)  # in the whole job
    first_success: float | None = saved(None)  # when the first member finished its script

    @property
    def elastic(self) -> bool:
        """Return whether the script is known to be an elastic one."""
        return self.kind is ScriptKind.ELASTIC

    @property
    def finishing(self) -> bool:
        """Return whether the job comes to its end: nothing is started any more."""
        return self.first_success is not None or self.ending.departure is not None

    def declare(self, kind: ScriptKind) -> None:
        """Record the kind of the script."""
        self.kind = kind

    def record_step(self, committed: int | None = None) -> None:
        """Record progress: the row of failures ends. `committed`: steps in all, if they count."""
        self.steps_reported += 1
        self.committed = self.committed if committed is None else committed
        self.has_progress = True
        self.budget.record_step()

    def record_state(self, steps: int, phase: int) -> None:
        """Record that a worker holds the state of `steps` commits, in its call `phase`."""
        if steps > 0:
            self.committed = max(self.committed, steps)
            self.committed_in = max(self.committed_in, phase)

    def record_saved(self, steps: int) -> None:
        """Record that the state of `steps` commits was written, as all workers had to leave."""
        self.on_disk = steps

    def record_success(self, now: float) -> None:
        """Record that a member has finished its script: nothing is started any more."""
        if self.first_success is None:
            self.first_success = now

    def count_restart(self, *, all_workers: bool = False) -> None:
        """Count a restart of workers; `all_workers`: those that had finished, too."""
        self.restart_count += 1
        if all_workers:
            self.first_success = None

    def record_loss(self, loss: Loss) -> None:
        """Record a worker's failure."""
        self.losses.append(loss)
        self.last_loss_at = loss.at

    def forget_losses(self) -> None:
        """Forget the losses so far; the next one counts as the first."""
        self.losses.clear()

    def count_failure(self, now: float, *, fruitless: bool, whole_round: bool = False) -> bool:
        """Count one failure; if the budget is used up, end the job and return False."""
        self.budget.count(now, fruitless=fruitless, whole_round=whole_round)
        exceeded = self.budget.exceeded()
        if exceeded is not None:
            self.fail(exceeded)
        return exceeded is None

    def fail(self, reason: str) -> None:
        """End the job with the first failure of this round; `reason`: why it does not go on."""
        failure = first_failure(self.losses)
        if failure is not None:
            code = failure.exit_code
            what = f"exit code {code}" if code >= 0 else f"signal {-code}"
            what = failure.lost or what
            reason = f"rank {failure.rank} on {failure.host} failed first ({what}); {reason}"
        self.finish_with(failure, reason)

    def finish_with(self, failure: Failure | None, reason: str) -> None:
        """End the job with the exit status of this failure."""
        self.ending.finish(exit_status(failure), reason, failure)

    def give_up(
        self, needed: int, available: int, waited: float, why: str = "", booting: str = ""
    ) -> None:
        """End the job because workers, slots or the leaving of a round took too long."""
        error = NotEnoughSlotsError(
            needed=needed,
            available=available,
            waited=waited,
            began=self.has_progress,
            booting=booting,
        )
        reason = f"{why} for {waited:.0f} s; check the hosts" if why else str(error)
        if self.committed > self.on_disk:
            left = "only a checkpoint is left, if there is one"
            reason += f"; of the state of step {self.committed} {left}"
        self.ending.finish(ExitCode.UNAVAILABLE, reason, first_failure(self.losses))
