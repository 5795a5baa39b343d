"""The messages between a node check and its tasks, in the store. Pure data, JSON by msgspec.

The driver publishes `TaskSettings` once, and an `Assignment` for each further task of a process.
Each process writes its `TaskResult` and posts `TaskEnded`. Times are seconds, sizes bytes.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

TASK_SETTINGS = "checks/settings"  # the key of TaskSettings

Seconds = Annotated[float, Meta(ge=0.0, le=86400.0)]
Rate = Annotated[float, Meta(ge=0.0, le=1e15)]


def result_key(task: int, worker: str) -> str:
    """Return the key of a process's TaskResult."""
    return f"rounds/{task}/results/{worker}"


def assignment_key(worker: str, number: int) -> str:
    """Return the key of a process's next Assignment after `number` tasks."""
    return f"checks/assignments/{worker}/{number}"


def go_key(task: int) -> str:
    """Return the key that is written when a task's processes may begin to measure."""
    return f"rounds/{task}/go"


class TaskSettings(Struct, frozen=True, kw_only=True):
    """The task of a check; the same for every process, so that times compare."""

    timeout: float = 60.0  # for meeting the partner, and for each exchange
    matrix: int | None = None  # rows of the square matrices; None: by kind of device
    products: int = 60  # matrix products; `compute` is their time
    payload: int = 4 * 1024 * 1024  # bytes each process gives into an exchange
    exchanges: int = 10  # all-gathers; `network` is their time
    performance: bool = False  # also measure the all-reduce's bandwidth and latency
    model: bool = False  # also train a transformer on made-up data
    model_steps: int = 4  # passes of the model, part of `compute`

    @property
    def summary(self) -> str:
        """Describe the task; equal for tasks whose times can be compared."""
        model = f", {self.model_steps} passes" if self.model else ""
        rows = self.matrix or "usual"
        return (
            f"{self.products} products of {rows} rows{model}, {self.exchanges} of {self.payload} B"
        )


class Assignment(Struct, frozen=True, kw_only=True):
    """A process's place in its next task."""

    task: int  # its number, also of the round in which the group meets
    rank: int
    size: int  # processes in the group
    node: int  # the number of the host in the group


class Place(Struct, frozen=True, kw_only=True):
    """The host and machine of a task's process."""

    node: int  # the number of the host in the group
    machine: str  # the same for all processes on one kernel; empty: not known
    stack: str  # the same for all processes on one network stack


class TaskEnded(Struct, frozen=True, tag="task_ended", forbid_unknown_fields=True):
    """A process has written its result, and waits for its next Assignment. Posted as an event."""

    machine: ClassVar[Literal["check"]] = "check"

    worker: Annotated[str, Meta(min_length=1, max_length=1024)]
    task: Annotated[int, Meta(ge=0, le=2**53)]


class TaskResult(Struct, frozen=True, forbid_unknown_fields=True):
    """The measurement of one process."""

    compute: Seconds  # matrix products and the model's passes, at their best pace
    network: Seconds  # the all-gathers, with the partner they were fastest with; alone: 0
    linked: bool = True  # between two network stacks; False: no link was timed
    bandwidth: Rate | None = None  # bytes a second of an all-reduce's payload
    latency: Seconds | None = None  # of the smallest all-reduce
    step: Seconds | None = None  # one training step with its all-reduce
    parameters: Annotated[int, Meta(ge=0, le=2**53)] | None = None  # of the model that was trained
