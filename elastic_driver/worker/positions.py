"""Positions in the data: what a state moves at each commit, and what loops over a sampler received.

A *position* says which samples the state has seen. At every commit the state calls `advance_all`,
just before it keeps each `state_dict()`: so a position is that of the batches that the loop had
received by then, whatever optimizers did. Nothing else moves it. After a change of the world it
calls `reset()`, before the state is sent; receivers, and ranks that roll back, load the kept
`state_dict()` instead.

A `DataLoader` draws indices ahead of its loop (`num_workers`, `prefetch_factor`), so the indices
that were drawn do not tell what the loop has. The loader's iterator counts the batches that it has
handed out. torch has no public hook for that: `find_loop` finds the iterator by the frames that
call `iter(sampler)`, and `LoaderLoop` reads its count.

A loop has ended when nobody holds the iterator any more: after a `for` statement, also one that was
left by `break`. `persistent_workers=True` lets the loader itself hold it for the next epoch, and a
script may hold it in a variable; then it has ended when it has said so by `StopIteration`.

`optimizer_steps` counts the steps of all optimizers of this process.
"""

import inspect
import sys
import weakref
from collections.abc import Generator, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import BatchSampler, DataLoader, Sampler

from elastic_driver.errors import HostsUpdatedInterrupt, UsageError, WorldBrokenError
from elastic_driver.worker import torch_seams


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


# ---- loops over a sampler --------------------------------------------------------------

# batch sampler ← _next_index ← _try_put_index ← _reset ← __init__ ← _get_iterator of the loader
_FRAMES = 8
_PROBE = [object()]  # held once, as an iterator is that only its loader holds


class BareLoop:
    """A loop over the sampler itself, or over something that is no loader of torch.

    What it has received is not known: it may have made a list of all indices first.

    Attributes:
        unit: samples of a batch; None: not known.
        drop_last: whether a short last batch is left out.
        of_loader: whether it is a loop over a `DataLoader`.
        draws: the generator of the sampler's indices.
        exhausted: whether it has given them all.
    """

    unit: int | None = None
    drop_last = False
    of_loader = False
    draws: weakref.ref[Generator[int, None, None]] | None = None
    exhausted = False

    def begins(self) -> None:
        """Record that the first index is drawn."""

    def batches(self) -> int:
        """Return the batches that the loop has received; 0 where that is not known."""
        return 0

    def has_ended(self) -> bool | None:
        """Return whether the loop was left, or was told that there is no more.

        None: it was given everything, and may have ended or be in its last batch.
        """
        if self.exhausted:
            return None
        return self.draws is None or self.draws() is None

    def disorder(self, drawn: int, length: int) -> str:
        """Return why nobody knows which samples the loop has received; "" if it is known.

        They are known to be the first ones of those `drawn`, of `length` in all.
        """
        del drawn, length
        return "no torch DataLoader(batch_size=…) iterates it"


