"""Log events of workers and ranks: a class for each name (`kernel/log.py`).

Fields have defaults, as logs of older drivers lack some of them.
"""

from typing import ClassVar

from elastic_driver.kernel.log import Level, LogEvent
from elastic_driver.words.findings import StackGroup


class RankPace(LogEvent, frozen=True):
    """The pace of one rank."""

    kind: str | None = None  # what is slow
    ratio: float = 1.0  # its time in the usual one
    step: int | None = None
    share: float | None = None  # of a step, for which all ranks wait; older logs have none


class WorkerStarted(LogEvent, frozen=True, tag="worker_started"):
    """A worker's process runs."""

    sentence: ClassVar[str] = "worker {worker} started"


class WorkerReady(LogEvent, frozen=True, tag="worker_ready"):
    """A worker waits for a round."""

    sentence: ClassVar[str] = "worker {worker} is ready"
    undone: float | None = None  # seconds of training since the last commit


class WorkerLeft(LogEvent, frozen=True, tag="worker_left"):
    """The others go on before the process of a worker has ended, whose script is over."""

    sentence: ClassVar[str] = "the script of worker {worker} is over"
    failed: bool = True  # its script has raised an exception

    @property
    def is_loss(self) -> bool:
        """Return whether its script has failed; it has done its work otherwise."""
        return self.failed


class WorkerExited(LogEvent, frozen=True, tag="worker_exited"):
    """A worker's process has ended."""

    sentence: ClassVar[str] = "worker {worker} exited"
    exit_code: int | None = None  # as subprocess gives it
    expected: bool = False  # it was told to stop, or had nothing left to do
    job_over: bool | None = None
    lost: bool | None = None  # it exited 0, but its script had failed, or it never took part

    @property
    def is_loss(self) -> bool:
        """Return whether it has failed by itself, or has not done its work."""
        return bool(self.lost) or (bool(self.exit_code) and not self.expected)

    @property
    def level(self) -> Level:
        """Return the level of a failure, or of another end."""
        return Level.NORMAL if self.is_loss else Level.VERBOSE


class WorkerLost(LogEvent, frozen=True, tag="worker_lost"):
    """A worker is lost with its agent."""

    sentence: ClassVar[str] = "worker {worker} lost"
    shown_from: ClassVar[Level] = Level.NORMAL
    stack: str | None = None

    @property
    def is_loss(self) -> bool:
        """Return that it is one."""
        return True


class WorkerHung(LogEvent, frozen=True, tag="worker_hung"):
    """A worker makes no progress, and is killed."""

    sentence: ClassVar[str] = "worker {worker} hangs"
    shown_from: ClassVar[Level] = Level.NORMAL
    stack: str | None = None

    @property
    def is_loss(self) -> bool:
        """Return that it is one."""
        return True


class WorkerStalled(LogEvent, frozen=True, tag="worker_stalled"):
    """A training thread makes no progress."""

    sentence: ClassVar[str] = "worker {worker} stands still"
    shown_from: ClassVar[Level] = Level.NORMAL
    where: str = ""
    stack: str = ""


class WorkerResumed(LogEvent, frozen=True, tag="worker_resumed"):
    """A training thread makes progress again."""

    sentence: ClassVar[str] = "worker {worker} goes on"
    shown_from: ClassVar[Level] = Level.NORMAL


class WorkerResult(LogEvent, frozen=True, tag="worker_result"):
    """How a worker has ended; logged at the job's end."""

    sentence: ClassVar[str] = "worker {worker} has ended"
    exit_code: int | None = None  # None: lost with its host
    ended: float = 0.0  # unix seconds
    seconds: float | None = None  # from the start of its process
    last_words: str = ""
    hung: bool = False


class WorkerLeaving(LogEvent, frozen=True, tag="worker_leaving"):
    """A worker has to leave."""

    sentence: ClassVar[str] = "worker {worker} has to go"
    shown_from: ClassVar[Level] = Level.NORMAL
    deadline: float | None = None  # seconds


class WorkerUnfit(LogEvent, frozen=True, tag="worker_unfit"):
    """A worker cannot take over the state of the others."""

    sentence: ClassVar[str] = "worker {worker} cannot take over the state"
    shown_from: ClassVar[Level] = Level.QUIET
    is_alarm: ClassVar[bool] = True


