"""The tensors of a state: which have changed since the commit, and which are copied at each one.

In synchronous data parallelism most tensors change in an optimizer's step only, between the last
collective and the commit. No failure can be seen there, so a commit need not copy them: a rank that
learns of a lost peer still has them as they were committed. What changes at another moment (running
statistics, momentum encoders, averages, weights that are clamped, steps that torch's hooks do not
see, steps with a collective behind them) has to be copied at each commit. Nobody says which these
are: it is *learned*.

- A tensor is known by its object, its memory and its version counter. At each commit, and after a
  failure, these are compared.
- In the first steps, and now and then later, the content is compared as well (`fingerprint`):
  between the commit and the first optimizer step, and from commit to commit. That finds changes
  which no version shows (`tensor.data`, captured graphs).
- A tensor that moves outside of an optimizer's step is copied from then on. One that begins to do
  so later is found at the next commit.
- Whatever no optimizer of the state trains is copied at first, up to `UNPROVEN_BYTES`, until it is
  known to stand still.
"""

import time
from collections.abc import Callable, Sequence
from operator import attrgetter, sub

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_driver.worker.state_sync.fingerprint import contents
from elastic_driver.worker.state_sync.steps import Steps, trained_by
from elastic_driver.worker.state_sync.values import fill_tensor

