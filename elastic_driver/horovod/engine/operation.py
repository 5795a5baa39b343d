"""An operation of this rank, from its call to its result."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic_driver.horovod.engine import streams
from elastic_driver.horovod.engine.messages import Request


@dataclass(frozen=True)
class SetPlace:
    """A process set as this rank sees it.

    Args:
        ranks: of the world, in the order of the set.
        index: of this rank among them; -1 where it is none of them.
        group: torch's process group; None where this rank is alone in the set, or not in it.
    """

    ranks: tuple[int, ...]
    index: int
    group: Any

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)


class Operation:
    """One call; the engine sets `done`, and then `error` or `result`.

    Args:
        tensors: the inputs, detached.
        outputs: where results go, if their size is known; an output may be an input.

    `given` and `written` are events of a device's streams: the inputs are computed, the result is
    there; None on the CPU.
    """

    __slots__ = ("done", "error", "given", "outputs", "request", "result", "tensors", "written")

    def __init__(
        self, request: Request, tensors: Sequence[Any] = (), outputs: Sequence[Any] = ()
    ) -> None:
        self.request = request
        self.tensors = tensors
        self.outputs = outputs
        self.given = streams.mark(tensors)
        self.written: Any = None
        self.done = False
        self.error: Exception | None = None
        self.result: Any = None
