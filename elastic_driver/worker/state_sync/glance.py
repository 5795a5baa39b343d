"""Whether objects are still made of the same things: one comparison by identity for a whole state.

At each commit the parts of a state have to be looked at: a module may have got another parameter,
an optimizer another group. Nearly always nothing of that has happened. A `Structure` names the
containers in which it would show, and a `Glance` compares all that is in them, for all parts of a
state together. Only where something differs is each part looked at by itself.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple


class Structure(NamedTuple):
    """The containers that show what an object is made of."""

    tables: Sequence[dict[Any, Any]]  # whose values count
    members: Sequence[Iterable[Any]]  # whose items count: lists, and dictionaries for their keys
    # Functions, and the objects of which their results count: flags, or an object inside.
    results: Sequence[tuple[Callable[[Any], Any], Sequence[Any]]] = ()


class Glance:
    """All that was in the containers of some structures, when this was made."""

    def __init__(self, structures: Sequence[Structure]) -> None:
        tables = [table for each in structures for table in each.tables]
        self._tables = [table for table in tables if table]
        self._empty = [table for table in tables if not table]  # most of a module's are
        self._members = [members for each in structures for members in each.members]
        self._results = [results for each in structures for results in each.results]
        self._seen = self._now()

    def _now(self) -> list[Any]:
        now: list[Any] = []
        for table in self._tables:
            now += table.values()
        for members in self._members:
            now += members
        for function, things in self._results:
            now += map(function, things)
        return now

    def is_same(self) -> bool:
        """Return whether the containers hold the same objects, in the same order."""
        if any(self._empty):
            return False
        now, seen = self._now(), self._seen
        return len(now) == len(seen) and all(map(is_, now, seen))
