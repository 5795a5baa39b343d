"""Every event that the core takes in, each with one line of meaning.

All are frozen; what comes out of the core is in `decisions`. Times are not in them:
`Job.handle(event, now)` gets the time, in monotonic seconds.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from elastic_driver.core.documents import Host, Text, WorkerId

Count = Annotated[int, Meta(ge=0, le=2**53)]

# ---- events from agents and workers (these may come over the wire) -----------------------


class AgentReady(Struct, frozen=True, tag="agent_ready", forbid_unknown_fields=True):
    """An agent is up and waits for orders; `ports` are free ports for a torch store there.

    `slot_ports`: more of them, for servers of the workers' own, where the job asks for any.
    """

    host: Host
    incarnation: Count
    pid: Count
    address: Host
    ports: Annotated[tuple[int, ...], Meta(max_length=64)]
    slot_ports: Annotated[tuple[int, ...], Meta(max_length=1024)] = ()


class WorkerStarted(Struct, frozen=True, tag="worker_started", forbid_unknown_fields=True):
    """An agent has started a worker's process."""

    worker: WorkerId
    pid: Count


class WorkerReady(Struct, frozen=True, tag="worker_ready", forbid_unknown_fields=True):
    """A worker is in no group and waits for the next round (`round`: the one it left, 0 none).

    `version` is the number of committed steps its state stands for (−1: nothing trained yet),
    `clean` whether its tensors are exactly those. `reason` says why it left.
    """

    worker: WorkerId
    round: Count
    version: Annotated[int, Meta(ge=-1, le=2**53)]
    clean: bool
    reason: Text


class WorkerStepped(Struct, frozen=True, tag="worker_stepped", forbid_unknown_fields=True):
    """A worker has committed its first step of this round (told once a round)."""

    worker: WorkerId
    round: Count
    step: Count


class WorkerStalled(Struct, frozen=True, tag="worker_stalled", forbid_unknown_fields=True):
    """A worker lives, but its training thread has made no progress for longer than its limit.

    Told when the limit passes, and again each time `seconds` has doubled. `where` the thread
    stands: "collective" means that it waits for peers. `stack`: the thread's, innermost last.
    """

    worker: WorkerId
    round: Count
    seconds: Annotated[float, Meta(ge=0.0, le=1e9)]
    where: Literal["collective", "elsewhere"]
    stack: Text


class WorkerResumed(Struct, frozen=True, tag="worker_resumed", forbid_unknown_fields=True):
    """A worker that said it had stalled makes progress again."""

    worker: WorkerId
    round: Count


class WorkerStack(Struct, frozen=True, tag="worker_stack", forbid_unknown_fields=True):
    """A worker's stack: the answer to `AskStacks`, by its number.

    `where`: collective, elsewhere, or in words what its agent sees (`own` False) of one that may
    be unable to answer itself. `stack`: of its training thread, innermost last.
    """

    worker: WorkerId
    number: Count
    where: Annotated[str, Meta(max_length=200)]
    stack: Text
    own: bool = True


class WorkerExited(Struct, frozen=True, tag="worker_exited", forbid_unknown_fields=True):
    """A worker's process is gone, its whole group with it; negative codes are signals.

    `victim`: its last words say that it fell because a peer was lost (a broken collective).
    """

    worker: WorkerId
    exit_code: Annotated[int, Meta(ge=-128, le=255)]
    log_tail: Text
    victim: bool = False


class WorkerSaved(Struct, frozen=True, tag="worker_saved", forbid_unknown_fields=True):
    """The result of a `SaveRequest`, from its first member; trouble may come from any of them.

    `folder` of the complete checkpoint, or the `problem`; neither: there is no `checkpoint_dir`.
    """

    worker: WorkerId
    number: Count
    folder: Annotated[str, Meta(max_length=4096)] = ""
    problem: Annotated[str, Meta(max_length=1000)] = ""


class HostLeaving(Struct, frozen=True, tag="host_leaving", forbid_unknown_fields=True):
    """An agent was told that its host goes away (a preemption notice) in `deadline` seconds."""

    host: Host
    incarnation: Count
    deadline: Annotated[float, Meta(ge=0.0, le=1e9)]
    reason: Text


class WorkerLeaving(Struct, frozen=True, tag="worker_leaving", forbid_unknown_fields=True):
    """A worker was told (a signal, a preemption notice) that it has to go in `deadline` seconds."""

    worker: WorkerId
    deadline: Annotated[float, Meta(ge=0.0, le=1e9)]
    reason: Text


# ---- events from the driver's own shell --------------------------------------------------


class HostsDiscovered(Struct, frozen=True, tag="hosts_discovered"):
    """The hosts there are now: (host, slots) in the order of the source, without repeats."""

    hosts: tuple[tuple[str, int], ...]


