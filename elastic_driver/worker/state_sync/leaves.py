"""The tensors of a state: which have changed since the commit, and which are copied at each one.

In synchronous data parallelism most tensors change in an optimizer's step only, between the last
collective and the commit. No failure can be seen there, so a commit need not copy them: a rank that
learns of a lost peer still has them as they were committed. What changes at another moment (running
statistics, momentum encoders, averages, weights that are clamped, steps that torch's hooks do not
see, steps with a collective behind them) has to be copied at each commit. Nobody says which these
are: it is *learned*.

- A tensor is known by its object, its memory and its version counter. At each commit, and after a
  failure, these are compared.
- In the first steps, and now and then later, the content is compared as well (`contents`):
  between the commit and the first optimizer step, and from commit to commit. That finds changes
  which no version shows (`tensor.data`, captured graphs).
- A tensor that moves outside of an optimizer's step is copied from then on. One that begins to do
  so later is found at the next commit.
- Whatever no optimizer of the state trains is copied at first, up to `UNPROVEN_BYTES`, until it is
  known to stand still; up to `ALWAYS_BYTES` it is copied for good.

What optimizers remember is compared after a failure, but read at few commits only (`Followers`).
Adam remembers three tensors of each parameter. To read all their version counters takes longer than
everything else in a commit, and they change in the optimizer's steps, with the parameters. So they
are read while that is learned, whenever a step is not like the one before it, and at each
`EVERY`th commit. For a commit in between, the versions follow from the growth in each step. A few
are read at each commit, which shows what a script does to all of them.
"""

import time
from collections.abc import Callable, Collection, Sequence
from operator import add, sub
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_driver.worker.state_sync.contents import (
    contents,
    fill_tensor,
    is_capturing,
    shares_memory,
)
from elastic_driver.worker.state_sync.part import trained_by
from elastic_driver.worker.state_sync.steps import Steps, weakly
from elastic_driver.worker.torch_seams import copy_all, version_of

LEARNING = 3  # commits after the first one whose contents are compared
UNPROVEN_BYTES = 64 * 1024 * 1024
ALWAYS_BYTES = 1024 * 1024  # of what no optimizer trains: so little is copied at each commit
SHARE = 0.0005  # of the training time, for comparing contents later
_pointer = torch.Tensor.data_ptr
Named = list[tuple[str, Tensor]]
Memory = tuple[str, Tensor, Tensor | None]  # name, tensor, and the parameter it belongs to


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


class _Commit(NamedTuple):
    """The tensors of a commit; usually they are those of the commit before it."""

    names: list[str]
    tensors: list[Tensor]
    still: list[int]  # numbers of the tensors that were not copied
    moved: list[Tensor]  # the tensors that were copied, and the copies
    copies: list[Tensor]


class _Seen(NamedTuple):
    """What shows whether tensors have changed since a commit."""

    versions: list[int]  # of the first ones, which are read at each commit
    pointers: list[int]
    others: Read  # of what optimizers remember: the tensors behind these

    def all_versions(self) -> list[int]:
        """Return the version that each tensor had at the commit."""
        return self.versions + self.others.expected()


