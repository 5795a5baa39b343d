"""Gradients that a commit finds and no optimizer step has used: an accumulation that goes on.

A backward pass without a step behind it is noticed by hooks on a few parameters; only then are the
gradients looked at. Gradients that were summed over the ranks are equal on all of them, and become
part of the commit: copied, put back, and sent. Those of this rank alone exist nowhere else, so a
commit among them is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.steps import collectives, trained_by


class Gradients:
    """The gradients of one state's optimizers, as far as they belong to a commit."""

    def __init__(self) -> None:
        # Returns whether the gradients of the last pass are those of this rank alone.
        self.is_local: Callable[[], bool] = lambda: False
        self._hooks: list[Any] = []
        self._hooked: list[int] = []
        self._pending = False  # a pass has come since the last optimizer step
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, gradient, its copy
        self._collectives = 0  # until the last commit

    @property
    def collectives_before(self) -> int:
        """The collectives of this process until the last commit."""
        return self._collectives

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Notice backward passes for these optimizers' parameters from now on."""
        chosen: dict[int, Tensor] = {}
        for optimizer in optimizers:
            trained = [p for p in trained_by(optimizer) if p.requires_grad and p.is_leaf]
            chosen |= {id(p): p for p in (*trained[:1], *trained[-1:])}
        if list(chosen) == self._hooked:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooked = list(chosen)
        self._hooks = [p.register_post_accumulate_grad_hook(self._passed) for p in chosen.values()]

    def _passed(self, _parameter: Tensor) -> None:
        self._pending = True

    def used(self) -> None:
        """An optimizer has taken its step: what it found is used up."""
        self._pending = False

    def keep(self, optimizers: Sequence[Optimizer]) -> None:
        """Copy the gradients that a later step will use.

        Raises `UsageError` where they are those of this rank alone.
        """
        before, self._collectives = self._collectives, collectives()
        if not self._pending:
            self._kept = []
            return
        found = [p for o in optimizers for p in trained_by(o) if p.grad is not None]
        if found and self.is_local_now(before):
            raise UsageError(
                "commit() found gradients that no optimizer step has used, and that were not "
                "summed over the ranks: each rank holds a part that no other has, so it cannot be "
                "kept; commit after optimizer.step(), once for all accumulated batches"
            )
        self._kept = [(p, p.grad, p.grad.detach().clone()) for p in found if p.grad is not None]

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
        for parameter, gradient, copy in self._kept:
            gradient.detach().copy_(copy)
            parameter.grad = gradient
        self._pending = bool(self._kept)

    def named(self, names: dict[int, str]) -> list[tuple[str, Tensor]]:
        """Return the kept gradients by name of their parameter; `names` are those by identity."""
        return [(names.get(id(p), "?"), copy) for p, _, copy in self._kept]

    def receive(self, found: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take over the gradients of the sender's commit, by parameter."""
        for parameter, gradient in found:
            parameter.grad = gradient.to(parameter.device)
        self._pending = bool(found)