LEARNING = 3  # commits after the first one whose contents are compared
UNPROVEN_BYTES = 64 * 1024 * 1024
SHARE = 0.0005  # of the training time, for comparing contents later
_version = attrgetter("_version")
_pointer = torch.Tensor.data_ptr
Named = list[tuple[str, Tensor]]


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
        self._trained: set[str] = set()
        self._small: set[str] = set()  # that are copied at each commit, whether they move or not
        self._choice: list[Tensor] | None = None  # the tensors to copy; None: to be chosen
        self._still: list[int] = []  # numbers of the tensors that are not copied
        self._last: object = None  # optimizers and growth of the last commit that was looked into
        self._unproven: set[str] = set()  # copied until they are known to stand still
        self._committed: list[Tensor] = []  # those whose versions are known
        self._versions: list[int] = []  # of all, at the commit
        self._pointers: list[int] = []
        self._contents: dict[str, int] | None = None  # of those that stand still, if compared
        self._usual: list[set[int]] = []  # by how much the version of each grows in a step
        self._moved: list[Tensor] = []  # the tensors that were copied, and the copies
        self._copies: list[Tensor] = []
        self._early: set[str] = set()  # have changed before the first optimizer step
        self._check_at = 0.0
        self._idle = 0  # commits in a row in which nothing has changed
        steps.before_first = self._look_before_step

    # ---- what there is ---------------------------------------------------------------------

    def arrange(self, named: Named, trained: set[str], small: set[str]) -> None:
        """Take in the tensors of now.

        `trained`: the names of those that optimizers move; `small`: of buffers, which are copied at
        each commit, because the running statistics among them move with no version counted.
        """
        unique: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in named:
            unique.setdefault(id(tensor), (name, tensor))
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
        # A tensor that is new stands for itself: it was put in, not written to.
        before = zip(self._committed, self._versions, self._pointers, strict=True)
        seen = {id(tensor): (version, pointer) for tensor, version, pointer in before}
        now = [seen.get(id(t)) or (t._version, t.data_ptr()) for t in self.tensors]
        self._versions, self._pointers = [v for v, _ in now], [p for _, p in now]
        self._committed, self._choice = self.tensors, None

    @property
    def copied_bytes(self) -> int:
        """The bytes that each commit copies."""
        return sum(copy.nbytes for copy in self._copies)

    # ---- commits ---------------------------------------------------------------------------

    def keep(self, *, from_others: bool = False) -> None:
        """Note all tensors as committed, and copy those that move.

        `from_others`: the content was received or put back, so nothing is learned from it.
        """
        versions = list(map(_version, self.tensors))
        pointers = list(map(_pointer, self.tensors))
        if self._versions and not from_others:
            self._learn(versions, pointers)
        if self._choice is None:
            self._choose()
        self._copy()
        self._versions, self._pointers = versions, pointers
        self._early, self._contents = set(), None
        now = self._clock()
        if (self.learning > 0 or now >= self._check_at) and not self.copy_all:
            self._contents = self._look(self._not_moving())
            self._check_at = now + 3 * (self._clock() - now) / SHARE

    def _choose(self) -> None:
        """Decide which tensors are copied, after something has changed about that."""
        copied = {*self.moving, *self._unproven, *self._small}
        chosen = [self.copy_all or name in copied for name in self.names]
        self._choice = [t for t, is_copied in zip(self.tensors, chosen, strict=True) if is_copied]
        self._still = [number for number, is_copied in enumerate(chosen) if not is_copied]
        same = len(self._choice) == len(self._copies) and all(
            t.shape == c.shape and t.dtype == c.dtype and t.device == c.device
            for t, c in zip(self._choice, self._copies, strict=True)
        )
        if not same:
            self._copies = [torch.empty_like(t, requires_grad=False) for t in self._choice]

    def _copy(self) -> None:
        choice = self._choice or []
        if any(map(_differ, choice, self._copies)):  # one was resized in place
            self._copies = [torch.empty_like(t, requires_grad=False) for t in choice]
        if choice:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, choice)
        self._moved = choice

    def _not_moving(self) -> list[int]:
        return [number for number, name in enumerate(self.names) if name not in self.moving]

    def _look(self, numbers: Sequence[int]) -> dict[str, int]:
        found = contents([self.tensors[number] for number in numbers])
        return {self.names[number]: value for number, value in zip(numbers, found, strict=True)}

    # ---- learning --------------------------------------------------------------------------

    def _look_before_step(self) -> None:
        """Before the first optimizer step of an interval: find what has moved already."""
        if self._contents is None or len(self._versions) != len(self.tensors):
            return
        numbers = [n for n in self._not_moving() if self.names[n] in self._contents]
        now = self._look(numbers)
        self._early = {name for name, value in now.items() if value != self._contents[name]}

    def _learn(self, versions: list[int], pointers: list[int]) -> None:
        """Decide, at a commit, which tensors have moved outside of an optimizer's step."""
        optimizers, exposed = self._steps.optimizers(), self._steps.exposed()
        growth = list(map(sub, versions, self._versions))
        kind = [id(each) for each in (*optimizers, None, *exposed)], growth
        quiet = self._contents is None and not self._early and pointers == self._pointers
        if quiet and kind == self._last and (optimizers or any(growth)):
            return
        self._last = kind
        stepped = self._names_of(optimizers)
        for name in self._names_of(exposed):
            self._moves(name, "a collective comes between its step and the commit")
        for name in self._early:
            self._moves(name, "it changes before the optimizer's step")
        unusual = False
        for number, grown in enumerate(growth):
            name = self.names[number]
            if grown == 0 and pointers[number] == self._pointers[number]:
                continue
            if name not in stepped:
                self._moves(name, "it changes outside of an optimizer's step")
            elif grown not in self._usual[number]:
                unusual = unusual or bool(self._usual[number])
                self._usual[number].add(grown)
        self._learn_contents(stepped)
        if self._contents is not None and self.learning:
            self.learning -= 1
            if not self.learning:
                self._unproven.clear()
                self._choice = None
        idle = not stepped and not any(growth) and bool(self._trained)
        self._idle = self._idle + 1 if idle else 0
        if unusual or 0 < self._idle <= LEARNING:
            self.learning = max(self.learning, 1)

    def _learn_contents(self, stepped: set[str]) -> None:
        if self._contents is None:
            return
        numbers = [
            number
            for number, name in enumerate(self.names)
            if name in self._contents and name not in stepped and name not in self.moving
        ]
        for name, value in self._look(numbers).items():
            if value != self._contents[name]:
                self._moves(name, "it changes outside of an optimizer's step")

    def _moves(self, name: str, why: str) -> None:
        if name not in self.moving:
            self.moving[name] = why
            self._unproven.discard(name)
            self._choice = None

    def _names_of(self, optimizers: Sequence[Optimizer]) -> set[str]:
        """Return the names of what these optimizers change: parameters, and their own tensors."""
        if not optimizers:
            return set()
        changed: set[int] = set()
        for optimizer in optimizers:
            for parameter in trained_by(optimizer):
                changed.add(id(parameter))
            for values in optimizer.state.values():
                if isinstance(values, dict):
                    changed.update(map(id, values.values()))
        return {
            name
            for name, tensor in zip(self.names, self.tensors, strict=True)
            if id(tensor) in changed
        }

    # ---- after a failure ---------------------------------------------------------------------

    def changed(self) -> list[str]:
        """Return the names of tensors that have changed since the commit and were not copied."""
        still = [(self.names[n], self.tensors[n], n) for n in self._still]
        if not still:
            return []
        stepped = self._names_of(self._steps.optimizers())
        return [
            name
            for name, tensor, number in still
            if name in stepped
            or tensor._version != self._versions[number]
            or tensor.data_ptr() != self._pointers[number]
        ]

    def is_clean(self) -> bool:
        """Return whether every tensor is, or can be made, what it was at the commit."""
        return not self.changed()

    def roll_back(self) -> None:
        """Put the copies back."""
        plain = [
            (tensor, copy)
            for tensor, copy in zip(self._moved, self._copies, strict=True)
            if tensor.shape == copy.shape
            and tensor.dtype == copy.dtype
            and 0 not in tensor.stride()
        ]
        if plain:
            with torch.no_grad():
                torch._foreach_copy_([t for t, _ in plain], [c for _, c in plain])
        done = {id(tensor) for tensor, _ in plain}
        for tensor, copy in zip(self._moved, self._copies, strict=True):
            if id(tensor) not in done:
                fill_tensor(tensor, copy)
        self._versions = list(map(_version, self.tensors))
        self._pointers = list(map(_pointer, self.tensors))


def _differ(tensor: Tensor, copy: Tensor) -> bool:
    return bool(tensor.shape != copy.shape or tensor.dtype != copy.dtype)
