"""Parts of a script's process that live as long as a world: each starts in it and ends before it.

The engine of Horovod's operations is one. `run` starts them in each new world, and `membership`
stops them before it takes the world's process group down.
"""

from typing import Protocol


class Companion(Protocol):
    """Something that works over the process group of one world; called on the training thread."""

    def start(self) -> None:
        """Start in the world that this process has just joined. Collective: all ranks call it."""

    def stop(self, *, broken: bool) -> None:
        """End, within seconds; a second call does nothing.

        `broken`: the world is of no use any more, so no peer is waited for.
        """


_companions: list[Companion] = []


def add(companion: Companion) -> None:
    """Start this companion in every world that comes; a second call does nothing."""
    if companion not in _companions:
        _companions.append(companion)


def remove(companion: Companion) -> None:
    """Start this companion in no world any more."""
    if companion in _companions:
        _companions.remove(companion)


def start_all() -> None:
    """Start all companions in a new world."""
    for companion in _companions:
        companion.start()


def stop_all(*, broken: bool = False) -> None:
    """Stop all companions; see `Companion.stop`."""
    for companion in _companions:
        companion.stop(broken=broken)