class LoaderLoop(BareLoop):
    """A loop over a `DataLoader`.

    Args:
        iterator: of the loader; it is held by nothing here.
        loader: that holds the iterator for the next epoch, or None.
        batches: the batch sampler that draws; None: the loader draws single samples.
    """

    of_loader = True

    def __init__(self, iterator: Any, loader: Any, batches: BatchSampler | None) -> None:
        self.unit = batches.batch_size if batches is not None else 1
        self.drop_last = batches is not None and batches.drop_last
        self._direct = batches is None or torch_seams.sampler_of(iterator) is batches
        self._ahead = 0  # batches that are drawn before the loop asks for one
        self._in_order, self._persistent = True, False
        # The fields outlive the iterator until its count is read, and do not hold it. It ends with
        # the user's loop, and with it the loader's processes.
        self._fields: dict[str, Any] | None = vars(iterator)
        self._last = 0  # the count at the end
        self._iterator = weakref.ref(iterator, self._close)
        self._loader = weakref.ref(loader) if loader is not None else None
        self._drawing: weakref.ref[Any] | None = None

    def begins(self) -> None:
        """See `BareLoop.begins`; now the iterator is complete.

        An iterator that begins anew drops what it has drawn from before.
        """
        if (fields := self._fields) is None:
            return
        self._drawing = weakref.ref(torch_seams.drawing_of(fields), self._close)
        if found := torch_seams.prefetching(fields):
            self._ahead, self._in_order, self._persistent = found

    def batches(self) -> int:
        """Return the batches that the loop has received."""
        return self._last if self._fields is None else torch_seams.batches_yielded(self._fields)

    def has_ended(self) -> bool | None:
        """See `BareLoop.has_ended`."""
        iterator = self._iterator()
        if self._fields is None or iterator is None:
            return True
        drawing = self._drawing() if self._drawing is not None else None
        exhausted = drawing is not None and _is_exhausted(drawing)
        if not self._ahead:
            return exhausted
        if not self._persistent:
            return torch_seams.is_shut_down(iterator)
        loader = self._loader() if self._loader is not None else None
        if loader is not None and torch_seams.kept_iterator(loader) is iterator:
            del loader
            if sys.getrefcount(iterator) <= _references_of_one_holder():
                return True
        return None if exhausted else False

    def disorder(self, drawn: int, length: int) -> str:
        """See `BareLoop.disorder`."""
        if not self._in_order:
            return "its DataLoader has in_order=False"
        if self.unit is None:
            return super().disorder(drawn, length)
        expected = (self.batches() + self._ahead) * self.unit
        as_expected = drawn == min(expected, length) or drawn == length <= expected + self.unit
        if self._direct or as_expected:
            return ""
        return "a batch_sampler of its DataLoader draws more, or less, than it hands on"

    def _close(self, _: Any) -> None:
        """Read the count for the last time: the iterator is gone, or begins anew."""
        if self._fields is not None:
            self._last = torch_seams.batches_yielded(self._fields)
            self._fields = None


class UnknownBatches(LoaderLoop):
    """A loop over a `DataLoader` whose batch sampler is of the script's own."""

    def __init__(self, iterator: Any, loader: Any) -> None:
        super().__init__(iterator, loader, None)
        self.unit = None


def find_loop(frame: FrameType | None, sampler: Sampler[int]) -> BareLoop:
    """Return the loop for which `frame`, the caller of `Sampler.__iter__`, called it.

    That is torch's `BatchSampler`, called by the iterator of a `DataLoader`; or that iterator
    itself, where the loader makes no batches.
    """
    batches = iterator = loader = None
    if frame is not None and frame.f_code is BatchSampler.__iter__.__code__:
        batches = frame.f_locals["self"]
    for _ in range(_FRAMES):
        if frame is None or loader is not None:
            break
        caller = frame.f_locals.get("self")
        if torch_seams.is_loader_iterator(caller):
            iterator = caller if iterator is None else iterator
        elif isinstance(caller, DataLoader):
            loader = caller
        frame = frame.f_back
    if iterator is None:
        return BareLoop()
    if batches is not None or torch_seams.sampler_of(iterator) is sampler:
        return LoaderLoop(iterator, loader, batches)
    return UnknownBatches(iterator, loader)


def _is_exhausted(draws: Any) -> bool:
    return inspect.isgenerator(draws) and inspect.getgeneratorstate(draws) == inspect.GEN_CLOSED


def _references_of_one_holder() -> int:
    """Return what `sys.getrefcount` says of an object that one container and one variable hold."""
    probe = _PROBE[0]
    return sys.getrefcount(probe)


# ---- the steps of optimizers -----------------------------------------------------------


class _Steps:
    """The mutable fields of this module."""

    count = 0
    watched = False


def watch_optimizers() -> None:
    """Count the steps of all optimizers from now on."""
    if not _Steps.watched:
        _Steps.watched = True
        register_optimizer_step_post_hook(_stepped)


def optimizer_steps() -> int:
    """Return the steps of all optimizers since the first `watch_optimizers`."""
    return _Steps.count


def _stepped(*_: Any) -> None:
    _Steps.count += 1
