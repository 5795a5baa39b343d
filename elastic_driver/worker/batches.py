"""Training with a fixed global batch, whatever the number of workers.

The job is written for N virtual workers; each trains one micro-batch in an optimizer step. The
samples of a step follow from (seed, epoch, step, virtual worker) alone, and the real workers of the
moment share the virtual ones. `FixedBatch` cuts the data into such steps, hands each worker its
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

The model need not be wrapped. The result of `elastic.wrap(model)` may be called too; it does not
communicate then. FixedBatch communicates once a step, when the inner loop ends. So clipping,
`GradScaler` (`scaler.scale(loss).backward()`, then `unscale_`, `step`, `update` after the inner
loop) and schedulers see the same as on one machine with the whole batch.

**The gradient** is the mean over the step's *samples*, if the loss is a mean over the micro-batch:
virtual worker v has the weight (its samples) / (the step's samples). In a full step that is
the mean over the N micro-batches. The last step of an epoch may be short: its samples are spread
evenly over as few virtual workers as can hold them, and the others have none in that step.

**The samples** of a micro-batch follow from (seed, epoch, step, virtual worker) alone; it makes no
difference which worker fetches it, and how far ahead. In deterministic mode random numbers follow
from the same: the model's (dropout) and the data set's (augmentation, collating), in any loader
process. Python's, NumPy's and torch's global generators are seeded; NumPy's only where the script
has loaded it. The same bits further need the same kernels: the same build of torch, kind of device,
and number of intra-op threads. `fix_kernels` sets all that can be set from here.

**The shares.** With `--balance` the driver moves work away from slow ranks
(`features.stragglers.balance`) and publishes the new shares. Ranks would read them at different
steps, so only rank 0 reads them. Every few steps it broadcasts the newest shares; the broadcast
begins with the step and ends with its gradients. The received shares hold from the next step on. If
a rank is lost meanwhile, the step itself fails on all ranks, and the next world begins with equal
shares. The broadcast uses torch's default group, like the gradients, and costs the training thread
a tenth of a millisecond in every fourth step.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Dataset

from elastic_driver import contract
from elastic_driver.arithmetic import (
    Permutation,
    allocate_microbatches,
    mix,
    sample_counts,
    virtual_ranges,
)
from elastic_driver.errors import UsageError
from elastic_driver.words import orders as documents
from elastic_driver.words.progress import Division
from elastic_driver.worker import current
from elastic_driver.worker.batching.gradients import ExactSum, PlainSum, StepSum
from elastic_driver.worker.current import rank_and_size
from elastic_driver.worker.heartbeat.training_progress import TrainingProgress
from elastic_driver.worker.positions import Counted
from elastic_driver.worker.sampler import require_length
from elastic_driver.worker.state_sync.contents import accelerator_in_use
from elastic_driver.worker.state_sync.part import trained_by
from elastic_driver.worker.world import session
from elastic_driver.worker.world.wrapping import without_ddp_sync

__all__ = ["FixedBatch", "Step"]


class _BatchPass:
    """One iteration over the steps of an epoch, by one world."""

    def __init__(self, batches: "FixedBatch") -> None:
        self.batches, self.sums = batches, batches.sums
        self.rank, size = rank_and_size()
        count = batches.virtual_workers
        samples = len(batches.dataset)
        micro = batches.micro_batch_size
        order = batches.shuffle, batches.seed, batches.epoch
        self.plan = EpochPlan(samples, count, micro, *order)
        self.steps = range(batches.step, len(batches))
        given = self.balanced = batches.balanced_shares
        shares = given.enter(self.rank, size, count) if given else batches.shares(count, size)
        self.sums.restart()
        self.use(shares, batches.step)

    def use(self, shares: Sequence[int], first: int) -> None:
        """Train by these shares from step `first` on; nothing draws from the global generators."""
        plan, deterministic = self.plan, self.batches.deterministic
        self.ranges = virtual_ranges(shares)
        self.mine = self.ranges[self.rank]
        generator = torch.Generator()
        generator.manual_seed(mix(plan.seed, plan.epoch, first, self.mine.start) >> 1)
        micro_batches = plan.micro_batches(range(first, self.steps.stop), self.mine)
        dataset = self.batches.dataset
        loader = DataLoader(
            SeededData(dataset) if deterministic else dataset,
            batch_sampler=micro_batches if deterministic else (batch for _, batch in micro_batches),
            generator=generator,
            **self.batches.loader_options,
        )
        self.loader = iter(loader)

    def finish(self, step: "Step") -> None:
        """Collective: sum the gradients; the next step may have other shares."""
        self.sums.finish()
        shares = self.balanced.finish() if self.balanced is not None else None
        if shares is not None and step.number + 1 in self.steps:
            self.use(shares, step.number + 1)

    def seed(self, step: int, virtual_worker: int) -> None:
        """In deterministic mode, seed all random generators from this micro-batch alone."""
        if self.batches.deterministic:
            seed_everything(self.plan.seed, self.plan.epoch, step, virtual_worker)


class Step:
    """One optimizer step of the fixed global batch; iterate it once for this worker's part.

    Attributes:
        epoch, number: number of the epoch, and of the step in it, from 0.
        samples: samples of the whole step, over all workers.
        weights: fraction of the samples of each virtual worker that has any in this step.
        summed: whether the gradients are in place; true once the inner loop has ended.
    """

    def __init__(self, batch_pass: _BatchPass, number: int) -> None:
        counts = batch_pass.plan.counts(number)
        self.epoch, self.number = batch_pass.plan.epoch, number
        self.samples = sum(counts)
        self.summed = self._begun = False
        self.weights = [count / self.samples for count in counts if count]
        self._pass = batch_pass
        self._mine = [v for v in batch_pass.mine if counts[v]]
        self._samples = sum(counts[v] for v in self._mine)

    def __len__(self) -> int:
        """Return the number of this worker's micro-batches in this step; 0 for a standby."""
        return len(self._mine)

    def __iter__(self) -> Iterator[Any]:
        """Yield each micro-batch as the collate function made it; call `backward()` once for each.

        Asking for more after the last one sums the gradients; every rank takes part in that.
        """
        if self._begun:
            raise UsageError(f"{self} was iterated twice; it can be trained only once")
        self._begun = True
        turn, sums = self._pass, self._pass.sums
        if turn.balanced is not None:
            turn.balanced.begin(self.number, sums.device)
        sums.begin(turn.ranges, self.weights, turn.rank, str(self))
        waited = 0.0
        try:
            with without_ddp_sync(turn.batches.model), self._optimizers_wait():
                for virtual_worker in self._mine:
                    began = time.perf_counter()
                    micro_batch = next(turn.loader)
                    waited += time.perf_counter() - began
                    turn.seed(self.number, virtual_worker)
                    sums.before(virtual_worker)
                    yield micro_batch
                    sums.after(virtual_worker)
            turn.finish(self)
        except BaseException:  # the world broke, or the script left the loop
            if turn.batches.current is self:  # else training has already continued
                sums.abandon()
            raise
        turn.seed(self.number, turn.plan.virtual_workers)  # until the next step
        self.summed = True
        before = turn.batches.counted
        turn.batches.counted = Counted(before.samples + self._samples, before.waited + waited)

    @property
    def begun(self) -> bool:
        """Whether the inner loop has begun; it may have ended since."""
        return self._begun

    def require_summed(self, what: str) -> None:
        """Raise `UsageError` if the inner loop has not ended; `what` was done too early."""
        if not self.summed:
            raise UsageError(
                f"{what} before the gradients of {self} were summed; "
                "run `for micro_batch in step:` to its end first, without break"
            )

    @contextmanager
    def _optimizers_wait(self) -> Iterator[None]:
        """Refuse steps of optimizers that would use the gradients of this step too early."""

        def refuse(optimizer: Optimizer, *_: object) -> None:
            subject = self._pass.sums.subject
            if self._pass.batches.current is self and subject.trains_any(trained_by(optimizer)):
                self.require_summed("the optimizer stepped")

        hook = register_optimizer_step_pre_hook(refuse)
        try:
            yield
        finally:
            hook.remove()

    def __str__(self) -> str:
        return f"step {self.number} of epoch {self.epoch}"


