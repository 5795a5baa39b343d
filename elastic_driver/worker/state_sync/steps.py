"""Watches the steps of all optimizers of this process, and the gradients between them.

Torch calls hooks before and after each `step()`, of any optimizer. They say which tensors an
optimizer has changed since the commit, also where a tensor's version counter does not (fused
kernels leave it as it is). A step is *exposed* if a collective came after it, or inside it, and
before the commit: this rank may learn of a lost peer there, with the step already taken.

A commit may find gradients that no optimizer step has used: an accumulation that goes on. A
backward pass without a step of the optimizer behind it is noticed by hooks on a few parameters;
only then are its gradients looked at. Gradients that were summed over the ranks are equal on all of
them, and become part of the commit: copied, put back, and sent. Those of this rank alone exist
nowhere else, so a commit among them is refused.

Where another optimizer has stepped meanwhile, nobody knows yet whether the gradients are meant to
stay: two optimizers may step at different intervals, and the backward pass of a GAN's generator
leaves gradients in the discriminator that are dropped. They are copied, neither refused nor
compared, until they were dropped `DROPPED` times.
"""

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from elastic_driver.errors import UsageError
from elastic_driver.worker import torch_seams
from elastic_driver.worker.state_sync.contents import contents, is_capturing
from elastic_driver.worker.state_sync.part import require_tensor, trained_by
from elastic_driver.worker.torch_seams import version_of


def collectives() -> int:
    """Return a number that grows with each collective of this process."""
    if list(map(id, torch_seams.groups)) != _counting.groups:
        _counting.follow(list(torch_seams.groups))
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
    devices = torch_seams.device_types(group)
    for device in devices:
        count = torch_seams.collective_counter(group, device)
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


# ---- gradients that no step has used ---------------------------------------------------

BY_HAND = 0  # in place of an optimizer's identity
IDLE = 64  # commits with gradients, after which a parameter that did not change is not stepped
DROPPED = 3  # times in a row; then the gradients of this optimizer belong to no commit


class Kept(NamedTuple):
    """A gradient that belongs to a commit."""

    parameter: Tensor
    gradient: Tensor
    copy: Tensor
    is_sure: bool  # no optimizer has stepped meanwhile