class DiscoveryFailed(Struct, frozen=True, tag="discovery_failed"):
    """Discovery gave nothing usable; the last known hosts stay."""

    reason: str


class AgentLost(Struct, frozen=True, tag="agent_lost"):
    """An agent could not be started, ended, or let its lease expire; its workers end with it.

    `ended`: its process is gone; otherwise only its lease has expired.
    """

    host: str
    incarnation: int
    reason: str
    ended: bool = True


class WorkerSilent(Struct, frozen=True, tag="worker_silent"):
    """A worker has not been heard of for half of its lease: it may hang, be stopped or cut off."""

    worker: str
    reason: str


class WorkerLost(Struct, frozen=True, tag="worker_lost"):
    """A worker let its lease expire: hung, stopped or cut off."""

    worker: str
    reason: str


class ProgressReading(Struct, frozen=True):
    """A worker's last progress: `step` committed steps in all, `step_time` seconds for one (0: not
    known yet). `answered`: it was written after the question."""

    step: int
    step_time: float
    answered: bool


class ProgressReported(Struct, frozen=True, tag="progress_reported"):
    """The answer to `AskProgress`: what could be read of the workers' progress in this round."""

    number: int
    readings: tuple[ProgressReading, ...]


class RankSlow(Struct, frozen=True, tag="rank_slow"):
    """A member of this round computes slowly: `ratio` times the usual time."""

    worker: str
    round: int
    ratio: float


class RankRecovered(Struct, frozen=True, tag="rank_recovered"):
    """A member of this round that was slow is so no longer."""

    worker: str
    round: int


class HostResult(Struct, frozen=True):
    """The result of a host's check: whether it may get workers, and the verdict in words."""

    host: str
    passed: bool
    reason: str


class HostsChecked(Struct, frozen=True, tag="hosts_checked"):
    """The check that `CheckHosts` asked for is over."""

    results: tuple[HostResult, ...]
    number: int  # of the CheckHosts that this answers


class ScaleRequested(Struct, frozen=True, tag="scale_requested"):
    """A user wishes another number of workers, within min and max."""

    num_proc: int


class DrainRequested(Struct, frozen=True, tag="drain_requested"):
    """A user wants this host left in good order, and not used again until the drain is cancelled.

    `deadline`: seconds in which it has to be empty; None: there is no hurry.
    """

    host: str
    reason: str
    deadline: float | None = None


class DrainCancelled(Struct, frozen=True, tag="drain_cancelled"):
    """A host that was drained, or is being drained, may be used again."""

    host: str
    reason: str


class JobLeaving(Struct, frozen=True, tag="job_leaving"):
    """The whole job has to be gone in `deadline` seconds (SIGUSR1 or SIGUSR2 to `elasticrun`)."""

    reason: str
    deadline: float


class StopRequested(Struct, frozen=True, tag="stop_requested"):
    """End the job now, with this exit status (Ctrl-C, SIGTERM, `elasticctl stop`)."""

    reason: str
    exit_code: int


class StacksRequested(Struct, frozen=True, tag="stacks_requested"):
    """A user wants to know where every worker stands."""

    reason: str


Together: TypeAlias = AgentReady | WorkerStarted | WorkerReady | WorkerStepped
TOGETHER: tuple[type[Together], ...] = (AgentReady, WorkerStarted, WorkerReady, WorkerStepped)
"""Events that all workers of a job send at about the same time."""


class EventBatch(Struct, frozen=True, tag="event_batch"):
    """Events of kinds in `TOGETHER`, handled as one, because re-evaluation is O(workers)."""

    events: tuple[Together, ...]


class Tick(Struct, frozen=True, tag="tick"):
    """Nothing but time has passed; sent when `Job.deadline()` is reached."""


_Steps: TypeAlias = WorkerStepped | WorkerStalled | WorkerResumed
WorkerReport: TypeAlias = (
    WorkerStarted | WorkerReady | _Steps | WorkerExited | WorkerSilent | WorkerLost
)
_Drain: TypeAlias = HostLeaving | DrainRequested | DrainCancelled
_Discovery: TypeAlias = HostsDiscovered | DiscoveryFailed | HostsChecked
HostReport: TypeAlias = AgentReady | AgentLost | _Discovery | _Drain
_Answer: TypeAlias = WorkerSaved | WorkerStack | ProgressReported
_Request: TypeAlias = ScaleRequested | StacksRequested | JobLeaving | StopRequested
JobReport: TypeAlias = _Answer | _Request | WorkerLeaving | RankSlow | RankRecovered | Tick
Event: TypeAlias = WorkerReport | HostReport | JobReport | EventBatch
WireEvent: TypeAlias = (
    Together | WorkerStalled | WorkerResumed | WorkerStack | WorkerExited | WorkerSaved
    | HostLeaving | WorkerLeaving
)  # fmt: skip
