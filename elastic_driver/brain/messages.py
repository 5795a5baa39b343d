"""The events and decisions of the Brain's machine (`brain.cluster`).

A job is named by its run id. Times are unix seconds: the Brain's machine is restored by a later
process, perhaps on another machine.
"""

from typing import Literal

from msgspec import Struct

from elastic_driver.brain.algorithm import HostView, Plan, View
from elastic_driver.brain.brain_events import BrainLogEvent
from elastic_driver.brain.grants import Grant, JobOver, JobReport, Proved
from elastic_driver.kernel.machine import CausedDecision

# ---- events --------------------------------------------------------------------------------


class JobHeard(Struct, frozen=True, tag="job_heard"):
    """The driver of a job has sent a report; its first one asks for slots.

    `proved`: the grant that its receipt proves, of a Brain whose state is lost; None: there is no
    such receipt.
    """

    job: str
    report: JobReport
    proved: Proved | None = None


class JobEnded(Struct, frozen=True, tag="job_ended"):
    """The driver of a job has said that it is over."""

    job: str
    over: JobOver


class JobSilent(Struct, frozen=True, tag="job_silent"):
    """The lease of a job's driver has ended."""

    job: str


class DriverProbed(Struct, frozen=True, tag="driver_probed"):
    """The answer to a `ProbeDriver`, or, without one, that the driver is `lost`.

    answered: it has proved that it lives, now or on a connection that has stood since. refused: its
    machine says that nobody listens there. unproved: somebody does, without that proof. silent:
    nobody can be reached. lost: that connection has ended.
    """

    job: str
    began: float
    liveness: str
    result: Literal["answered", "refused", "unproved", "silent", "lost"]


class JobForgotten(Struct, frozen=True, tag="job_forgotten"):
    """An administrator says that a silent job has no processes any more."""

    job: str


class JobDropped(Struct, frozen=True, tag="job_dropped"):
    """There is no place for a job if it has no slots; its driver may ask again."""

    job: str


class HostsFound(Struct, frozen=True, tag="hosts_found"):
    """The hosts that the Brain may give, in the order of their source; no figures."""

    hosts: tuple[HostView, ...]


class HostsMeasured(Struct, frozen=True, tag="hosts_measured"):
    """The newest figures of hosts that are not older than 30 s; the others have none."""

    hosts: tuple[HostView, ...]


class Planned(Struct, frozen=True, tag="planned"):
    """The answer to an `AskAlgorithm`."""

    request: int
    plan: Plan


class PlanFailed(Struct, frozen=True, tag="plan_failed"):
    """An algorithm has raised, has hung, or has returned no plan; `reason` is a phrase."""

    request: int
    reason: str


# ---- decisions -----------------------------------------------------------------------------


class PublishGrant(CausedDecision, frozen=True, tag="publish_grant"):
    """Write the newest grant of a job, once the Brain's state is on the disk.

    `claims`: the slots that processes of the job may occupy now, for the receipt.
    """

    job: str
    grant: Grant
    claims: dict[str, int]
    reason: str


class WithdrawGrant(CausedDecision, frozen=True, tag="withdraw_grant"):
    """Remove the grant of a job that is over, or whose slots others may have."""

    job: str
    reason: str


class ProbeDriver(CausedDecision, frozen=True, tag="probe_driver"):
    """Look whether the driver of this run lives: others can connect to it at `liveness`."""

    job: str
    began: float
    liveness: str
    reason: str


class AskAlgorithm(CausedDecision, frozen=True, tag="ask_algorithm"):
    """Have an algorithm make a plan; `Planned` or `PlanFailed` answers. "": the built-in one."""

    request: int
    algorithm: str
    view: View
    reason: str


class Tell(CausedDecision, frozen=True, tag="tell"):
    """Show what has happened to the people who run the Brain, and log it. `job` "": to no job."""

    what: BrainLogEvent
    job: str
    reason: str
