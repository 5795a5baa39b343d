"""The world that an engine works in, as `common.basics` gives it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


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