class FixedBatch:
    """Iterates a data set in optimizer steps of virtual_workers × micro_batch_size samples.

    Every rank makes the same number of steps, so no rank waits at the end of an epoch. Progress is
    the number of steps trained: it moves when the state is committed, and training resumes in the
    middle of an epoch with any other number of workers. Iterating again after an epoch is done
    starts the next one. After a rejoin it continues with the rest of the current epoch, even
    if no step is left.

    Each step starts without gradients; `zero_grad()` may be called but need not be.

    Args:
        dataset: map-style data set.
        micro_batch_size: samples of one virtual worker in one step.
        model: the module to train, not the result of `elastic.wrap`; that may be called in the
            loop, while a DistributedDataParallel made by hand may not.
        virtual_workers: N, the micro-batches of a full step. None takes the job's
            `--virtual-workers`, and outside of a job the number of workers when training starts.
        shuffle: train each epoch in another order, the same on every worker.
        seed: of that order.
        drop_last: leave out the short last step of an epoch.
        deterministic: give weights, buffers and optimizer state the same bits for every number of
            workers and every history of failures. Random generators are seeded for each
            micro-batch, kernels are deterministic, gradients are added in a fixed order. Costs
            memory for about log₂ N copies of the gradients.
        threads: intra-op threads in deterministic mode. The bits depend on them, so they do not
            depend on the machine.
        shares: returns the micro-batches of each rank from (N, number of workers); the same on
            every rank.
        balance: let the driver share the micro-batches instead, by the time they take on each
            rank; it may move some after any step. None: as the job says (`--balance`).
        collate_fn: as for `torch.utils.data.DataLoader`.
        num_workers: as for `torch.utils.data.DataLoader`.
        **loader: more arguments of `torch.utils.data.DataLoader`.

    Raises `UsageError` for a data set without a length, a model that is no plain module, and counts
    below 1.
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
        self.model = model
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.deterministic, self.shares = deterministic, shares
        balanced = os.environ.get(contract.BALANCE) == "1" if balance is None else balance
        self.balanced_shares = BalancedShares() if balanced else None
        self.loader_options = {"collate_fn": collate_fn, "num_workers": num_workers, **loader}
        self.sums: StepSum = ExactSum(model) if deterministic else PlainSum(model)
        self.epoch = self.step = 0
        self.counted = Counted()
        self.current: Step | None = None  # the step in training
        text = os.environ.get(contract.VIRTUAL_WORKERS, "")
        if virtual_workers is None and text:
            if not text.isascii() or not text.isdigit():
                raise UsageError(f"{contract.VIRTUAL_WORKERS}={text!r} is not a whole number")
            virtual_workers = int(text)
        if virtual_workers is not None:
            allocate_microbatches(virtual_workers, 1)  # raises where it is no count
        self._named = self._virtual_workers = virtual_workers
        self._rejoined = False
        if deterministic:
            fix_kernels(threads)

    @property
    def virtual_workers(self) -> int:
        """N, the micro-batches of a full step; fixed when training starts."""
        return self._virtual_workers or rank_and_size()[1]

    def __len__(self) -> int:
        """Return the number of optimizer steps of one epoch."""
        whole, rest = divmod(len(self.dataset), self.virtual_workers * self.micro_batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps left in this epoch, or all steps of the next one if this one is done."""
        if self.step >= len(self) and not self._rejoined:
            self._start(self.epoch + 1)
        self._rejoined = False
        self._virtual_workers = self.virtual_workers
        batch_pass = _BatchPass(self)
        for number in batch_pass.steps:
            step = self.current = Step(batch_pass, number)
            yield step
            step.require_summed("the loop went on")
            self.step = number + 1  # also where a GradScaler skipped the optimizer's step

    def advance(self) -> None:
        """Count the current step as trained, whether or not an optimizer has used its gradient.

        The state calls it at each commit, on every rank. A second call changes nothing, nor does
        one before the loop over the step's micro-batches begins: then the step is still to be
        trained. Raises `UsageError` inside of that loop, and where it was left before its end.
        """
        if self.current is not None and self.current.begun:
            self.current.require_summed("the state was committed")
            self.step = self.current.number + 1

    def trained_by(self, parameters: Sequence[torch.Tensor]) -> None:
        """Sum the gradients of these parameters, too, from the next step on.

        The state calls it with all parameters that its optimizers train, in the same order on every
        rank, when it is synchronized and whenever they change. Those of the model are summed
        anyway, and those in the model of another `FixedBatch` by that one.
        """
        self.sums.subject.given = list(parameters)

    def set_epoch(self, epoch: int) -> None:
        """Train `epoch` from its start; no change if it is the current one, which goes on."""
        if epoch != self.epoch:
            self._start(epoch)
        else:
            self._rejoined = True  # the caller counts the epochs, so none begins by itself

    def _start(self, epoch: int) -> None:
        self.epoch, self.step = epoch, 0
        self.reset()

    def reset(self) -> None:
        """Share the rest among the workers of the new world, from the next iteration on."""
        self.current, self._rejoined = None, True

    def state_dict(self) -> dict[str, int]:
        """Return the progress, equal on every rank at a step boundary: six numbers."""
        return {
            "samples": len(self.dataset),
            "seed": self.seed,
            "virtual_workers": self._virtual_workers or 0,  # 0: not known yet
            "micro_batch_size": self.micro_batch_size,
            "epoch": self.epoch,
            "step": self.step,  # steps of this epoch that are trained
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from another worker's progress.

        Raises `UsageError` where the steps would not be the same: other data, other sizes.
        """
        own = {"samples": len(self.dataset), "micro_batch_size": self.micro_batch_size}
        if self._named is not None:
            own["virtual_workers"] = self._named
        for name, value in own.items():
            if state[name] != value:
                raise UsageError(
                    f"the saved progress has {name}={state[name]}, this script {value}; "
                    "its steps would differ: use the same, or start without this state"
                )
        self.seed = state["seed"]
        self._virtual_workers = state["virtual_workers"] or None
        self.epoch, self.step = state["epoch"], state["step"]
        self.reset()


def _check(dataset: Any, micro_batch_size: int, model: Any) -> None:
    """Raise `UsageError` for arguments that would fail later and less clearly."""
    require_length(dataset, "FixedBatch")
    if micro_batch_size < 1:
        raise UsageError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
    if isinstance(model, DistributedDataParallel):
        raise UsageError(
            "FixedBatch sums the gradients itself; give it the model without "
            "DistributedDataParallel (model.module) and call that one in the loop"
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; give the torch module to train")


# ---- the micro-batches of an epoch -----------------------------------------------------

_AHEAD = 4096  # samples whose positions are shuffled together
_DATA = 1  # makes the data set's randomness differ from the model's

# (seed, epoch, step, virtual worker) of a micro-batch.
Identity = tuple[int, int, int, int]


class EpochPlan(Struct, frozen=True):
    """An epoch cut into steps, and steps into micro-batches. Counts are samples."""

    samples: int
    virtual_workers: int
    micro_batch_size: int
    shuffle: bool
    seed: int
    epoch: int

    def counts(self, step: int) -> list[int]:
        """Return the samples of each virtual worker in this step."""
        batch = self.virtual_workers * self.micro_batch_size
        left = self.samples - step * batch
        return sample_counts(min(batch, left), self.virtual_workers, self.micro_batch_size)

    def micro_batches(self, steps: range, mine: range) -> Iterator[tuple[Identity, list[int]]]:
        """Yield identity and indices of every non-empty micro-batch of virtual workers `mine`."""
        order = Permutation(self.samples, mix(self.seed, self.epoch)) if self.shuffle else None
        spans = self._spans(steps, mine)
        while ahead := list(islice(spans, max(1, _AHEAD // self.micro_batch_size))):
            positions = [position for _, span in ahead for position in span]
            indices = iter(positions if order is None else shuffled(order, positions))
            for identity, span in ahead:
                yield identity, list(islice(indices, len(span)))

    def _spans(self, steps: range, mine: range) -> Iterator[tuple[Identity, range]]:
        """Yield identity and positions in the epoch's order of each of these micro-batches."""
        for step in steps:
            counts = self.counts(step)
            start = step * self.virtual_workers * self.micro_batch_size + sum(counts[: mine.start])
            for virtual_worker in mine:
                positions = range(start, start + counts[virtual_worker])
                start = positions.stop
                if positions:
                    yield (self.seed, self.epoch, step, virtual_worker), positions


def shuffled(order: Permutation, positions: Sequence[int]) -> list[int]:
    """Return `[order[p] for p in positions]`, with NumPy at a tenth of the cost."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return [order[position] for position in positions]
    found = order.encipher(numpy.array(positions, dtype=numpy.uint64))
    while (outside := found >= order.size).any():
        found[outside] = order.encipher(found[outside])
    values: list[int] = found.tolist()
    return values


class SeededData(Dataset[Any]):  # type: ignore[misc]  # mypy does not follow torch
    """A data set whose random augmentations depend on the micro-batch alone."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, micro_batch: tuple[Identity, list[int]]) -> Any:
        """Fetch the samples of one micro-batch, which then is collated under its seed too."""
        identity, indices = micro_batch
        seed_everything(_DATA, *identity)
        fetch = getattr(self._dataset, "__getitems__", None)
        if fetch is not None:
            return fetch(indices)
        return [self._dataset[index] for index in indices]


# ---- deterministic mode ------------------------------------------------------------------


def fix_kernels(threads: int) -> None:
    """Let torch use deterministic kernels only, on this many intra-op threads.

    An operation without a deterministic kernel then raises torch's own error, which names it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    # Would fill every new tensor before it is written to, and matters only to scripts that read
    # memory they never wrote: https://docs.pytorch.org/docs/stable/deterministic.html
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(threads)


def seed_everything(*identity: int) -> None:
    """Seed all global generators of this process from whole numbers."""
    seed = mix(*identity)
    random.seed(seed)
    # Not torch.manual_seed: for each kind of device that was not used yet it formats a traceback,
    # to seed it later, which costs more than a small micro-batch.
    torch.default_generator.manual_seed(seed)
    if (device := accelerator_in_use()) is not None:
        getattr(device, "manual_seed_all", device.manual_seed)(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed & 0xFFFFFFFF)


# ---- the shares of the ranks, where the driver balances them ---------------------------

EVERY = 4  # steps from one broadcast to the next


class BalancedShares:
    """The shares in force in the world of this process, the same on every rank.

    Args:
        newest: returns the newest shares of the driver; by default from the heartbeat.
        every: steps from one broadcast to the next, the same on every rank.
    """

    def __init__(
        self, newest: Callable[[], documents.Allocation | None] | None = None, every: int = EVERY
    ) -> None:
        self._progress = TrainingProgress()  # the membership's, once this process is in a world
        self._newest, self._every = newest or (lambda: self._progress.allocation), every
        self._world = (-1, 0, 0)  # round, number of ranks, virtual workers
        self._shares: list[int] = []
        self._rank = 0
        self._sent: tuple[torch.Tensor, Any] | None = None  # a pending broadcast

    def enter(self, rank: int, size: int, virtual_workers: int) -> list[int]:
        """Return the current shares by rank; in a new world all ranks have equal shares."""
        round_id = current.round_id() if current.is_initialized() else 0
        world = (round_id, size, virtual_workers)
        if world != self._world:
            self._world = world
            self._shares = allocate_microbatches(virtual_workers, size)
        self._rank, self._sent = rank, None
        if (member := session.membership()) is not None:
            self._progress = member.progress
        self._report()
        return self._shares

    def begin(self, step: int, device: torch.device) -> None:
        """Begin step number `step`. Collective, by all ranks in the same steps."""
        if step % self._every == 0 and len(self._shares) > 1:
            shares = self._next_shares() if self._rank == 0 else None
            message = torch.tensor([0] * len(self._shares) if shares is None else shares)
            message = message.to(device)
            self._sent = message, dist.broadcast(message, 0, async_op=True)

    def finish(self) -> list[int] | None:
        """End a step; return the shares from the next step on, None where they stay as they are."""
        if self._sent is None:
            return None
        message, work = self._sent
        self._sent = None
        work.wait()
        shares: list[int] = message.tolist()
        if not any(shares):
            return None
        self._shares = shares
        self._report()
        return shares

    def _next_shares(self) -> list[int] | None:
        """Return the driver's shares if they are new and made for this world and batch."""
        given = self._newest()
        if given is None:
            return None
        round_id, size, virtual_workers = self._world
        shares = list(given.shares)
        fits = given.round == round_id and len(shares) == size and min(shares) >= 0
        new = sum(shares) == virtual_workers and shares != self._shares
        return shares if fits and new else None

    def _report(self) -> None:
        """Have the heartbeat report this rank's share and, on rank 0, fetch new shares."""
        share = Division(self._world[2], self._shares[self._rank])
        self._progress.division, self._progress.wants_allocations = share, self._rank == 0
