"""What is under way in a job: records of what has begun and is not over yet.

The job's books (`state`) hold at most one of each kind; the module that is named with it begins
it, follows it and ends it. Times are monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from elastic_driver.core.documents import SaveRequest


class Told(Struct, frozen=True):
    """One worker's answer to an inquiry."""

    where: str
    stack: str
    own: bool  # said by the worker itself, not by its agent


@dataclass(slots=True)
class Inquiry:
    """`stacks`: a question to all workers that is not settled yet."""

    number: int
    since: float
    reason: str
    told: dict[str, Told] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replacement:
    """`replacing`: a worker that is to leave, and the host on which its replacement is started."""

    worker: str
    target: str
    round: int  # the one in which it began
    after: int  # workers started before it
    until: float  # for the replacement to be ready
    reason: str


@dataclass(frozen=True, slots=True)
class Departure:
    """`departure`: why the job ends, how long a boundary is waited for, when it ends anyway."""

    reason: str
    leave_by: float
    end_by: float


@dataclass(slots=True)
class Farewell:
    """`farewell`: what became of the state after `request.step` steps, as far as it is known."""

    request: SaveRequest
    until: float
    done: bool = False
    folder: str = ""  # the complete checkpoint
    problem: str = ""  # why there is none

    @property
    def outcome(self) -> str:
        """What is on disk, in words."""
        step = self.request.step
        if self.folder:
            return f"the state of step {step} is in {self.folder}"
        why = self.problem or "it has no checkpoint_dir (docs/checkpoints.md)"
        return f"the state of step {step} is not on disk: {why}"
