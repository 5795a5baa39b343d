"""Log events of the job, its rounds and its state: a class for each name (`kernel/log.py`).

Fields have defaults, as logs of older drivers lack some of them.
"""

from typing import ClassVar

from elastic_driver.kernel.log import Level, LogEvent
from elastic_driver.words.findings import Failure, StateValue


class JobEnd(LogEvent, frozen=True):
    """The end of a job."""

    exit_code: int | None = None
    first_failure: Failure | None = None
    step: int | None = None  # committed


class JobStarted(LogEvent, frozen=True, tag="job_started"):
    """A job begins."""

    sentence: ClassVar[str] = "the job has started"
    min_np: int | None = None
    max_np: int | None = None
    wanted: int | None = None  # workers


class DriverResumed(LogEvent, frozen=True, tag="driver_resumed"):
    """Another driver goes on with the job."""

    sentence: ClassVar[str] = "another driver goes on with the job"
    shown_from: ClassVar[Level] = Level.NORMAL
    term: int | None = None


class JobWaits(LogEvent, frozen=True, tag="job_waits"):
    """The job waits for hosts, agents or workers."""

    sentence: ClassVar[str] = "the job waits"
    shown_from: ClassVar[Level] = Level.NORMAL


class JobLeaving(LogEvent, frozen=True, tag="job_leaving"):
    """All workers have to leave."""

    sentence: ClassVar[str] = "the job is to end"
    shown_from: ClassVar[Level] = Level.NORMAL


class JobSucceeded(JobEnd, frozen=True, tag="job_succeeded"):
    """The job has ended with status 0."""

    sentence: ClassVar[str] = "the job has succeeded"
    shown_from: ClassVar[Level] = Level.NORMAL


class JobFailed(JobEnd, frozen=True, tag="job_failed"):
    """The job has ended with another status, or was stopped."""

    sentence: ClassVar[str] = "the job has failed"
    shown_from: ClassVar[Level] = Level.NORMAL


class ScaleRequested(LogEvent, frozen=True, tag="scale_requested"):
    """A user has asked for another number of workers."""

    sentence: ClassVar[str] = "another size was requested"
    shown_from: ClassVar[Level] = Level.NORMAL
    wanted: int | None = None


class PlanApplied(LogEvent, frozen=True, tag="plan_applied"):
    """A user's plan is carried out."""

    sentence: ClassVar[str] = "a plan is carried out"
    shown_from: ClassVar[Level] = Level.NORMAL
    number: int | None = None  # of the plan
    wanted: int | None = None


class SizeProposed(LogEvent, frozen=True, tag="size_proposed"):
    """The search for the best size tries another one."""

    sentence: ClassVar[str] = "another size is tried"
    shown_from: ClassVar[Level] = Level.NORMAL
    wanted: int | None = None


class SizeFound(LogEvent, frozen=True, tag="size_found"):
    """The search for the best size is over."""

    sentence: ClassVar[str] = "the best size is found"
    shown_from: ClassVar[Level] = Level.NORMAL
    size: int | None = None
    noise: float | None = None  # the scale of the gradients' noise


class SizeSearchReopened(LogEvent, frozen=True, tag="size_search_reopened"):
    """The best size is searched again."""

    sentence: ClassVar[str] = "the best size is searched anew"
    shown_from: ClassVar[Level] = Level.NORMAL


class PriorDropped(LogEvent, frozen=True, tag="prior_dropped"):
    """The speeds of similar jobs are left aside."""

    sentence: ClassVar[str] = "what similar jobs have measured does not fit this one"
    shown_from: ClassVar[Level] = Level.NORMAL


class RoundOpened(LogEvent, frozen=True, tag="round_opened"):
    """A round forms."""

    sentence: ClassVar[str] = "round {round} is opened"


class ProcessesStarted(LogEvent, frozen=True, tag="processes_started"):
    """Every process of a round was started."""

    sentence: ClassVar[str] = "round {round}: {world}"
    shown_from: ClassVar[Level] = Level.NORMAL
    size: int | None = None  # workers
    hosts: int | None = None


