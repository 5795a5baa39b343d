"""Whether objects are still made of the same things: one comparison by identity for a whole state.

At each commit the parts of a state have to be looked at: a module may have got another parameter,
an optimizer another group. Nearly always nothing of that has happened. A `Structure` names the
containers in which it would show, and a `Glance` compares all that is in them, for all parts of a
state together. Only where something differs is each part looked at by itself.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

_END = object()


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
        self._seen = [*self._now(), _END]

    def _now(self) -> Iterable[Any]:
        values = map(dict.values, self._tables)
        results = [map(*each) for each in self._results]
        return chain.from_iterable(chain(values, self._members, results))

    def is_same(self) -> bool:
        """Return whether the containers hold the same objects, in the same order."""
        if any(map(len, self._empty)):
            return False
        return all(map(is_, chain(self._now(), (_END,)), self._seen))
