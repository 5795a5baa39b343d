"""An operation of this rank, from its call to its result, with its world, set and errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_driver.errors import WorldBrokenError
from elastic_driver.horovod.engine import streams
from elastic_driver.horovod.engine.requests import Request


class HorovodInternalError(WorldBrokenError, RuntimeError):
    """An operation failed: ranks disagree about a tensor, or the world is broken."""


class DuplicateNameError(HorovodInternalError, ValueError):
    """A tensor was given a name under which another one is pending."""


def first_line(error: Exception) -> str:
    """Return an error in one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


@dataclass(frozen=True)
class EngineWorld:
    """The place of this process in one world, and the ways to reach the others.

    `connect` returns torch's process group of some ranks; None on other ranks, and in a world of
    one. All ranks of the world call it with the same ranks, on the training thread. `disconnect`
    ends every call that waits for a peer, on any thread; a world that was disconnected is of no
    use any more.
    """

    rank: int
    size: int
    connect: Callable[[Sequence[int]], Any]
    disconnect: Callable[[], None]


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
    """One call of an operation; the engine sets `done`, and then `error` or `result`.

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