class RoundCompleted(LogEvent, frozen=True, tag="round_completed"):
    """The members of a round are known."""

    sentence: ClassVar[str] = "round {round} complete: {world}"
    size: int | None = None  # workers
    hosts: int | None = None
    told: bool | None = None  # people know it already

    @property
    def level(self) -> Level:
        """Return a level at which nobody hears it twice."""
        return Level.VERBOSE if self.told else Level.NORMAL


class RoundClosed(LogEvent, frozen=True, tag="round_closed"):
    """All members have left a round."""

    sentence: ClassVar[str] = "round {round} is closed"
    step: int | None = None  # committed


class BoundaryOverdue(LogEvent, frozen=True, tag="boundary_overdue"):
    """The workers do not reach the step after which they leave."""

    sentence: ClassVar[str] = "a planned change waits for the workers"


class StateSynced(LogEvent, frozen=True, tag="state_synced"):
    """All ranks hold the same state, as the first step of the round proves."""

    sentence: ClassVar[str] = "state synced in round {round}"
    step: int | None = None  # of the state
    receivers: int | None = None
    first_step: int | None = None
    seconds: float | None = None  # of training since then


class StateKept(LogEvent, frozen=True, tag="state_kept"):
    """The worker that alone holds the state stays for a time."""

    sentence: ClassVar[str] = "the last holder of the state stays"
    shown_from: ClassVar[Level] = Level.QUIET


class StateLost(LogEvent, frozen=True, tag="state_lost"):
    """No worker holds the newest state."""

    sentence: ClassVar[str] = "the state of step {step} or later is lost"
    shown_from: ClassVar[Level] = Level.QUIET
    is_alarm: ClassVar[bool] = True
    step: int | None = None


class StateSaved(LogEvent, frozen=True, tag="state_saved"):
    """The last members have written the state to disk."""

    sentence: ClassVar[str] = "last checkpoint written"
    shown_from: ClassVar[Level] = Level.NORMAL


class StateNotSaved(LogEvent, frozen=True, tag="state_not_saved"):
    """The last members have not written the state to disk."""

    sentence: ClassVar[str] = "no last checkpoint"
    shown_from: ClassVar[Level] = Level.NORMAL


class StateDiffers(LogEvent, frozen=True, tag="state_differs"):
    """The ranks hold different states."""

    sentence: ClassVar[str] = "the ranks hold different states after step {step}"
    shown_from: ClassVar[Level] = Level.QUIET
    is_alarm: ClassVar[bool] = True
    step: int | None = None
    leaf: str = ""
    values: tuple[StateValue, ...] = ()
    action: str = ""  # stop, repair or warn


class CommitsDiffer(LogEvent, frozen=True, tag="commits_differ"):
    """Some ranks commit, and others do not."""

    sentence: ClassVar[str] = "the ranks do not commit alike"
    shown_from: ClassVar[Level] = Level.QUIET
    is_alarm: ClassVar[bool] = True
    kind: str = ""
    ranks: str = ""


class StepsRedone(LogEvent, frozen=True, tag="steps_redone"):
    """The steps that were lost are trained again up to here."""

    sentence: ClassVar[str] = "the steps that were lost are trained again"


class ShardQuarantined(LogEvent, frozen=True, tag="shard_quarantined"):
    """No worker gets a shard of a data set any more."""

    sentence: ClassVar[str] = "a data shard is in quarantine"
    shown_from: ClassVar[Level] = Level.QUIET
    dataset: str = ""
    shard: str = ""


class GracePeriodPassed(LogEvent, frozen=True, tag="grace_period_passed"):
    """Some ranks still run after the first one has finished."""

    sentence: ClassVar[str] = "some ranks have not ended"
    shown_from: ClassVar[Level] = Level.NORMAL


def job_end(exit_code: int) -> type[JobEnd]:
    """Return the class of the end of a job with this status."""
    return JobSucceeded if exit_code == 0 else JobFailed
