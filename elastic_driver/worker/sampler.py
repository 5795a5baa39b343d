"""The samples that this worker trains, so that an epoch trains each one exactly once.

`ElasticSampler` goes into `DataLoader(sampler=…)` and into `TorchState(sampler=…)`; the state
calls `advance()` after each optimizer step, `reset()` after a rejoin, and keeps `state_dict()` with
each commit.

The order of an epoch follows from (seed, epoch) alone. The world consumes it from the front:
whatever its size, k samples trained by each of W workers are the next k·W positions. So the whole
progress is one number, the *position*: it is equal on every rank, it is a few bytes to commit or
send, and after a resize everything behind it, and nothing else, is shared among the new workers.

A loader draws indices ahead of the loop (`num_workers`, `prefetch_factor`), so the indices that
were drawn do not tell which were trained. The batches that the loop has *received* when the
optimizer steps do. torch has no public hook for that, so `find_loader` finds the loader that
iterates a sampler, and `_SamplerPass` reads its count of batches. Prefetching, gradient
accumulation, a short last batch and several optimizers make no difference.

Positions and lengths are samples. No list of indices is ever made.
"""

import sys
import weakref
from collections.abc import Iterator, Mapping, Sized
from types import FrameType
from typing import Any

from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from elastic_driver.errors import UsageError
from elastic_driver.policies.permutation import Permutation, mix
from elastic_driver.worker.current import rank_and_size
from elastic_driver.worker.positions import Counted

__all__ = ["ElasticSampler"]

_FRAMES = 6  # sampler ← batch sampler ← _next_index ← _next_data ← __next__; more is not a loader
_KEPT = ("samples", "seed", "epoch", "position", "replayed")  # a commit keeps these


def find_loader(frame: FrameType | None, sampler: Sampler[int]) -> tuple[Any, BatchSampler | None]:
    """Return the loader's iterator for which `frame` called `iter(sampler)`, and its batch sampler.

    `frame` is the caller of `Sampler.__iter__`: torch's `BatchSampler`, called by the
    iterator of a `DataLoader`. The result is (None, None) for any other caller.
    """
    batches = frame.f_locals.get("self") if frame is not None else None
    if isinstance(batches, BatchSampler) and batches.sampler is sampler:
        for _ in range(_FRAMES):
            if frame is None:
                break
            caller = frame.f_locals.get("self")
            if isinstance(caller, _BaseDataLoaderIter) and hasattr(caller, "_num_yielded"):
                return caller, batches
            frame = frame.f_back
    return None, None


