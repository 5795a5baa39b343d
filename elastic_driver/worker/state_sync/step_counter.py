"""Counts optimizer steps, so that a state knows whether its tensors still are those of a commit.

The hooks run inside `optimizer.step()`, and the positions in the data move there too: weights
and position never are a step apart. Each `State` owns one counter.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer


@runtime_checkable
class Advancing(Protocol):
    """A sampler, or another object with a position in the data."""

    def advance(self) -> None:
        """Count what the loop has received until now as trained.

        The state calls it after each step of its first optimizer.
        """

    def reset(self) -> None:
        """Share what is left among the workers of the new world."""


class StepCounter:
    """Steps of the watched optimizers since the last commit.

    `steps` counts finished steps, of all optimizers together. `unfinished` counts optimizers that
    are inside `step()`: above zero at rest, a step was interrupted and its tensors are half
    written. `settle` is called before each step: it waits for the gradients, and raises where they
    will never come, so that no optimizer works with them.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.unfinished = 0
        self.settle: Callable[[], None] = lambda: None  # a state in no world waits for nothing
        self._hooks: list[Any] = []
        self._advancing: Sequence[Advancing] = ()

    def watch(self, optimizers: Sequence[Optimizer], advancing: Sequence[Advancing]) -> None:
        """Count these optimizers from now on, and move these positions with the first one."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._advancing = advancing
        for index, optimizer in enumerate(optimizers):
            self._hooks.append(optimizer.register_step_pre_hook(self._before))
            self._hooks.append(optimizer.register_step_post_hook(self._after(index == 0)))

    def at_rest(self) -> bool:
        """Return whether no optimizer has touched a tensor since the last commit."""
        return self.steps == 0 and self.unfinished == 0

    def restart(self) -> None:
        """Count from zero: the tensors are those of a commit again."""
        self.steps = self.unfinished = 0

    def advance(self) -> None:
        """Move the positions: a batch was used up."""
        for position in self._advancing:
            position.advance()

    def _before(self, *_: Any) -> None:
        self.settle()
        self.unfinished += 1

    def _after(self, is_first: bool) -> Callable[..., None]:
        def after(*_: Any) -> None:
            self.unfinished -= 1
            self.steps += 1
            if is_first:
                self.advance()

        return after
