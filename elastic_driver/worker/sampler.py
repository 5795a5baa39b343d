"""The samples that this worker trains, so that an epoch trains each one exactly once.

`ElasticSampler` goes into `DataLoader(sampler=…)` and into `TorchState(sampler=…)`; the state
calls `advance()` and keeps `state_dict()` at each commit, and calls `reset()` after a rejoin.

The order of an epoch follows from (seed, epoch) alone. The world consumes it from the front:
whatever its size, k samples trained by each of W workers are the next k·W positions. So the whole
progress is one number, the *position*: it is equal on every rank, it is a few bytes to commit or
send, and after a resize everything behind it, and nothing else, is shared among the new workers.

At a commit, the samples of all batches that the loop has *received* are trained (`positions`).
Prefetching, gradient accumulation, a short last batch, and whatever optimizers do make no
difference. Two kinds of loops take nothing away, if no commit was made in them: an *evaluation*,
which goes over the data from the start without gradients; and a *look* at some batches, left early
before any optimizer has stepped. (Where no step of an optimizer was ever seen, every such loop
trains.) The next loop begins where they began.

Where a loop has trained everything, the state also keeps whether it had *ended* by the commit. If
so, the next loop is of the next epoch. If the commit was in its last batch, the script comes back
to this epoch, and its loop finds nothing left.

Positions and lengths are samples. No list of indices is ever made.
"""

import sys
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler, get_worker_info

from elastic_driver.arithmetic import Permutation, mix
from elastic_driver.errors import UsageError
from elastic_driver.worker.current import rank_and_size, say
from elastic_driver.worker.positions import (
    BareLoop,
    Counted,
    find_loop,
    optimizer_steps,
    watch_optimizers,
)

__all__ = ["ElasticSampler"]


class _Progress(NamedTuple):
    """Where a sampler is in its data.

    Attributes:
        epoch: the present one.
        position: samples of it that the world has trained.
        replayed: samples of it that were trained twice.
        ended: whether all of it is trained, by a loop that had ended.
        continues: whether the next loop is of this epoch even if nothing is left of it. This is
            not kept by a commit.
    """

    epoch: int = 0
    position: int = 0
    replayed: int = 0
    ended: bool = False
    continues: bool = False

    def is_over(self, samples: int) -> bool:
        """Return whether the next loop is of the next epoch."""
        done = self.ended or (self.position >= samples and not self.continues)
        return done and samples > 0


