"""Counts optimizer steps, so that a state knows whether its tensors still are those of a commit.

The hooks run inside `optimizer.step()`, and the positions in the data move there too: weights
and position can never be seen a step apart. `state` owns one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer


@runtime_checkable
class Advancing(Protocol):
    """A sampler, or whatever else has a position in the data.

    `advance()` is called once after each step of the state's first optimizer, so that position
    and weights move together; `reset()` after every change of the world, to share anew what is
    left.
    """

    def advance(self) -> None:
        """The optimizer has stepped: what the loop has received until now is trained."""

    def reset(self) -> None:
        """The world has changed."""


class StepCounter:
    """Steps of the watched optimizers since the last commit.

    `steps` counts those that finished, of all optimizers together. `unfinished` is how many are
    inside `step()`: above zero at rest, a step was interrupted and its tensors are half written.
    `settle` is called before each step: it raises where the gradients are not there, or never
    will be, so that no optimizer works with them.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.unfinished = 0
        self.settle: Callable[[], None] = _nothing_to_wait_for
        self._hooks: list[Any] = []
        self._advancing: Sequence[Advancing] = ()

    def watch(self, optimizers: Sequence[Optimizer], advancing: Sequence[Advancing]) -> None:
        """Follow these optimizers from now on, and move these positions with the first one."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._advancing = advancing
        for index, optimizer in enumerate(optimizers):
            self._hooks.append(optimizer.register_step_pre_hook(self._before))
            self._hooks.append(optimizer.register_step_post_hook(self._after(index == 0)))

    def at_rest(self) -> bool:
        """Whether no optimizer has touched a tensor since the last commit."""
        return self.steps == 0 and self.unfinished == 0

    def restart(self) -> None:
        """Count from zero: the tensors are those of a commit again."""
        self.steps = self.unfinished = 0

    def advance(self) -> None:
        """Move the positions: a batch was used up."""
        for thing in self._advancing:
            thing.advance()

    def _before(self, *_: Any) -> None:
        self.settle()
        self.unfinished += 1

    def _after(self, leads: bool) -> Callable[..., None]:
        def after(*_: Any) -> None:
            self.unfinished -= 1
            self.steps += 1
            if leads:
                self.advance()

        return after


def _nothing_to_wait_for() -> None:
    """What a state has to settle before it was in a world."""
