"""The log events of a Brain: a class for each name (`kernel/log.py`).

The sentence of a class is what people read, and what stands in the log as the reason; fields of the
event fill it in. A line of the log has the name, the job and that reason.
"""

from typing import Any, ClassVar

from elastic_driver.brain.grants import Grant
from elastic_driver.kernel.log import LogEvent
from elastic_driver.words import counted


class BrainLogEvent(LogEvent, frozen=True):
    """What has happened to a job, or to the Brain."""

    @property
    def text(self) -> str:
        """The sentence, filled in."""
        return self.sentence.format(**self.words())

    def words(self) -> dict[str, Any]:
        """Return what fills the sentence in."""
        return self.facts()


# ---- jobs ----------------------------------------------------------------------------------


class JobArrived(BrainLogEvent, frozen=True, tag="job_arrived"):
    """A job asks for slots for the first time; `most` None: it has no limit."""

    sentence: ClassVar[str] = "wants {least} to {most} workers"
    least: int
    most: int | None

    def words(self) -> dict[str, Any]:
        """See `BrainLogEvent.words`."""
        return {"least": self.least, "most": self.most or "all"}


class JobReplaced(BrainLogEvent, frozen=True, tag="job_replaced"):
    """A later run of a job is heard."""

    sentence: ClassVar[str] = "another run of it has begun"


class JobBack(BrainLogEvent, frozen=True, tag="job_back"):
    """The driver of a silent job is heard."""

    sentence: ClassVar[str] = "its driver is heard again"


class JobDisbelieved(BrainLogEvent, frozen=True, tag="job_disbelieved"):
    """A job says that it holds more slots than it was granted."""

    sentence: ClassVar[str] = (
        "it says that it holds {slots} more than this Brain has granted it; they do not count"
    )
    more: int

    def words(self) -> dict[str, Any]:
        """See `BrainLogEvent.words`."""
        return {"slots": counted(self.more, "slot")}


class JobEnded(BrainLogEvent, frozen=True, tag="job_ended"):
    """A job has said that it is over."""

    sentence: ClassVar[str] = "over, with exit status {exit_code}"
    exit_code: int


class JobSilent(BrainLogEvent, frozen=True, tag="job_silent"):
    """A driver is not heard any more."""

    sentence: ClassVar[str] = "its driver is silent"


class JobSilentWithSlots(JobSilent, frozen=True, tag="job_silent"):
    """A driver is not heard any more, and processes of its job may have slots."""

    sentence: ClassVar[str] = (
        "its driver is silent; its slots stay its own until it has certainly ended"
    )


class JobLost(BrainLogEvent, frozen=True, tag="job_lost"):
    """The driver of a silent job has ended."""

    sentence: ClassVar[str] = "its driver has ended; its slots are free in {seconds:g} s"
    seconds: float


class JobDoubted(BrainLogEvent, frozen=True, tag="job_lost"):
    """Somebody else listens where the driver of a silent job was, or that driver is stopped."""

    sentence: ClassVar[str] = (
        "who listens at {place} is not its driver, or it is stopped; its slots are "
        "free in {seconds:g} s, unless it is heard by then"
    )
    place: str
    seconds: float


class JobFound(BrainLogEvent, frozen=True, tag="job_found"):
    """A driver whose end was assumed has proved that it lives."""

    sentence: ClassVar[str] = "its driver lives; its slots stay its own"


class JobGone(BrainLogEvent, frozen=True, tag="job_gone"):
    """The processes of a job without a driver have ended."""

    sentence: ClassVar[str] = "its processes have ended; its slots are free"


class JobForgotten(BrainLogEvent, frozen=True, tag="job_forgotten"):
    """An administrator has a silent job forgotten."""

    sentence: ClassVar[str] = "an administrator says that it has ended"


class JobDropped(BrainLogEvent, frozen=True, tag="job_dropped"):
    """A job without slots gives way to another one."""

    sentence: ClassVar[str] = "it has no slots, and others need its place"


class JobStuck(BrainLogEvent, frozen=True, tag="job_stuck"):
    """A job does not give up slots that it is to give up."""

    sentence: ClassVar[str] = (
        "it has kept slots for {seconds:g} s that it was to give up; no plan counts on it until "
        "it has"
    )
    seconds: float


class GrantMade(BrainLogEvent, frozen=True, tag="grant"):
    """A job has got a grant."""

    sentence: ClassVar[str] = "{slots} (grant {number}): {reason}"
    grant: Grant

    def words(self) -> dict[str, Any]:
        """See `BrainLogEvent.words`."""
        hosts = self.grant.hosts.items()
        slots = ", ".join(f"{host}:{slots}" for host, slots in hosts) or "no slots"
        return {"slots": slots, "number": self.grant.number, "reason": self.grant.reason}


# ---- plans ---------------------------------------------------------------------------------


class PlanAdopted(BrainLogEvent, frozen=True, tag="brain_plan"):
    """A plan changes the slots of a job."""

    sentence: ClassVar[str] = "{why}"
    why: str


class PlanRefused(BrainLogEvent, frozen=True, tag="plan_refused"):
    """A plan of the algorithm that was chosen is not carried out."""

    sentence: ClassVar[str] = "algorithm {algorithm}: {why}; the built-in one is asked instead"
    algorithm: str
    why: str


class BuiltInPlanRefused(BrainLogEvent, frozen=True, tag="plan_refused"):
    """The built-in algorithm has made no plan that can be carried out."""

    sentence: ClassVar[str] = "algorithm {algorithm}: {why}; it is asked again in {seconds:g} s"
    algorithm: str
    why: str
    seconds: float


# ---- the Brain's own surroundings ----------------------------------------------------------


class DiscoveryFailed(BrainLogEvent, frozen=True, tag="discovery_failed"):
    """The source of hosts has failed."""

    sentence: ClassVar[str] = "{why}; the last known hosts stay"
    why: str


class StateFailed(BrainLogEvent, frozen=True, tag="state_failed"):
    """The Brain's state cannot be written."""

    sentence: ClassVar[str] = "{file} cannot be written: {why}; no job gets other slots"
    file: str
    why: str


class StateWritten(BrainLogEvent, frozen=True, tag="state_written"):
    """The Brain's state can be written again."""

    sentence: ClassVar[str] = "{file} is written again"
    file: str
