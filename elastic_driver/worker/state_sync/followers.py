"""The versions of tensors that change with others: those that optimizers remember.

Adam remembers three tensors of each parameter. To read all their version counters takes longer than
everything else in a commit, and they change in the optimizer's steps, with the parameters. So they
are read while that is learned, whenever a step is not like the one before it, and at each
`EVERY`th commit. For a commit in between, the versions follow from the growth in each step.
"""

from collections.abc import Sequence
from operator import add, attrgetter, sub
from typing import NamedTuple

from torch import Tensor

EVERY = 16  # commits
_version = attrgetter("_version")


class Read(NamedTuple):
    """Versions as they were read, and the equal steps that were committed since then."""

    versions: list[int]
    growth: list[int]  # in one step
    steps: int

    @classmethod
    def at(cls, versions: list[int]) -> "Read":
        """Return what was read just now."""
        return cls(versions, [], 0)

    def expected(self) -> list[int]:
        """Return the versions at the commit."""
        if not self.steps:
            return self.versions
        return list(map(add, self.versions, (self.steps * each for each in self.growth)))


class Followers:
    """The versions of some tensors at the last commit; `last` holds them.

    `before`: the followers until now, some of which may be among these.
    """

    def __init__(self, tensors: Sequence[Tensor], before: "Followers | None" = None) -> None:
        self.tensors = tensors
        self._seen: list[int] | None = None  # the growth at the last reading
        self._is_usual = False  # it was the same at the reading before
        versions: dict[int, int] = {}
        if before is not None:
            last: Read = before.last
            versions = dict(zip(map(id, before.tensors), last.expected(), strict=True))
        # A tensor that is new stands for itself.
        self.last: Read = Read.at([versions.get(id(t), t._version) for t in tensors])

    def passes(self) -> bool:
        """Count a step like the one before; False: they have to be read."""
        if not self._is_usual or self._seen is None or self.last.steps + 1 >= EVERY:
            return False
        self.last = Read(self.last.versions, self._seen, self.last.steps + 1)
        return True

    def read(self) -> list[int]:
        """Read the versions, at a commit; return by how much each has grown since the last one."""
        versions = list(map(_version, self.tensors))
        growth = list(map(sub, versions, self.last.expected()))
        self._is_usual, self._seen = growth == self._seen, growth
        self.last = Read.at(versions)
        return growth
