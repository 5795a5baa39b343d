"""Training with a fixed global batch, whatever the number of workers.

The job is written for N virtual workers, each one micro-batch an optimizer step. What a step
trains follows from (seed, epoch, step, virtual worker) alone; the real workers of the moment
share the virtual ones. `FixedBatch` cuts the data into such steps, hands each worker its
micro-batches, and leaves the whole step's gradient in `parameter.grad` on every rank:

    batches = elastic.FixedBatch(dataset, 32, model=model, virtual_workers=8)
    state = elastic.TorchState(model=model, optimizer=optimizer, batches=batches, epoch=0)

    @elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            batches.set_epoch(state.epoch)
            for step in batches:                      # one optimizer step of 8 × 32 samples
                for inputs, labels in step:           # this worker's micro-batches of it
                    loss_function(model(inputs), labels).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()                      # one tick a step, as on one machine
                state.commit()

The model need not be wrapped; what `elastic.wrap` made of it may be called, and is silent then.
FixedBatch communicates once a step, when the inner loop ends, and that is why clipping,
`GradScaler` (`scaler.scale(loss).backward()`, then `unscale_`, `step`, `update` after the inner
loop) and schedulers see what they would see on one machine with the whole batch.

**The gradient** is the mean over the step's *samples*, if the loss is a mean over the micro-batch:
virtual worker v counts with (its samples) / (the step's samples). In a full step that is
the mean over the N micro-batches. The last step of an epoch may be short: its samples are spread
evenly over as few virtual workers as can hold them, and the others have none in that step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_driver import contract
from elastic_driver.batch.microbatches import allocate_microbatches, virtual_ranges
from elastic_driver.errors import UsageError
from elastic_driver.worker.batching.division import Division
from elastic_driver.worker.batching.exact import fix_kernels, seed_everything
from elastic_driver.worker.batching.gradients import ExactSum, PlainSum, StepSum
from elastic_driver.worker.batching.schedule import Schedule, load
from elastic_driver.worker.current import rank_and_size
from elastic_driver.worker.world.wrapping import without_ddp_sync

__all__ = ["BatchState", "FixedBatch", "Step"]


class BatchState(TypedDict):
    """What a commit keeps of a `FixedBatch`."""

    samples: int  # length of the data set
    seed: int
    virtual_workers: int  # 0: not settled yet
    micro_batch_size: int
    epoch: int
    step: int  # steps of this epoch that are trained


class _Round:
    """One iteration over the steps of an epoch, by one world."""

    def __init__(self, batches: FixedBatch) -> None:
        self._batches = batches
        self.rank, size = rank_and_size()
        self.schedule = batches.schedule()
        self.steps = range(batches.step, len(batches))
        self.sums = batches.sums
        self.model = batches.model
        self.division = batches.division
        self.deterministic = batches.deterministic
        self._share(batches.shares_of(self.rank, size), batches.step)

    def _share(self, shares: Sequence[int], first: int) -> None:
        """Train by these shares from step `first` on."""
        self.ranges = virtual_ranges(shares)
        self.mine = self.ranges[self.rank]
        self.loader = load(
            self._batches.dataset,
            self.schedule,
            range(first, self.steps.stop),
            self.mine,
            seeded=self.deterministic,
            options=self._batches.loader_options,
        )

    def begin(self, step: Step) -> None:
        """All ranks begin this step."""
        if self.division is not None:
            self.division.begin(step.number, self.sums.device)
        self.sums.begin(self.ranges, step.weights, self.rank)

    def finish(self, step: Step) -> None:
        """Collective: sum the gradients; the next step may have other shares."""
        self.sums.finish()
        shares = self.division.finish() if self.division is not None else None
        if shares is not None and step.number + 1 in self.steps:
            self._share(shares, step.number + 1)

    def seed(self, step: int, virtual_worker: int) -> None:
        """In deterministic mode: what chance does next depends on this micro-batch alone."""
        if self.deterministic:
            seed_everything(self.schedule.seed, self.schedule.epoch, step, virtual_worker)

    def abandon(self, step: Step) -> None:
        """Undo what a half-done step did to the model, unless training has gone on since."""
        if self._batches.current is step:
            self.sums.abandon()


class Step:
    """One optimizer step of the fixed global batch; iterate it once for this worker's part.

    Attributes:
        epoch, number: which step of which epoch, from 0.
        samples: samples of the whole step, over all workers.
        weights: what part of them each virtual worker has; only those that have any.
        summed: whether the gradients are in place, which is when the inner loop has ended.
    """

    def __init__(self, turn: _Round, number: int) -> None:
        counts = turn.schedule.counts(number)
        self.epoch, self.number = turn.schedule.epoch, number
        self.samples = sum(counts)
        self.summed = False
        self._turn = turn
        self.weights = [count / self.samples for count in counts if count]  # by virtual worker
        self._mine = [v for v in turn.mine if counts[v]]
        self._begun = False

    def __len__(self) -> int:
        """Micro-batches of this worker in this step; 0 for a standby."""
        return len(self._mine)

    def __iter__(self) -> Iterator[Any]:
        """Each micro-batch as the collate function made it; call `backward()` once for each.

        Asking for more after the last one sums the gradients, which every rank takes part in.
        """
        if self._begun:
            raise UsageError(f"{self} was iterated twice; it can be trained only once")
        self._begun = True
        self._turn.begin(self)
        try:
            with without_ddp_sync(self._turn.model):
                yield from self._micro_batches(self._turn.sums)
            self._turn.finish(self)
        except BaseException:  # a broken world, or the loop was left
            self._turn.abandon(self)
            raise
        self._turn.seed(self.number, len(self._turn.schedule.counts(self.number)))
        self.summed = True

    def _micro_batches(self, sums: StepSum) -> Iterator[Any]:
        for virtual_worker in self._mine:
            micro_batch = next(self._turn.loader)
            self._turn.seed(self.number, virtual_worker)
            sums.before(virtual_worker)
            yield micro_batch
            sums.after(virtual_worker)

    def require_summed(self, what: str) -> None:
        """Raise `UsageError` naming `what` was done before the inner loop had ended."""
        if not self.summed:
            raise UsageError(
                f"{what} before the gradients of {self} were summed; "
                "run `for micro_batch in step:` to its end first, without break"
            )

    def __str__(self) -> str:
        return f"step {self.number} of epoch {self.epoch}"


class FixedBatch:
    """Iterates a data set in optimizer steps of virtual_workers × micro_batch_size samples.

    Every rank makes the same number of steps, so nobody waits at the end of an epoch. Progress is
    the number of steps trained: it moves when the optimizer steps, and resumes in the middle
    of an epoch with any other number of workers. Iterating again after an epoch is done starts the
    next; after a rejoin it goes on with what is left of the current one, be it nothing.

    Each step starts without gradients; `zero_grad()` may be called but need not be.

    Args:
        dataset: map-style data set.
        micro_batch_size: samples of one virtual worker in one step.
        model: the module to train, not what `elastic.wrap` made of it; that may be called in the
            loop all the same. (A DistributedDataParallel made by hand may not.)
        virtual_workers: N; None takes the job's `--virtual-workers`, and outside of a job the
            number of workers when training starts.
        seed, shuffle: the order of each epoch; the same on every worker.
        drop_last: leave out the short last step of an epoch.
        deterministic: weights, buffers and optimizer state come out with the same bits for
            every number of workers and every history of failures. Chance is seeded per
            micro-batch, kernels are deterministic ones, gradients are added in a fixed order.
            Costs about log₂ N copies of the gradients.
        threads: intra-op threads in deterministic mode; the bits depend on them, so they are
            not left to the machine.
        shares: micro-batches of each rank from (N, number of workers), equal on every rank.
        balance: let the driver share them instead, by what they cost each rank; it may move some
            after any step. None: as the job says (`--balance`).
        collate_fn, num_workers, **loader: as for `torch.utils.data.DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        micro_batch_size: int,
        *,
        model: nn.Module,
        virtual_workers: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        deterministic: bool = False,
        threads: int = 1,
        shares: Callable[[int, int], list[int]] = allocate_microbatches,
        balance: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **loader: Any,
    ) -> None:
        _check(dataset, micro_batch_size, model)
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.deterministic = deterministic
        self.shares = shares
        balanced = os.environ.get(contract.BALANCE) == "1" if balance is None else balance
        self.division = Division() if balanced else None
        self.loader_options = {"collate_fn": collate_fn, "num_workers": num_workers, **loader}
        self.model = model
        self.sums: StepSum = ExactSum(model) if deterministic else PlainSum(model)
        self.epoch = 0
        self.step = 0
        self.current: Step | None = None  # the one in training
        self._named = virtual_workers if virtual_workers is not None else _from_environment()
        if self._named is not None:
            allocate_microbatches(self._named, 1)  # raises where it is no count
        self._virtual_workers = self._named
        self._rejoined = False
        if deterministic:
            fix_kernels(threads)

    @property
    def virtual_workers(self) -> int:
        """N: how many micro-batches a full step has; settled when training starts."""
        return self._virtual_workers or rank_and_size()[1]

    def shares_of(self, rank: int, size: int) -> list[int]:
        """Micro-batches of each rank as this one, of `size`, begins to train."""
        if self.division is not None:
            return self.division.enter(rank, size, self.virtual_workers)
        return self.shares(self.virtual_workers, size)

    def schedule(self) -> Schedule:
        """Which samples the steps of the current epoch are made of."""
        return Schedule(
            samples=len(self.dataset),
            virtual_workers=self.virtual_workers,
            micro_batch_size=self.micro_batch_size,
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=self.epoch,
        )

    def __len__(self) -> int:
        """Optimizer steps of one epoch."""
        whole, rest = divmod(len(self.dataset), self.virtual_workers * self.micro_batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def __iter__(self) -> Iterator[Step]:
        """The steps left in this epoch (of the next one, if this one is done)."""
        if self.step >= len(self) and not self._rejoined:
            self._start(self.epoch + 1)
        self._rejoined = False
        self._virtual_workers = self.virtual_workers
        turn = _Round(self)
        for number in turn.steps:
            step = self.current = Step(turn, number)
            yield step
            step.require_summed("the loop went on")
            self.step = number + 1  # also where a GradScaler skipped the optimizer's step

    def advance(self) -> None:
        """The optimizer has stepped: the current step is trained.

        Called by the state after each optimizer step, on every rank; harmless to repeat.
        Raises `UsageError` inside the loop over a step's micro-batches.
        """
        if self.current is not None:
            self.current.require_summed("the optimizer stepped")
            self.step = self.current.number + 1

    def set_epoch(self, epoch: int) -> None:
        """Train `epoch` from its start; no change if it is the current one, which goes on."""
        if epoch != self.epoch:
            self._start(epoch)
        else:
            self._rejoined = True  # the caller counts the epochs: none is to begin by itself

    def _start(self, epoch: int) -> None:
        self.epoch, self.step = epoch, 0
        self.reset()

    def reset(self) -> None:
        """The world has changed: the next iteration shares what is left among its workers."""
        self.current, self._rejoined = None, True

    def state_dict(self) -> BatchState:
        """The progress, equal on every rank at a step boundary: six numbers."""
        return BatchState(
            samples=len(self.dataset),
            seed=self.seed,
            virtual_workers=self._virtual_workers or 0,
            micro_batch_size=self.micro_batch_size,
            epoch=self.epoch,
            step=self.step,
        )

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from another worker's progress.

        Raises `UsageError` where the steps would not be the same: other data, other sizes.
        """
        own = {"samples": len(self.dataset), "micro_batch_size": self.micro_batch_size}
        if self._named is not None:
            own["virtual_workers"] = self._named
        for name, value in own.items():
            if state[name] != value:
                raise UsageError(
                    f"the saved progress has {name}={state[name]}, this script {value}; "
                    "its steps would be others: use the same, or start without this state"
                )
        self.seed = state["seed"]
        self._virtual_workers = state["virtual_workers"] or None
        self.epoch, self.step = state["epoch"], state["step"]
        self.reset()


def _from_environment() -> int | None:
    """`--virtual-workers` as the job gives it to its workers."""
    text = os.environ.get(contract.VIRTUAL_WORKERS, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{contract.VIRTUAL_WORKERS}={text!r} is not a whole number")
    return int(text)


def _check(dataset: Any, micro_batch_size: int, model: Any) -> None:
    """Refuse what would fail later and less clearly."""
    if not hasattr(dataset, "__len__"):
        raise UsageError(
            f"FixedBatch needs a data set with a length and {type(dataset).__name__} has none; "
            "for streams use ShardedDataset"
        )
    if micro_batch_size < 1:
        raise UsageError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
    if isinstance(model, DistributedDataParallel):
        raise UsageError(
            "FixedBatch sums the gradients itself; give it the model without "
            "DistributedDataParallel (model.module) and call that one in the loop"
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; give the torch module to train")