class _SamplerPass:
    """One iteration over the rest of an epoch, by one world."""

    def __init__(self, start: int, samples: int, loader: Any, batches: BatchSampler | None) -> None:
        self.start = start
        self.rank, self.size = rank_and_size()
        self.remaining = samples - start
        self.length = -(-self.remaining // self.size)  # of each rank, padding included
        self.usable = self.length  # of these, as many as the loader will hand out
        if batches is not None and batches.drop_last:
            self.usable -= self.length % batches.batch_size
        self.batches = batches
        # A weak reference, so that the end of the user's loop ends the loader's workers.
        self._loader = weakref.ref(loader) if loader is not None else None
        self.drawn = 0
        self.trained = 0  # by each rank
        self.counted = 0  # of these, as many as the sampler has counted

    def received(self) -> int:
        """Return the samples that the loop has got from the loader, each batch counted as full.

        After the end of the loop it is all samples of this rank, or 0 if the loop was left early.
        """
        loader = self._loader() if self._loader is not None else None
        if loader is not None and self.batches is not None:
            return int(loader._num_yielded * self.batches.batch_size)
        # The optimizer may step once more for a loop's leftover, after its end.
        return self.length if self.drawn == self.length else 0

    def trains(self, count: int) -> None:
        """Record that each rank has trained `count` samples of this pass, from its start."""
        self.trained = max(self.trained, min(count, self.usable))


class ElasticSampler(Sampler[int]):  # type: ignore[misc]  # mypy does not follow torch
    """A sampler that trains each sample once, also when workers come and go.

    Each rank yields the same number of samples, so that no rank waits for others at the end of
    an epoch. If they do not divide evenly, the last ones are repeated (`replayed` counts them).

        sampler = elastic.ElasticSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
        state = elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    Iterating again after an epoch is done starts the next one. After a rejoin it continues with
    the rest of the current epoch, even if no sample is left. A loop may also name its epochs
    by `set_epoch`.

    Args:
        dataset: anything with a length.
        shuffle: whether each epoch has a random order; else it has the order of the data set.
        seed: of all epochs' orders; the same on every worker.
        batch_size: samples that each rank trains in one optimizer step. Needed only where
            the loader is not a torch `DataLoader`, or the loop itself fetches batches ahead.

    Raises `UsageError` for a data set without a length, and for a batch size below 1.
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int = 0, batch_size: int | None = None
    ) -> None:
        require_length(dataset, type(self).__name__)
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; give the samples of one step, from 1")
        self.samples = len(dataset)
        self.shuffle, self.seed, self.batch_size = shuffle, seed, batch_size
        self.epoch = self.position = self.replayed = 0
        self.counted = Counted()
        self._replayed_before = 0  # in earlier passes over this epoch
        self._pass: _SamplerPass | None = None
        self._rejoined = False

    def __iter__(self) -> Iterator[int]:
        """Return this rank's share of the rest of the epoch, or of the next epoch."""
        if self._is_over():
            self._start(self.epoch + 1)
        self._rejoined = False
        self._replayed_before = self.replayed
        self._pass = _SamplerPass(self.position, self.samples, *find_loader(sys._getframe(1), self))
        return self._draw(self._pass)

    def _draw(self, share: _SamplerPass) -> Iterator[int]:
        order = Permutation(self.samples, mix(self.seed, self.epoch)) if self.shuffle else None
        for turn in range(share.length):
            offset = (share.rank + turn * share.size) % share.remaining  # wraps into the padding
            position = share.start + offset
            share.drawn += 1
            yield order[position] if order is not None else position

    def __len__(self) -> int:
        """Return the samples of this rank in the current pass, or in a pass that starts now."""
        if self._pass is not None and not self._is_over():
            return self._pass.length
        left = self.samples if self._is_over() else self.samples - self.position
        size = rank_and_size()[1]
        return (left + size - 1) // size

    def _is_over(self) -> bool:
        """Return whether the next iteration belongs to the next epoch."""
        if self._rejoined or self.samples == 0:
            return False
        done = self._pass is not None and self._pass.trained >= self._pass.usable
        return done or self.position >= self.samples

    def advance(self) -> None:
        """Count all samples that the loop has received until now as trained.

        The state calls it after each step, on every rank. A second call in a step changes nothing.
        Raises `UsageError` where nothing tells how many samples a step trains.
        """
        share = self._pass
        if share is None:
            return  # a step that used none of this sampler's data
        if self.batch_size is not None:
            share.trains(share.trained + self.batch_size)
        elif share.batches is not None:
            share.trains(share.received())
        elif share.trained == 0:
            raise UsageError(
                "ElasticSampler cannot tell how many samples an optimizer step trains, because no "
                "torch DataLoader(batch_size=…) iterates it; give ElasticSampler(batch_size=…)"
            )
        self._move(share)

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that batch `batch_idx` of this loop (from 0), of `batch_size` samples, is trained.

        Horovod's samplers need this call. Here it is not needed with a torch `DataLoader`, and
        does no harm.
        """
        if self._pass is not None:
            self._pass.trains((batch_idx + 1) * batch_size)
            self._move(self._pass)

    def _move(self, share: _SamplerPass) -> None:
        self.counted = Counted(self.counted.samples + share.trained - share.counted)
        share.counted = share.trained
        trained = share.trained * share.size
        self.position = share.start + min(trained, share.remaining)
        self.replayed = self._replayed_before + max(0, trained - share.remaining)

    def set_epoch(self, epoch: int) -> None:
        """Train `epoch` from its start; no change if it is the current one, which goes on."""
        if epoch != self.epoch:
            self._start(epoch)
        else:
            self._rejoined = True  # the caller counts the epochs, so none begins by itself

    def _start(self, epoch: int) -> None:
        self.epoch, self.position, self.replayed = epoch, 0, 0
        self._pass, self._rejoined = None, False

    def reset(self) -> None:
        """Share the rest among the workers of the new world, from the next iteration on."""
        self._pass, self._rejoined = None, True

    def state_dict(self) -> dict[str, int]:
        """Return the progress, equal on every rank at a step boundary: five numbers."""
        return {name: getattr(self, name) for name in _KEPT}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from another sampler's progress.

        Raises `UsageError` if it was made for a data set of another length.
        """
        if state["samples"] != self.samples:
            raise UsageError(
                f"the sampler's state is of a data set of {state['samples']} samples, this one has "
                f"{self.samples}; give every worker the same data, or start without this state"
            )
        for name in _KEPT:
            setattr(self, name, state[name])
        self.reset()


def require_length(dataset: Any, reader: str) -> None:
    """Raise `UsageError` for a data set without a length."""
    if not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{reader} needs a data set with a length and {type(dataset).__name__} has none; "
            "for streams use ShardedDataset"
        )
