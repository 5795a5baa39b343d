"""What a state needs of samplers and batches: positions in the data that move with its commits."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class Advancing(Protocol):
    """A sampler, or another object with a position in the data."""

    def advance(self) -> None:
        """Count all samples that the loop has received until now as trained.

        The state calls it at each commit, whatever optimizers have done.
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


def division_of(sources: Sequence[Any]) -> tuple[int | None, int | None]:
    """Return the micro-batches and the samples of a step of a `FixedBatch`, if there is one.

    Nothing else has virtual workers.
    """
    for source in sources:
        if count := getattr(source, "virtual_workers", None):
            return count, count * source.micro_batch_size
    return None, None


def count_parameters(models: Sequence[nn.Module]) -> int | None:
    """Return how many parameters models have; None: none, or a lazy one that has no shape yet."""
    unique = {id(each): each for model in models for each in model.parameters()}
    if any(nn.parameter.is_lazy(each) for each in unique.values()):
        return None
    return sum(each.numel() for each in unique.values()) or None
