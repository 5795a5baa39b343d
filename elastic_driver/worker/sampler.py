"""Which samples this worker trains, so that an epoch trains each one exactly once.

`ElasticSampler` goes into `DataLoader(sampler=…)` and into `TorchState(sampler=…)`; the state
calls `advance()` after each optimizer step, `reset()` after a rejoin, and keeps `state_dict()` with
each commit.

**Why it is built like this.** The order of an epoch follows from (seed, epoch) alone. The world
consumes it from the front: whatever its size, k samples trained by each of W workers are the next
k·W positions. So the whole progress is one number, the *position*: it is equal on every rank, it
is a few bytes to commit or send, and after a resize everything behind it, and nothing else, is
shared among the new workers. The position moves when the optimizer steps, by what the loop has
received until then; prefetching, gradient accumulation, a short last batch and several
optimizers make no difference.

Positions and lengths are samples. No list of indices is ever made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sized
from typing import TypedDict

from torch.utils.data import Sampler

from elastic_driver.batch.permutation import Permutation, mix
from elastic_driver.errors import UsageError
from elastic_driver.worker.batching.delivery import Delivery, find_delivery
from elastic_driver.worker.current import rank_and_size

__all__ = ["ElasticSampler", "SamplerState"]


class SamplerState(TypedDict):
    """What a commit keeps of a sampler."""

    samples: int  # length of the data set
    seed: int
    epoch: int
    position: int  # samples of this epoch's order that are trained
    replayed: int  # samples trained twice in this epoch, to give each rank the same number


class _Pass:
    """One iteration over what is left of an epoch, by one world."""

    def __init__(self, start: int, samples: int, delivery: Delivery | None) -> None:
        self.start = start
        self.rank, self.size = rank_and_size()
        self.remaining = samples - start
        self.length = -(-self.remaining // self.size)  # of each rank, padding included
        self.usable = self.length  # of these, what the loader will hand out
        if delivery is not None and delivery.drop_last:
            self.usable -= self.length % delivery.batch_size
        self.delivery = delivery
        self.drawn = 0
        self.trained = 0  # by each rank

    def trains(self, count: int) -> None:
        """Each rank has trained `count` samples of this pass, counted from its start."""
        self.trained = max(self.trained, min(count, self.usable))

    @property
    def finished(self) -> bool:
        """Everything this pass was to train is trained."""
        return self.trained >= self.usable


class ElasticSampler(Sampler[int]):  # type: ignore[misc]  # mypy does not follow torch
    """A sampler that never trains a sample twice nor leaves one out when workers come and go.

    Each rank yields the same number of samples, so that no rank waits for others at the end of
    an epoch; where they do not divide evenly, the last ones are repeated (`replayed` counts them).

        sampler = elastic.ElasticSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
        state = elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    Iterating again after an epoch is done starts the next one; after a rejoin it goes on with what
    is left of the current one, be it nothing. A loop may also name its epochs by `set_epoch`.

    Args:
        dataset: anything with a length.
        shuffle: whether an epoch has a random order; else the order of the data set.
        seed: of all epochs' orders; the same on every worker.
        batch_size: samples each rank trains in one optimizer step. Needed only where
            the loader is not a torch `DataLoader`, or the loop fetches ahead of itself.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise UsageError(
                f"ElasticSampler needs a data set with a length and {type(dataset).__name__} has "
                "none; for streams use ShardedDataset"
            )
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; give the samples of one step, from 1")
        self.samples = len(dataset)
        self.shuffle = shuffle
        self.seed = seed
        self.batch_size = batch_size
        self.epoch = 0
        self.position = 0
        self.replayed = 0
        self._replayed_before = 0  # in earlier passes over this epoch
        self._pass: _Pass | None = None
        self._rejoined = False

    def __iter__(self) -> Iterator[int]:
        """This rank's share of what is left of the epoch (of the next one, if this one is done)."""
        if self._is_over():
            self._start(self.epoch + 1)
        self._rejoined = False
        self._replayed_before = self.replayed
        delivery = find_delivery(sys._getframe(1), self)
        self._pass = _Pass(self.position, self.samples, delivery)
        return self._draw(self._pass)

    def _draw(self, share: _Pass) -> Iterator[int]:
        order = Permutation(self.samples, mix(self.seed, self.epoch)) if self.shuffle else None
        for turn in range(share.length):
            offset = (share.rank + turn * share.size) % share.remaining  # wraps into the padding
            position = share.start + offset
            share.drawn += 1
            yield order[position] if order is not None else position

    def __len__(self) -> int:
        """Samples of this rank in the current pass, or in the one that would start now."""
        if self._pass is not None and not self._is_over():
            return self._pass.length
        left = self.samples if self._is_over() else self.samples - self.position
        size = rank_and_size()[1]
        return (left + size - 1) // size

    def _is_over(self) -> bool:
        """Whether the next iteration belongs to the next epoch."""
        if self._rejoined or self.samples == 0:
            return False
        return self.position >= self.samples or (self._pass is not None and self._pass.finished)

    def advance(self) -> None:
        """The optimizer has stepped: what the loop has received until now is trained.

        Called by the state after each step, on every rank; harmless to repeat within a step.
        Raises `UsageError` where nothing tells how much a step trained.
        """
        share = self._pass
        if share is None:
            return  # a step that used none of this sampler's data
        if self.batch_size is not None:
            share.trains(share.trained + self.batch_size)
        elif share.delivery is not None:
            received = share.delivery.samples()
            if received is None and share.drawn == share.length:
                received = share.length  # the step of a loop's leftover, after its end
            if received is not None:
                share.trains(received)
        elif share.trained == 0:
            raise UsageError(
                "ElasticSampler cannot tell how many samples an optimizer step trains, because no "
                "torch DataLoader(batch_size=…) iterates it; give ElasticSampler(batch_size=…)"
            )
        self._move(share)

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Batch `batch_idx` of this loop (from 0) with `batch_size` samples is trained.

        Horovod's way of telling. It is not needed with a torch `DataLoader`, and does no harm.
        """
        if self._pass is not None:
            self._pass.trains((batch_idx + 1) * batch_size)
            self._move(self._pass)

    def _move(self, share: _Pass) -> None:
        trained = share.trained * share.size
        self.position = share.start + min(trained, share.remaining)
        self.replayed = self._replayed_before + max(0, trained - share.remaining)

    def set_epoch(self, epoch: int) -> None:
        """Train `epoch` from its start; no change if it is the current one, which goes on."""
        if epoch != self.epoch:
            self._start(epoch)
        else:
            self._rejoined = True  # the caller counts the epochs: none is to begin by itself

    def _start(self, epoch: int) -> None:
        self.epoch, self.position, self.replayed = epoch, 0, 0
        self._pass, self._rejoined = None, False

    def reset(self) -> None:
        """The world has changed: the next iteration shares what is left among its workers."""
        self._pass, self._rejoined = None, True

    def state_dict(self) -> SamplerState:
        """The progress, equal on every rank at a step boundary: five numbers."""
        return SamplerState(
            samples=self.samples,
            seed=self.seed,
            epoch=self.epoch,
            position=self.position,
            replayed=self.replayed,
        )

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from another sampler's progress.

        Raises `UsageError` if it was made for a data set of another length.
        """
        if state["samples"] != self.samples:
            raise UsageError(
                f"the sampler's state is of a data set of {state['samples']} samples, this one has "
                f"{self.samples}; give every worker the same data, or start without this state"
            )
        self.seed = state["seed"]
        self.epoch, self.position = state["epoch"], state["position"]
        self.replayed = state["replayed"]
        self.reset()
