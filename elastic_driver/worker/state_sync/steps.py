"""Watches the steps of all optimizers of this process, and the collectives around them.

Torch calls hooks before and after each `step()`, of any optimizer. They say which tensors an
optimizer has changed since the commit, also where a tensor's version counter does not (fused
kernels leave it as it is). A step is *exposed* if a collective came after it, or inside it, and
before the commit: this rank may learn of a lost peer there, with the step already taken.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from elastic_driver.worker.torch_seams import process_groups


def collectives() -> int:
    """Return a number that grows with each collective of this process."""
    if list(map(id, process_groups.groups)) != _counting.groups:
        _counting.follow(list(process_groups.groups))
    return sum([count() for count in _counting.counts])


def collectives_of_world() -> int:
    """Return how many collectives of the whole world this process has begun; for any thread."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return 0 if group is None else sum([count() for count in _counts_of(group)[0]])


def _counts_of(group: Any) -> tuple[list[Callable[[], int]], bool]:
    """Return what counts the collectives that a group has begun; whether that is all of them.

    A group of ours does not count by itself, its halves do.
    """
    counts: list[Callable[[], int]] = []
    devices = process_groups.device_types(group)
    for device in devices:
        count = process_groups.counter_of(group, device)
        try:
            count()
        except RuntimeError:  # a backend that counts nothing, or not yet
            continue
        counts.append(count)
    return counts, len(counts) == len(devices)


class _Counting:
    """How the collectives of the groups of now are counted: to find their backends takes longer."""

    def __init__(self) -> None:
        self.groups: list[int] | None = []  # identities; None: not all of them count yet
        self.counts: list[Callable[[], int]] = []  # of their backends, which live as long as they
        self._lives: list[weakref.ref[Any]] = []

    def follow(self, groups: list[Any]) -> None:
        """Count for these groups from now on, until one of them is gone."""
        found = [_counts_of(group) for group in groups]
        self._lives = [weakref.ref(group, self._forget) for group in groups]
        self.counts = [count for counts, _ in found for count in counts]
        self.groups = list(map(id, groups)) if all(whole for _, whole in found) else None

    def _forget(self, _: object) -> None:
        self.groups, self.counts = None, []


_counting = _Counting()


class _Step:
    """What one optimizer has done since the commit."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.running = 0
        self.finished = 0
        self.began_at = self.ended_at = 0  # counts of collectives, around the first step


class Steps:
    """The optimizer steps of this process since the last commit of one state.

    `settle` is called before each step: it waits for the gradients, and raises where they will
    never come, so that no optimizer works with them. `before_first` is called before the first
    step after a commit that changes the state; `on_begin` and `on_step` before and after each one,
    of any optimizer.
    """

    def __init__(self) -> None:
        self.settle: Callable[[], None] = lambda: None  # a state in no world waits for nothing
        self.before_first: Callable[[], None] = lambda: None
        self.on_begin: Callable[[Optimizer], None] = lambda _: None
        self.on_step: Callable[[Optimizer], None] = lambda _: None
        self.known: set[int] = set()  # identities of the state's tensors
        self.has_stepped = False  # an optimizer has finished a step of the state since the commit
        self._since: dict[int, _Step] = {}
        self._any: dict[int, weakref.ref[Optimizer]] = {}
        _watch(self)

    def restart(self) -> None:
        """Count from zero: the tensors are those of a commit."""
        self._since, self.has_stepped = {}, False
        self._any.clear()

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that have begun to change tensors since the commit."""
        return [step.optimizer for step in self._since.values()]

    def any_optimizers(self) -> list[Optimizer]:
        """Return all that have begun a step since the commit, whatever they change."""
        return [each for find in self._any.values() if (each := find()) is not None]

    def now(self) -> int:
        """Return the collectives of this process until now."""
        return collectives()

    def done(self, now: int) -> list[tuple[int, int, int, bool]]:
        """Return what is to be the same in intervals that are alike; `now`: the collectives."""
        return [
            (key, step.finished, step.running, step.ended_at < now)
            for key, step in self._since.items()
        ]

    def exposed(self, now: int) -> list[Optimizer]:
        """Return those whose steps a collective has followed until now, or was a part of."""
        return [
            step.optimizer for step in self._since.values() if step.ended_at < now or step.running
        ]

    def before(self, optimizer: Optimizer, closure: bool) -> None:
        """Called by torch before a step."""
        self.settle()
        self.on_begin(optimizer)
        if (step := self._step_of(optimizer, closure)) is not None:
            if not step.finished and not step.running:
                step.began_at = collectives()
            step.running += 1

    def _step_of(self, optimizer: Optimizer, closure: bool) -> _Step | None:
        """Return what this optimizer does to the state; None: nothing."""
        parameters = trained_by(optimizer)
        if not closure and not any(p.grad is not None for p in parameters):
            return None
        self._any[id(optimizer)] = weakref.ref(optimizer)
        step = self._since.get(id(optimizer))
        if step is None and any(id(p) in self.known for p in parameters):
            if not self._since:
                self.before_first()
            step = self._since[id(optimizer)] = _Step(optimizer)
        return step

    def after(self, optimizer: Optimizer) -> None:
        """Called by torch after a step that has raised nothing."""
        self.on_step(optimizer)
        step = self._since.get(id(optimizer))
        if step is None:
            return
        step.running -= 1
        step.finished += 1
        self.has_stepped = True
        if step.finished == 1:
            now = collectives()
            # A collective inside of a step (a closure's backward pass) exposes it.
            step.ended_at = now if now == step.began_at else -1


def trained_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


_watching: "weakref.WeakSet[Steps]" = weakref.WeakSet()


class _Hooks:
    """The mutable field of this module."""

    registered = False


def _watch(steps: Steps) -> None:
    _watching.add(steps)
    if not _Hooks.registered:
        _Hooks.registered = True
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    closure = any(callable(each) for each in (*args, *kwargs.values()))
    for steps in list(_watching):
        steps.before(optimizer, closure)


def _after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for steps in list(_watching):
        steps.after(optimizer)