class Gradients:
    """The gradients of one state's optimizers, as far as they belong to a commit."""

    def __init__(self) -> None:
        # Returns whether the gradients of the last pass are those of this rank alone.
        self.is_local: Callable[[], bool] = lambda: False
        self.kept: list[Kept] = []  # at the last commit
        self._hooks: list[Any] = []
        self._hooked: list[tuple[int, int]] = []
        self._watched: set[int] = set()  # the optimizers of the state
        self._others: list[Tensor] = []  # parameters that may be stepped by hand
        self._commits = 0  # with a look at these
        self._contents: list[int] = []  # of these, at the first one
        self._idle: dict[int, int] = {}  # those of them that nothing steps, with their versions
        # Of each optimizer: the first gradient that its last step found; those that found it again.
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        self._lasting: set[int] = set()
        self._judges: dict[int, Any] = {}  # hooks that look whether lasting gradients are zeroed
        self._zeroed: dict[int, int] = {}  # how often these were, at the first pass after a step
        self._fresh: set[int] = set()  # optimizers: no pass has come since their last step
        self._pending: set[int] = set()  # optimizers: a pass has come since their last step
        self._dropped: dict[int, int] = {}  # times that kept gradients of an optimizer were dropped
        self._has_stepped = False  # any of these optimizers, since the last commit
        self._collectives = 0  # until the last commit
        weakref.finalize(self, remove_hooks, self._hooks)

    @property
    def collectives_before(self) -> int:
        """The collectives of this process until the last commit."""
        return self._collectives

    def watch(self, optimizers: Sequence[Optimizer], others: Sequence[Tensor] = ()) -> None:
        """Notice backward passes for these optimizers' parameters from now on.

        `others`: parameters that none of these trains, so that a script may step them by hand. When
        it has used their gradients is not known: they belong to each commit.
        """
        chosen: dict[tuple[int, int], tuple[Tensor, int]] = {}
        if list(map(id, others)) != list(map(id, self._others)):
            self._others = list(others)
            self._commits = 0
            self._idle = {}
        for parameter in (*self._others[:1], *self._others[-1:]):
            if parameter.is_leaf:
                chosen[BY_HAND, id(parameter)] = parameter, BY_HAND
        for optimizer in optimizers:
            trained = [p for p in trained_by(optimizer) if p.requires_grad and p.is_leaf]
            for parameter in (*trained[:1], *trained[-1:]):
                chosen[id(optimizer), id(parameter)] = parameter, id(optimizer)
        self._watched = set(map(id, optimizers))
        if list(chosen) == self._hooked:
            return
        remove_hooks(self._hooks)
        self._judges.clear()
        self._lasting.clear()
        self._seen.clear()
        self._hooked = list(chosen)
        me = weakref.ref(self)
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(partial(_passed, me, optimizer))
            for parameter, optimizer in chosen.values()
        ]

    @property
    def are_pending(self) -> bool:
        """Whether a backward pass has left gradients that no optimizer's step has used."""
        return bool(self._pending)

    def passed(self, optimizer: int) -> None:
        """A backward pass has reached parameters of this optimizer."""
        self._pending.add(optimizer)

    def used(self, optimizer: Optimizer) -> None:
        """An optimizer has taken its step: what it found is used up."""
        if id(optimizer) in self._watched:
            self._has_stepped = True
            self._pending.discard(id(optimizer))
            self._fresh.add(id(optimizer))

    def before(self, optimizer: Optimizer) -> None:
        """Before a step: find out whether the gradients of the last commit are still there."""
        if id(optimizer) in self._watched:
            trained = (p for p in trained_by(optimizer) if p.grad is not None and p.requires_grad)
            if (first := next(trained, None)) is not None:  # one that is frozen takes no hook
                self._look_at(first, id(optimizer))
        if not self.kept:
            return
        own = set(map(id, trained_by(optimizer)))
        found = [each for each in self.kept if id(each.parameter) in own and not each.is_sure]
        if found:
            stays = any(each.parameter.grad is each.gradient for each in found)
            count = self._dropped.get(id(optimizer), 0)
            self._dropped[id(optimizer)] = 0 if stays else count + 1

    def _look_at(self, first: Tensor, optimizer: int) -> None:
        """Find out whether gradients last: whether they are the same objects in each step."""
        assert first.grad is not None  # noqa: S101 - the caller has looked
        seen = self._seen.get(optimizer)
        if seen is None or seen() is not first.grad:
            self._seen[optimizer] = weakref.ref(first.grad)
        elif self._zeroed.get(optimizer, 0) < DROPPED and optimizer not in self._lasting:
            self._lasting.add(optimizer)
            judge = partial(_began, weakref.ref(self), optimizer, weakref.ref(first))
            self._judges[optimizer] = first.register_hook(judge)
            self._hooks.append(self._judges[optimizer])

    def began(self, optimizer: int, parameter: Tensor) -> None:
        """A backward pass has a gradient for a parameter, and has not added it yet.

        Lasting gradients that are zeroed before the first pass after each step belong to no commit.
        """
        if optimizer not in self._fresh or is_capturing():
            return
        self._fresh.discard(optimizer)
        is_zero = parameter.grad is None or not bool(parameter.grad.any())
        self._zeroed[optimizer] = self._zeroed.get(optimizer, 0) + 1 if is_zero else 0
        if self._zeroed[optimizer] >= DROPPED:
            self._lasting.discard(optimizer)
        if self._zeroed[optimizer] >= DROPPED or not is_zero:
            self._judges.pop(optimizer).remove()

    def take(self, optimizers: Sequence[Optimizer], *, from_others: bool = False) -> list[Kept]:
        """Return copies of the gradients that a later step will use.

        `from_others`: they were received. Raises `UsageError` where they are those of this rank
        alone.
        """
        if not self._pending and not self._lasting:
            return []
        by_hand = self._stepped_by_hand()
        stepped = self._has_stepped or (bool(by_hand) and BY_HAND in self._pending)
        found = {id(p): p for p in by_hand if p.grad is not None}
        for optimizer in optimizers:
            if id(optimizer) in self._lasting:
                stepped = stepped or id(optimizer) not in self._pending
                found |= {id(p): p for p in trained_by(optimizer) if p.grad is not None}
            if id(optimizer) not in self._pending:
                continue
            if not stepped or self._dropped.get(id(optimizer), 0) < DROPPED:
                found |= {id(p): p for p in trained_by(optimizer) if p.grad is not None}
        if found and not stepped and not from_others and self.is_local_now(self._collectives):
            raise UsageError(
                "commit() found gradients that no optimizer step has used, and that were not "
                "summed over the ranks: each rank holds a part that no other has, so it cannot be "
                "kept; commit after optimizer.step(), once for all accumulated batches"
            )
        kept = [(p, p.grad) for p in found.values() if p.grad is not None]
        for _, gradient in kept:
            require_tensor("a gradient that no step has used", gradient)
        return [Kept(p, each, each.detach().clone(), not stepped) for p, each in kept]

    def _stepped_by_hand(self) -> list[Tensor]:
        """Return the parameters that the script may step by itself.

        Beside optimizers of torch, those count no longer that had gradients and did not change for
        `IDLE` commits, until something writes to them: a body whose head alone is trained.
        """
        if not self._others or not self._watched or is_capturing():
            return self._others
        self._commits += 1
        if self._commits == 1:
            self._contents = contents(self._others)
        elif self._commits == IDLE + 1:
            pairs = zip(self._others, contents(self._others), self._contents, strict=True)
            self._idle = {id(p): version_of(p) for p, now, before in pairs if now == before}
        return [p for p in self._others if self._idle.get(id(p)) != version_of(p)]

    def note_commit(self, kept: list[Kept], now: int) -> None:
        """Note the result of `take` as that of a commit, until which `now` collectives came."""
        self.kept = kept
        self._has_stepped = False
        self._collectives = now

    def is_local_now(self, collectives_before: int) -> bool:
        """Return whether the gradients of the last pass were summed over no other rank."""
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            return self.is_local() or collectives() == collectives_before
        return False

    def put_back(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the gradients those of the commit; all others are dropped."""
        for optimizer in optimizers:
            for parameter in trained_by(optimizer):
                parameter.grad = None
        kept = {id(each.parameter): each for each in self.kept}
        for parameter, gradient, copy, _ in self.kept:
            gradient.detach().copy_(copy)
            parameter.grad = gradient
        self._wait_for(kept.keys(), optimizers)

    def _wait_for(self, parameters: Collection[int], optimizers: Sequence[Optimizer]) -> None:
        """Note whose steps will use the gradients of these parameters."""
        trained = {id(each): trained_by(each) for each in optimizers} | {BY_HAND: self._others}
        self._pending = {
            each for each, own in trained.items() if any(id(p) in parameters for p in own)
        }

    def named(self, names: dict[int, str], *, sure: bool = False) -> list[tuple[str, Tensor]]:
        """Return the kept gradients by name of their parameter; `names` are those by identity.

        `sure`: only those that ranks are to have alike.
        """
        return [
            (names.get(id(each.parameter), "?"), each.copy)
            for each in self.kept
            if each.is_sure or not sure
        ]

    def receive(
        self, found: Sequence[tuple[Tensor, Tensor]], optimizers: Sequence[Optimizer]
    ) -> None:
        """Take over the gradients of the sender's commit, by parameter."""
        self.kept = []
        for parameter, gradient in found:
            parameter.grad = gradient.to(parameter.device)
        self._wait_for({id(parameter) for parameter, _ in found}, optimizers)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method, and does not hold its object.

    Once that is gone, the function does nothing and returns None.
    """
    find = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = find()
        return None if found is None else found(*args)

    return call


def _passed(me: "weakref.ref[Gradients]", optimizer: int, _parameter: Tensor) -> None:
    gradients = me()
    if gradients is not None:
        gradients.passed(optimizer)


def _began(
    me: "weakref.ref[Gradients]", optimizer: int, parameter: "weakref.ref[Tensor]", _: Tensor
) -> None:
    gradients = me()
    trained = parameter()
    if gradients is not None and trained is not None:
        gradients.began(optimizer, trained)


def remove_hooks(hooks: list[Any]) -> None:
    """Take hooks off what they are on."""
    for hook in hooks:
        hook.remove()
    hooks.clear()