class WorkerReplaced(LogEvent, frozen=True, tag="worker_replaced"):
    """A worker has left for its replacement."""

    sentence: ClassVar[str] = "worker {worker} was replaced"
    shown_from: ClassVar[Level] = Level.NORMAL
    replacement: str = ""


class WorkerNotReplaced(LogEvent, frozen=True, tag="worker_not_replaced"):
    """A slow worker has to stay."""

    sentence: ClassVar[str] = "worker {worker} is not replaced"
    shown_from: ClassVar[Level] = Level.NORMAL


class ReplacementStarted(LogEvent, frozen=True, tag="replacement_started"):
    """A replacement of a slow worker is started."""

    sentence: ClassVar[str] = "rank {rank} on {host} is slow and will be replaced"
    shown_from: ClassVar[Level] = Level.NORMAL
    target: str = ""  # host


class ReplacementAbandoned(LogEvent, frozen=True, tag="replacement_abandoned"):
    """A replacement of a slow worker is not needed."""

    sentence: ClassVar[str] = "worker {worker} stays"
    shown_from: ClassVar[Level] = Level.NORMAL


class OutOfMemory(LogEvent, frozen=True, tag="out_of_memory"):
    """A worker has run out of memory."""

    sentence: ClassVar[str] = "worker {worker} ran out of memory"
    shown_from: ClassVar[Level] = Level.NORMAL
    peak: int | None = None  # bytes
    room: int | None = None  # workers that its host has the memory for


class FinishedAlone(LogEvent, frozen=True, tag="finished_alone"):
    """A worker has finished, and the others train on."""

    sentence: ClassVar[str] = "worker {worker} has finished its script before the others"
    shown_from: ClassVar[Level] = Level.QUIET
    is_alarm: ClassVar[bool] = True


class CollectivesDiffer(LogEvent, frozen=True, tag="collectives_differ"):
    """The ranks wait in collectives that do not match."""

    sentence: ClassVar[str] = "the ranks wait in collectives that do not match"
    shown_from: ClassVar[Level] = Level.QUIET
    is_alarm: ClassVar[bool] = True


class StacksCollected(LogEvent, frozen=True, tag="stacks_collected"):
    """The workers have told their stacks."""

    sentence: ClassVar[str] = "the stacks of the workers were collected"
    stacks: tuple[StackGroup, ...] = ()


class SpareReady(LogEvent, frozen=True, tag="spare_ready"):
    """A spare waits for a free slot."""

    sentence: ClassVar[str] = "spare {worker} is ready"


class SparePromoted(LogEvent, frozen=True, tag="spare_promoted"):
    """A spare takes a slot."""

    sentence: ClassVar[str] = "spare {worker} takes over"
    shown_from: ClassVar[Level] = Level.NORMAL


class SparesUnused(LogEvent, frozen=True, tag="spares_unused"):
    """The job keeps no spares."""

    sentence: ClassVar[str] = "no spares are kept"
    shown_from: ClassVar[Level] = Level.NORMAL


class RankSlow(RankPace, frozen=True, tag="rank_slow"):
    """A rank holds the others up."""

    sentence: ClassVar[str] = "rank {rank} on {host} holds the others up"
    shown_from: ClassVar[Level] = Level.NORMAL


class RankRecovered(RankPace, frozen=True, tag="rank_recovered"):
    """A rank is no longer slow."""

    sentence: ClassVar[str] = "rank {rank} on {host} has recovered"
    shown_from: ClassVar[Level] = Level.NORMAL


class WorkMoved(LogEvent, frozen=True, tag="work_moved"):
    """The ranks get other shares of the work."""

    sentence: ClassVar[str] = "work is shared anew"
    shown_from: ClassVar[Level] = Level.NORMAL
    shares: str = ""


END_OF_PROCESS = (WorkerExited, WorkerLost, WorkerHung)  # nothing follows of such a worker
END = (WorkerLeft, *END_OF_PROCESS)  # the others go on without it


def is_new_loss(what: LogEvent, worker: str | None, failed: set[str]) -> bool:
    """Return whether an event tells that a worker is lost, and no earlier event did.

    A worker is lost when its script fails, or when its process ends before its work is done;
    whichever is told first counts. `failed`: the workers whose scripts have failed and whose
    processes have not ended yet; it is kept up to date here.
    """
    if worker is None:
        return False
    if isinstance(what, WorkerLeft):
        if what.failed:
            failed.add(worker)
        return what.failed
    if isinstance(what, END_OF_PROCESS) and worker in failed:
        failed.discard(worker)
        return False
    return what.is_loss
