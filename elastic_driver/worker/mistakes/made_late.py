"""Tells what comes into a state while training: a worker that joins later cannot make it.

A newcomer runs the script up to the training function, and then gets the state, in objects of its
own. A model that the others have made since then is not among these.
"""

from typing import Any

from elastic_driver.words import counted
from elastic_driver.worker.mistakes.told import is_speaker, tell
from elastic_driver.worker.state_sync.parts import ModulePart, StatePart
from elastic_driver.worker.state_sync.tree import Tree


class MadeLate:
    """Compares the objects of a state with those at its first meeting."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._first: dict[str, tuple[str, int]] | None = None
        self._changes = 0  # of the tree, at the last look

    def entered(self) -> None:
        """Note what each worker has made by itself; later worlds change nothing about that."""
        if self._first is None:
            self._first, self._changes = self._now(), self._tree.changes

    def look(self) -> None:
        """Tell what is another object since."""
        if self._first is None or self._tree.changes == self._changes:
            return
        self._changes = self._tree.changes
        for path, (kind, parameters) in self._now().items():
            first = self._first.get(path)
            if first is None:
                if not any(path.startswith(f"{other}.") for other in self._first):
                    self._tell(path, f"({kind}) has come into the state")
            elif first[0] != kind:
                self._tell(path, f"is a {kind}, no {first[0]} any more,")
            elif first[1] != parameters:
                self._tell(path, f"has {counted(parameters, 'parameter')} instead of {first[1]}")

    def _now(self) -> dict[str, tuple[str, int]]:
        return {path: (_kind(part), _parameters(part)) for path, part in self._tree.parts.items()}

    def _tell(self, path: str, what: str) -> None:
        if is_speaker():
            tell(
                "made-late",
                f"{path!r} {what} since the training began, so a worker that joins cannot take it "
                "over, and leaves; make it before the training function, on every worker, or keep "
                "its state_dict() in its place",
                path,
            )


def _kind(part: StatePart) -> str:
    return type(part.thing).__qualname__


def _parameters(part: Any) -> int:
    return sum(1 for _ in part.thing.parameters()) if isinstance(part, ModulePart) else 0