class Leaves:
    """The tensors of one state, as they were at its last commit.

    `clock`: the time in seconds.
    """

    def __init__(self, steps: Steps, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = steps, clock
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self.moving: dict[str, str] = {}  # names of the tensors that are copied, and why
        self.copy_all = False
        self.learning = LEARNING  # commits whose contents are still to be compared
        self._first: list[Tensor] = []  # that are read at each commit; the others follow them
        self._others = Followers()
        self._trained: set[str] = set()
        self._small: set[str] = set()  # that are copied at each commit, whether they move or not
        self._choice: list[Tensor] | None = None  # the tensors to copy; None: to be chosen
        self._still: list[int] = []  # numbers of the tensors that are not copied
        self._last: object = None  # steps and growth of the last commit
        self._unproven: set[str] = set()  # copied until they are known to stand still
        self._commit = _Commit([], [], [], [], [])
        self._seen = _Seen([], [], Read([], [], 0))
        self._is_torn = False  # a copy was begun and not finished
        # The first tensors of now, as they were at the commit.
        self._versions: list[int] | None = None
        self._pointers: list[int] = []
        self._contents: dict[int, int] = {}  # by identity, of those that stand still, if compared
        self._usual: list[set[int]] = []  # by how much the version of each grows in a step
        self._early: set[str] = set()  # have changed before the first optimizer step
        self._check_at = 0.0
        self._idle = 0  # commits in a row in which nothing has changed
        steps.before_first = weakly(self.look_before_step)

    # ---- what there is ---------------------------------------------------------------------

    def arrange(
        self, named: Named, remembered: Sequence[Memory], trained: set[str], small: set[str]
    ) -> None:
        """Take in the tensors of now.

        `named`: those that are read at each commit; `remembered`: what optimizers remember, each
        with its parameter.
        `trained`: the names of those that optimizers move; `small`: of buffers, which are copied at
        each commit, because the running statistics among them move with no version counted.
        """
        unique: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in named:
            unique.setdefault(id(tensor), (name, tensor))
        first = len(unique)
        numbers = {identity: number for number, identity in enumerate(unique)}
        leaders: list[int] = []
        for name, tensor, parameter in remembered:
            if id(tensor) not in unique:
                unique[id(tensor)] = name, tensor
                leaders.append(numbers.get(id(parameter), -1))
        usual = dict(zip(self.names, self._usual, strict=False))
        known = set(self.names)
        self.names = [name for name, _ in unique.values()]
        self.tensors = [tensor for _, tensor in unique.values()]
        self._usual = [usual.get(name, set()) for name in self.names]
        self._trained, self._small = trained, small
        fresh = [n for n in self.names if n not in known and n not in trained | small]
        candidates = {*fresh, *self._unproven}
        pairs = zip(self.names, self.tensors, strict=True)
        if sum(tensor.nbytes for name, tensor in pairs if name in candidates) <= UNPROVEN_BYTES:
            self._unproven |= set(fresh)
        if fresh and known:
            self.learning = max(self.learning, LEARNING)
        self._renumber(first, leaders)

    def _renumber(self, first: int, leaders: Sequence[int]) -> None:
        """Number versions and memory of the commit as the tensors of now."""
        versions = dict(zip(map(id, self._first), self._versions or (), strict=False))
        pointers = dict(zip(map(id, self._first), self._pointers, strict=False))
        self._first = self.tensors[:first]
        if self._versions is not None:
            # A tensor that is new stands for itself: it was put in, not written to.
            self._versions = [versions.get(id(t), version_of(t)) for t in self._first]
            self._pointers = [pointers.get(id(t), t.data_ptr()) for t in self._first]
        self._others = Followers(self.tensors[first:], leaders, self._others)
        self._choice = self._last = None

    @property
    def copied_bytes(self) -> int:
        """The bytes that each commit copies."""
        return sum(copy.nbytes for copy in self._commit.copies)

    # ---- commits ---------------------------------------------------------------------------

    def keep(self, collectives: int, *, from_others: bool = False) -> None:
        """Note all tensors as committed, and copy those that move.

        `collectives`: those of this process until now.
        `from_others`: the content was received or put back, so nothing is learned from it.
        """
        versions = list(map(version_of, self._first))
        pointers = list(map(_pointer, self._first))
        if self._versions is None or from_others:
            self._others.read(versions)
            self._others.forget()
        else:
            self._learn(versions, pointers, collectives)
        choice = self._choose() if self._choice is None else self._choice
        copies = self._copy(choice)
        commit = self._commit
        self._versions, self._pointers = versions, pointers
        self._seen = _Seen(versions, pointers, self._others.last)
        if commit.copies is not copies or commit.moved is not choice:
            self._commit = _Commit(self.names, self.tensors, self._still, choice, copies)
        self._is_torn = False
        if self._contents or self._early:
            self._early = set()
            self._contents = {}
        if self.copy_all:
            return
        now = self._clock()
        if self.learning > 0 or now >= self._check_at:
            self._contents = self._look(self._not_moving())
            self._check_at = now + 3 * (self._clock() - now) / SHARE

    def _choose(self) -> list[Tensor]:
        """Decide which tensors are copied, after something has changed about that."""
        copied = {*self.moving, *self._unproven, *self._small}
        chosen = [self.copy_all or name in copied for name in self.names]
        choice = [t for t, is_copied in zip(self.tensors, chosen, strict=True) if is_copied]
        self._choice = choice
        self._still = [number for number, is_copied in enumerate(chosen) if not is_copied]
        return choice

    def _copy(self, choice: list[Tensor]) -> list[Tensor]:
        """Return copies of tensors, in the memory of the last ones where that fits."""
        copies = self._commit.copies
        if len(copies) != len(choice) or any(map(_differ, choice, copies)):
            copies = [torch.empty_like(t, requires_grad=False) for t in choice]
        if choice:
            self._is_torn = copies is self._commit.copies
            with torch.no_grad():
                copy_all(copies, choice)
        return copies

    def _not_moving(self) -> list[int]:
        return [number for number, name in enumerate(self.names) if name not in self.moving]

    def _look(self, numbers: Sequence[int]) -> dict[int, int]:
        tensors = [self.tensors[number] for number in numbers]
        return dict(zip(map(id, tensors), contents(tensors), strict=True))

    def committed(self) -> tuple[list[str], list[Tensor], dict[int, Tensor]]:
        """Return names and tensors of the commit, and by identity the copies of those copied."""
        commit = self._commit
        copies = zip(map(id, commit.moved), commit.copies, strict=True)
        return commit.names, commit.tensors, dict(copies)

    # ---- learning --------------------------------------------------------------------------

    def look_before_step(self) -> None:
        """Before the first optimizer step of an interval: find what has moved already."""
        if self._contents and not is_capturing():
            self._early |= set(self._others_than_before(set()))
            # One that was written to, and has its value still, will have another one some day.
            pairs = zip(self.names, self._first, self._versions or (), strict=False)
            self._early |= {name for name, t, version in pairs if version_of(t) != version}

    def _others_than_before(self, but: set[str]) -> list[str]:
        """Return the names of tensors whose content is another than at the commit."""
        numbers = [
            number
            for number in self._not_moving()
            if id(self.tensors[number]) in self._contents and self.names[number] not in but
        ]
        now = self._look(numbers)
        return [
            self.names[number]
            for number in numbers
            if now[id(self.tensors[number])] != self._contents[id(self.tensors[number])]
        ]

    def _learn(self, versions: list[int], pointers: list[int], collectives: int) -> None:
        """Decide, at a commit, which tensors have moved outside of an optimizer's step."""
        growth = list(map(sub, versions, self._versions or ()))
        kind = self._steps.done(collectives), growth
        steps = bool(kind[0]) or any(growth) or self._idle > LEARNING
        usual = steps and kind == self._last and pointers == self._pointers
        if usual and not self._contents and not self._early and self._others.passes():
            return
        self._last = kind
        optimizers = self._steps.optimizers()
        stepped = self._names_of(optimizers)
        for name in self._names_of(self._steps.exposed(collectives)):
            self._moves(name, "a collective comes between its step and the commit")
        for name in self._early:
            self._moves(name, "it changes before the optimizer's step")
        growth = growth + self._others.read(growth)
        unusual = False
        for number, grown in enumerate(growth):
            same = number >= len(pointers) or pointers[number] == self._pointers[number]
            if grown == 0 and same:
                continue
            name = self.names[number]
            if name not in stepped:
                self._moves(name, "it changes outside of an optimizer's step")
            elif grown not in self._usual[number]:
                unusual = unusual or bool(self._usual[number])
                self._usual[number].add(grown)
        self._learn_contents(stepped)
        idle = not stepped and not any(growth) and bool(self._trained)
        self._idle = self._idle + 1 if idle else 0
        if unusual or 0 < self._idle <= LEARNING:
            self.learning = max(self.learning, 1)

    def _learn_contents(self, stepped: set[str]) -> None:
        if not self._contents:
            return
        for name in self._others_than_before(stepped):
            self._moves(name, "it changes outside of an optimizer's step")
        if self.learning:
            self.learning -= 1
            sizes = zip(self.names, self.tensors, strict=True)
            size = sum(tensor.nbytes for name, tensor in sizes if name in self._unproven)
            if not self.learning and size > ALWAYS_BYTES:
                self._unproven.clear()
                self._choice = None

    def _moves(self, name: str, why: str) -> None:
        if name not in self.moving:
            self.moving[name] = why
            self._unproven.discard(name)
            self._choice = None

    def _names_of(self, optimizers: Sequence[Optimizer]) -> set[str]:
        """Return the names of what these optimizers change: parameters, and their own tensors."""
        changed = _changed_by(optimizers)
        pairs = zip(self.names, self.tensors, strict=True)
        return {name for name, tensor in pairs if id(tensor) in changed} if changed else set()

    # ---- after a failure ---------------------------------------------------------------------

    def changed(self) -> list[str]:
        """Return the names of tensors that have changed since the commit and were not copied."""
        commit = self._commit
        stepped = _changed_by(self._steps.optimizers()) if commit.still else set()
        versions = self._seen.all_versions()
        pointers = self._seen.pointers
        found = []
        unknown = []  # seem to be unchanged, and their content is known
        for number in commit.still:
            tensor = commit.tensors[number]
            if (
                id(tensor) in stepped
                or version_of(tensor) != versions[number]
                or (number < len(pointers) and tensor.data_ptr() != pointers[number])
            ):
                found.append(commit.names[number])
            elif id(tensor) in self._contents and tensor.device.type == "cpu":
                unknown.append(number)
        now = contents([commit.tensors[number] for number in unknown])
        return found + [
            commit.names[number]
            for number, content in zip(unknown, now, strict=True)
            if self._contents[id(commit.tensors[number])] != content
        ]

    def is_clean(self) -> bool:
        """Return whether every tensor is, or can be made, what it was at the commit."""
        return not self._is_torn and not self.changed()

    def roll_back(self, but: Collection[int] = ()) -> None:
        """Put the copies back; `but`: the identities of tensors that stay as they are."""
        commit = self._commit
        pairs = [
            (tensor, copy)
            for tensor, copy in zip(commit.moved, commit.copies, strict=True)
            if id(tensor) not in but
        ]
        plain = [(t, c) for t, c in pairs if not _differ(t, c) and not shares_memory(t)]
        if plain:
            with torch.no_grad():
                copy_all([t for t, _ in plain], [c for _, c in plain])
        done = {id(tensor) for tensor, _ in plain}
        for tensor, copy in pairs:
            if id(tensor) not in done:
                fill_tensor(tensor, copy)
        self.note()

    def note(self) -> None:
        """Note that the tensors hold what was committed, though they were written to."""
        tensors = self._commit.tensors
        first = len(self._seen.versions)
        versions = list(map(version_of, tensors))
        pointers = list(map(_pointer, tensors[:first]))
        self._seen = _Seen(versions[:first], pointers, Read.at(versions[first:]))
        if self.tensors is tensors:
            self._versions, self._pointers, self._others.last = self._seen


def _changed_by(optimizers: Sequence[Optimizer]) -> set[int]:
    """Return the identities of what these optimizers change."""
    changed: set[int] = set()
    for optimizer in optimizers:
        changed.update(map(id, trained_by(optimizer)))
        for values in optimizer.state.values():
            changed.update(map(id, values.values() if isinstance(values, dict) else (values,)))
    return changed


def _differ(tensor: Tensor, copy: Tensor) -> bool:
    return (
        bool(tensor.shape != copy.shape or tensor.dtype != copy.dtype)
        or tensor.device != copy.device
    )


# ---- the versions of what optimizers remember ------------------------------------------

EVERY = 16  # commits
SAMPLES = 24  # that are read at each commit


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
        self._seen = growth
        self.last = Read.at(versions)
        return growth

    def forget(self) -> None:
        """Read all again at the next commits: what happens is not known."""
        self._is_usual, self._seen = False, None