class _SamplerPass:
    """One loop over the rest of an epoch, by one world."""

    def __init__(self, before: _Progress, start: _Progress, samples: int, loop: BareLoop) -> None:
        self.before = before  # where the sampler was when this loop began
        self.start = start
        self.loop = loop
        self.rank, self.size = rank_and_size()
        self.remaining = samples - start.position
        self.length = -(-self.remaining // self.size)  # of each rank, padding included
        self.usable = self.length  # of these, as many as the loader will hand out
        if loop.drop_last and loop.unit is not None:
            self.usable -= self.length % loop.unit
        self.drawn = 0
        self.trained = 0  # by each rank
        self.counted = 0  # of these, as many as the sampler has counted
        self.seen = (0, 0)  # batches and indices that were drawn by the last commit
        self.steps = optimizer_steps()  # by the last commit
        self.committed = False  # while the loop was in it
        self.recorded = False  # by the script, which knows best
        self.gradients = False  # on when it drew
        self.thread: int | None = None  # that draws

    def received(self) -> int:
        """Return the samples that the loop has received; 0 where that is not known."""
        return min(self.loop.batches() * (self.loop.unit or 0), self.length)

    def has_everything(self) -> bool:
        """Return whether the loop has got all that there is for it.

        What a batch sampler of the script's own has handed on is known at the end only.
        """
        if self.length == 0:
            return True
        if self.loop.unit is None:
            return self.loop.of_loader and self.drawn >= self.length and bool(self.loop.has_ended())
        return self.received() >= self.usable

    def is_evaluation(self) -> bool:
        """Return whether it has trained nothing, once it has ended."""
        fresh = self.start.position == 0 and self.usable > 0
        return fresh and not (self.gradients or self.committed or self.recorded)

    def is_look(self) -> bool:
        """Return whether it was left early, once it has ended, and nothing was trained since."""
        trained = self.committed or self.recorded or optimizer_steps() > self.steps
        return not trained and not self.has_everything()

    def has_ended(self) -> bool:
        """Return whether the loop had ended by a commit that comes now."""
        ended = self.loop.has_ended()
        if ended is None:  # or it is in its last batch
            new = not self.committed and (not self.gradients or self.has_everything())
            return new or self.trained >= self.usable
        return ended

    def disorder(self) -> str:
        """Return why nobody knows which samples the loop has received; "" if it is known."""
        if self.thread not in (None, threading.get_ident()):
            return "another thread fetches batches ahead"
        return self.loop.disorder(self.drawn, self.length)

    def trains(self, count: int) -> None:
        """Record that each rank has trained `count` samples of this loop, from its start."""
        self.trained = max(self.trained, min(count, self.usable))

    def progress(self, trained: int, *, ended: bool, continues: bool) -> _Progress:
        """Return where the sampler is once each rank has trained so many samples of this loop."""
        of_all, start = trained * self.size, self.start
        return _Progress(
            epoch=start.epoch,
            position=start.position + min(of_all, self.remaining),
            replayed=start.replayed + max(0, of_all - self.remaining),
            ended=ended and trained >= self.usable and not continues,
            continues=continues,
        )

    def nothing(self, *, continues: bool) -> _Progress:
        """Return where the sampler is if this loop takes nothing away."""
        return self.before._replace(continues=continues or self.before.continues)


class ElasticSampler(Sampler[int]):  # type: ignore[misc]  # mypy does not follow torch
    """A sampler that trains each sample once, also when workers come and go.

    Each rank yields the same number of samples, so that no rank waits for others at the end of
    an epoch. If they do not divide evenly, the last ones are repeated (`replayed` counts them).

        sampler = elastic.ElasticSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
        state = elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    Iterating again after an epoch is done starts the next one. After a rejoin a loop continues
    with the rest of the epoch of the last commit. After a commit in the last batch nothing is left
    of it: the loop finds no batch. After a commit behind the loop the next epoch begins. A script
    that comes back to the same epoch there names its epochs by `set_epoch`.

    A sampler for validation works in the same way. A loop under `torch.no_grad()` in which no
    commit is made takes nothing away: the next one begins anew. Nor does a look at some batches,
    such as `next(iter(loader))`.

    Args:
        dataset: anything with a length.
        shuffle: whether each epoch has a random order; else it has the order of the data set.
        seed: of all epochs' orders; the same on every worker.
        batch_size: samples that each rank trains from one commit to the next. Needed only where
            the loader is not a torch `DataLoader`, or the loop itself fetches batches ahead.

    Raises `UsageError` for a data set without a length, and for a batch size below 1. `len()` and
    iterating raise it in a process of `elasticrun` that has not joined a world yet.
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int = 0, batch_size: int | None = None
    ) -> None:
        require_length(dataset, type(self).__name__)
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; give the samples of one step, from 1")
        self.samples = len(dataset)
        self.shuffle = shuffle
        self.seed = seed
        self.batch_size = batch_size
        self.counted = Counted()
        self._progress = _Progress()
        self._pass: _SamplerPass | None = None
        self._world = 0  # how many there were
        self._named = False  # the script names its epochs, or was told to
        self._optimized = False  # an optimizer was seen to step, by the last commit
        watch_optimizers()
        self._steps = optimizer_steps()  # when this was made, or loaded

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return self._progress.epoch

    @property
    def position(self) -> int:
        """The samples of this epoch that the world has trained."""
        return self._progress.position

    @property
    def replayed(self) -> int:
        """The samples of this epoch that were trained twice."""
        return self._progress.replayed

    def __iter__(self) -> Iterator[int]:
        """Return this rank's share of the rest of the epoch, or of the next epoch."""
        if get_worker_info() is not None:
            raise UsageError(
                "an ElasticSampler is iterated in a process of a DataLoader, where nobody sees "
                "what is trained; give it to the DataLoader as sampler=, not to its data set"
            )
        before = self._left_behind()
        start = before._replace(ended=False, continues=False)
        if before.is_over(self.samples):
            start = _Progress(before.epoch + 1)
        share = _SamplerPass(before, start, self.samples, find_loop(sys._getframe(1), self))
        self._progress, self._pass = start, share
        draws = self._draw(share, self._world)
        share.loop.draws = weakref.ref(draws)
        return draws

    def _draw(self, share: _SamplerPass, world: int) -> Generator[int, None, None]:
        order = None
        if self.shuffle:
            order = Permutation(self.samples, mix(self.seed, share.start.epoch))
        share.thread = threading.get_ident()
        share.loop.begins()
        for turn in range(share.length):
            if world != self._world:
                raise UsageError(
                    "a loop over an ElasticSampler goes on after the world has changed; make the "
                    "iterator of its loader inside the function decorated with @elastic.run"
                )
            share.gradients = share.gradients or torch.is_grad_enabled()
            offset = (share.rank + turn * share.size) % share.remaining  # wraps into the padding
            position = share.start.position + offset
            share.drawn += 1
            yield order[position] if order is not None else position
        share.loop.exhausted = True

    def __len__(self) -> int:
        """Return the samples of this rank in the loop under way, or in one that starts now.

        It is the length for the present number of workers.
        """
        size = rank_and_size()[1]
        if self._pass is not None and not self._pass.has_ended():
            return self._pass.length
        progress = self._left_behind()
        left = self.samples - (0 if progress.is_over(self.samples) else progress.position)
        return (left + size - 1) // size

    def _left_behind(self) -> _Progress:
        """Return where a loop begins that starts now, without a commit since the one before."""
        share, now = self._pass, self._progress
        if share is None:
            return now
        if share.is_evaluation():
            return share.nothing(continues=now.continues)
        trained = share.trained
        if share.has_everything():
            trained = share.usable
        elif optimizer_steps() > share.steps and not share.recorded and self.batch_size is None:
            trained = max(trained, min(share.received(), share.usable))
        return share.progress(trained, ended=True, continues=now.continues)

    # ---- what the state calls ------------------------------------------------------------

    def advance(self) -> None:
        """Count all samples that the loop has received until now as trained.

        The state calls it at each commit, on every rank. A second call without a batch between
        changes nothing. Raises `UsageError` where nothing tells which samples were trained.
        """
        self._optimized = self._optimized or optimizer_steps() > self._steps
        share = self._pass
        if share is None:
            return  # the loop has used none of this sampler's data since the last commit
        over = share.has_ended()
        if over and (share.is_evaluation() or self._has_looked(share)):
            self._progress = share.nothing(continues=self._progress.continues)
            self._pass = None
            return
        share.trains(self._trained_by_now(share, over))
        share.committed = share.committed or not over
        share.seen = (share.loop.batches(), share.drawn)
        share.steps = optimizer_steps()
        self._move(share, ended=over)
        if self._progress.ended and share.committed and not self._named:
            self._warn(share)

    def _has_looked(self, share: _SamplerPass) -> bool:
        """Return whether a loop that has ended was no training, though it had gradients."""
        known = self._optimized and self.batch_size is None
        return share.is_look() and (known or share.drawn == 0)

    def _trained_by_now(self, share: _SamplerPass, over: bool) -> int:
        """Return the samples of a loop that each rank has trained by a commit that comes now."""
        if share.recorded:
            return share.trained
        if over and share.has_everything():
            return share.usable
        loop = share.loop
        if self.batch_size is not None:
            listed = loop.exhausted and not loop.of_loader  # the loop may have made a list of all
            if share.seen == (loop.batches(), share.drawn) and not listed:
                return share.trained  # no batch since the last commit
            return min(share.trained + self.batch_size, share.drawn)
        if why := share.disorder():
            raise UsageError(
                f"ElasticSampler cannot tell which samples were trained by this commit: {why}; "
                "give DataLoader(batch_size=…) alone, or ElasticSampler(batch_size=…), the "
                "samples that each rank trains from one commit to the next"
            )
        return share.received()

    def _warn(self, share: _SamplerPass) -> None:
        """Say once, on one rank, that this script may come back to an epoch that is over."""
        self._named = True
        if share.rank == 0:
            say(
                f"a commit follows the loop over epoch {self.epoch} of an ElasticSampler; if the "
                f"workers change there, the next loop is of epoch {self.epoch + 1}; a script that "
                "comes back to the same epoch calls sampler.set_epoch(state.epoch) before its loop"
            )

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that batch `batch_idx` of this loop (from 0), of `batch_size` samples, is trained.

        Horovod's samplers need this call. Here it is not needed with a torch `DataLoader`, and
        does no harm.
        """
        if self._pass is not None:
            self._pass.recorded = True
            self._pass.trains((batch_idx + 1) * batch_size)
            self._move(self._pass, ended=False)

    def _move(self, share: _SamplerPass, *, ended: bool) -> None:
        self.counted = Counted(self.counted.samples + share.trained - share.counted)
        share.counted = share.trained
        continues = self._progress.continues
        self._progress = share.progress(share.trained, ended=ended, continues=continues)

    def set_epoch(self, epoch: int) -> None:
        """Train `epoch` from its start; no change if it is the current one, which goes on."""
        self._named = True
        if self._pass is not None and self._pass.has_ended():
            self._progress = self._left_behind()
            self._pass = None
        if epoch == self.epoch:  # the caller counts the epochs, so none begins by itself
            self._progress = self._progress._replace(ended=False, continues=True)
        else:
            self._progress = _Progress(epoch)
            self._pass = None

    def reset(self) -> None:
        """Share the rest among the workers of the new world, from the next iteration on."""
        if self._pass is not None and self._pass.is_evaluation():
            self._progress = self._pass.before
        self._progress = self._progress._replace(continues=True)
        self._pass = None
        self._world += 1
        self._steps = optimizer_steps()

    def state_dict(self) -> dict[str, int]:
        """Return the progress, equal on every rank at a commit: seven numbers."""
        now = self._progress
        return {
            "samples": self.samples,
            "seed": self.seed,
            "epoch": now.epoch,
            "position": now.position,
            "replayed": now.replayed,
            "ended": int(now.ended),
            "optimized": int(self._optimized),
        }

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy gets: it is in no loop."""
        return {**self.__dict__, "_pass": None}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from another sampler's progress.

        Raises `UsageError` if it was made for a data set of another length.
        """
        if state["samples"] != self.samples:
            raise UsageError(
                f"the sampler's state is of a data set of {state['samples']} samples, this one has "
                f"{self.samples}; give every worker the same data, or start without this state"
            )
        self.seed = state["seed"]
        # Earlier versions did not keep these two.
        ended = bool(state.get("ended"))
        self._optimized = bool(state.get("optimized"))
        self._progress = _Progress(state["epoch"], state["position"], state["replayed"], ended)
        self._pass = None
        self.reset()


def require_length(dataset: Any, reader: str) -> None:
    """Raise `UsageError` for a data set without a length."""
    if not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{reader} needs a data set with a length and {type(dataset).__name__} has none; "
            "for streams use ShardedDataset"
        )
