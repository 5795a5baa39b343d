"""The versions of tensors that change with others: those that optimizers remember.

Adam remembers three tensors of each parameter. To read all their version counters takes longer than
everything else in a commit, and they change in the optimizer's steps, with the parameters. So they
are read while that is learned, whenever a step is not like the one before it, and at each
`EVERY`th commit. For a commit in between, the versions follow from the growth in each step. A few
are read at each commit, which shows what a script does to all of them.
"""

from collections.abc import Sequence
from operator import add, sub
from typing import NamedTuple

from torch import Tensor

from elastic_driver.worker.torch_seams.tensors import version_of

EVERY = 16  # commits
SAMPLES = 24  # that are read at each commit


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

    Args:
        tensors: the followers.
        leaders: of each one, the number of the tensor with which it changes; -1: of none.
        before: the followers until now, some of which may be among these.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor] = (),
        leaders: Sequence[int] = (),
        before: "Followers | None" = None,
    ) -> None:
        self.tensors, self._leaders = tensors, leaders
        # An odd distance, so that there are some of each kind.
        self._samples = slice(None, None, len(tensors) // SAMPLES | 1)
        self._sampled = tensors[self._samples]
        self._expected: list[int] = []  # their versions at the last commit
        self._seen: list[int] | None = None  # the growth at the last reading
        self._is_usual = False  # it was the same at the reading before, and leaders show it
        versions: dict[int, int] = {}
        if before is not None:
            last: Read = before.last
            versions = dict(zip(map(id, before.tensors), last.expected(), strict=True))
        # A tensor that is new stands for itself.
        self.last: Read = Read.at([versions.get(id(t), version_of(t)) for t in tensors])

    def passes(self) -> bool:
        """Count a step in which the leaders have grown as before; False: all have to be read."""
        if not self.tensors:
            return True
        versions, _, steps = self.last
        if not self._is_usual or self._seen is None or steps + 1 >= EVERY:
            return False
        if not steps:
            self._expected = versions[self._samples]
        expected = list(map(add, self._expected, self._seen[self._samples]))
        if list(map(version_of, self._sampled)) != expected:
            return False
        self._expected = expected
        self.last = Read(versions, self._seen, steps + 1)
        return True

    def read(self, leading: Sequence[int]) -> list[int]:
        """Read the versions, at a commit; return by how much each has grown since the last one.

        `leading`: by how much the leaders have grown. A fused optimizer counts no version of a
        parameter: then nothing shows in which steps its followers have grown.
        """
        versions = list(map(version_of, self.tensors))
        growth = list(map(sub, versions, self.last.expected()))
        self._is_usual = growth == self._seen and all(
            not grown or (leader >= 0 and leading[leader])
            for grown, leader in zip(growth, self._leaders, strict=True)
        )
        self._seen, self.last = growth, Read.at(versions)
        return growth

    def forget(self) -> None:
        """Read all again at the next commits: what happens is not known."""
        self._is_usual, self._seen = False, None
