"""Positions in the data: what a state moves at each commit, and what it counts.

A *position* says which samples the state has seen. At every commit the state calls `advance_all`,
just before it keeps each `state_dict()`: so a position is that of the batches that the loop had
received by then, whatever optimizers did. Nothing else moves it. After a change of the world it
calls `reset()`, before the state is sent; receivers, and ranks that roll back, load the kept
`state_dict()` instead.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import nn

from elastic_driver.errors import HostsUpdatedInterrupt, UsageError, WorldBrokenError


@runtime_checkable
class Advancing(Protocol):
    """A sampler, or another object with a position in the data."""

    def advance(self) -> None:
        """Count all samples that the loop has received until now as trained.

        The state calls it at every commit, on every rank. A second call without a batch between
        changes nothing.
        """

    def reset(self) -> None:
        """Share the rest of the data among the workers of the new world."""


class Counted(NamedTuple):
    """Samples that this process has trained, and its seconds of waiting for data (0: unknown)."""

    samples: int = 0
    waited: float = 0.0


@runtime_checkable
class CountsSamples(Protocol):
    """A sampler, or other data, that counts the samples which this process has trained."""

    counted: Counted


def advance_all(positions: Iterable[tuple[str, Advancing]]) -> None:
    """Move positions at a commit; each comes with its name in the state.

    Raises `UsageError` with one line that names the position which cannot be moved, and why. A
    change or a break of the world, in a position of the script's own, passes as it is.
    """
    for name, position in positions:
        try:
            position.advance()
        except (HostsUpdatedInterrupt, WorldBrokenError):
            raise
        except UsageError as error:
            raise UsageError(f"state.{name} cannot be committed: {error}") from error
        except Exception as error:
            said = (str(error).strip().splitlines() or ["no message"])[0]
            raise UsageError(
                f"state.{name} cannot be committed: {type(position).__name__}.advance() raised "
                f"{type(error).__name__}: {said}"
            ) from error


def division_of(sources: Sequence[Any]) -> tuple[int | None, int | None]:
    """Return the micro-batches and the samples of a step of a `FixedBatch`, if there is one.

    Nothing else has virtual workers.
    """
    for source in sources:
        try:
            count = getattr(source, "virtual_workers", None)
        except UsageError:  # before the first world a `FixedBatch` may not know it
            count = None
        if count:
            return count, count * source.micro_batch_size
    return None, None


def count_parameters(models: Sequence[nn.Module]) -> int | None:
    """Return how many parameters models have; None: none, or a lazy one that has no shape yet."""
    unique = {id(each): each for model in models for each in model.parameters()}
    if any(nn.parameter.is_lazy(each) for each in unique.values()):
        return None
    return sum(each.numel() for each in unique.values()) or None
