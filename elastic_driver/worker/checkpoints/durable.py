"""What a part of a state adds to checkpoints only: what the other ranks need not have.

An attribute of a state may have the two methods of `Durable`. `keeper` calls them on rank 0: at the
commit that is written, in the thread that writes it, and when a checkpoint is loaded.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

Notes: TypeAlias = Mapping[str, Callable[[], bytes]]  # by attribute


@runtime_checkable
class Durable(Protocol):
    """An attribute of a state that adds something of its own to each checkpoint."""

    def durable(self) -> Callable[[], bytes]:
        """Return a function that returns what to keep; b"": nothing.

        Called on the training thread of rank 0, at the commit that is written: it must not block,
        and talks to nobody. The function is called on the thread that writes, and may.
        """

    def restore_durable(self, data: bytes) -> None:
        """Take back what was kept.

        Called on the rank that loads a checkpoint, after `load_state_dict`, and before the others
        receive the state from it.
        """


def notes_of(values: Mapping[str, Any]) -> Notes:
    """Return the functions of all attributes that add something, by attribute."""
    return {name: each.durable() for name, each in values.items() if isinstance(each, Durable)}


def written(notes: Notes) -> dict[str, bytes]:
    """Return what the functions of `notes_of` return, without what is empty."""
    found = {name: note() for name, note in notes.items()}
    return {name: data for name, data in found.items() if data}


def restore(values: Mapping[str, Any], notes: Mapping[str, bytes]) -> None:
    """Give each attribute back what it has added to a checkpoint."""
    for name, data in notes.items():
        if isinstance(each := values.get(name), Durable):
            each.restore_durable(data)
