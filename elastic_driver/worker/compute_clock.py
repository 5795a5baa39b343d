"""Measures the steps of this rank: their cost without the time it waits for others, and samples.

In a synchronous step all ranks finish together, so step times do not show who is slow; each rank's
own part does. A step runs from one commit to the next. The waiting is inside `backward()`, where
DistributedDataParallel sums at the end, or between `backward()` and `optimizer.step()`, where
`FixedBatch` and hand-written all-reduces do:

    commit ─ data, forward, backward ─ [waiting] ─ optimizer.step() … commit
           └────────── / passes ───┘             └──────── + ───────┘

The cost is that of one forward-backward pass plus that of the optimizer, so ranks with different
numbers of micro-batches compare. The autograd engine tells the end of a pass: a hook on one
parameter queues a callback. Callbacks run in order, ours before the one in which
DistributedDataParallel waits, because that one is queued when the last gradient is there.

The exchange of gradients also computes, during the waiting. That is measured as the CPU time of
this process during the wait, and `StepSamples` scales it by the slowdown.

The `StepMeter` of a state owns a clock and asks it at each commit. The clock does not see work
between `backward()` and `optimizer.step()`, and any other wait of the script (then no rank stands
out). Parameters on a GPU need a `DeviceClock`; on any other device nothing is measured. A clock
costs a few microseconds a step and sends no message. Times are seconds.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from msgspec import Struct
from torch.nn import Module
from torch.optim import Optimizer

from elastic_driver.worker.heartbeat.training_progress import StepCost, StepTiming, TrainingProgress
from elastic_driver.worker.positions import Counted, CountsSamples, count_parameters, division_of
from elastic_driver.worker.state_sync.part import trained_by
from elastic_driver.worker.state_sync.steps import remove_hooks, weakly
from elastic_driver.worker.torch_seams import calls_hooks, when_backward_ends


class _Step(Struct):
    """The moments of one step; None: not known."""

    began: Any = None
    waits: list[list[Any]] = []  # of each pass: its gradients were there, and its wait was over
    waiting: bool = False  # the optimizer has not followed the last pass yet
    stepped: Any = None  # the optimizer began
    ended: Any = None


class ComputeClock:
    """Measures the steps of the training thread that owns it."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []  # on the script's objects, which outlive this clock
        weakref.finalize(self, remove_hooks, self._hooks)
        self._step = _Step()
        self._finished = _Step()

    @staticmethod
    def times(device: torch.device) -> bool:
        """Return whether this clock is for work on this device."""
        return bool(device.type == "cpu")

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow these optimizers' parameters from now on."""
        remove_hooks(self._hooks)
        self.restart()
        pass_begins = weakly(self.pass_begins)
        optimizer_begins = weakly(self.optimizer_begins)
        for optimizer in optimizers:
            trained = [p for p in trained_by(optimizer) if p.requires_grad]
            if trained and self.times(trained[-1].device):  # usually nearest to the loss
                self._hooks.append(trained[-1].register_post_accumulate_grad_hook(pass_begins))
                if (stepped := _with_hooks(optimizer)) is not None:
                    self._hooks.append(stepped.register_step_pre_hook(optimizer_begins))

    def restart(self) -> None:
        """Drop the current step: its cost would not compare with that of others."""
        self._step = _Step()
        self._finished = _Step()

    def finish_step(self) -> Callable[[], StepCost | None]:
        """End the step and begin the next; return a function that computes its cost.

        Any thread may call it, later: a commit does not wait for the sum. The cost is None where it
        is not known: for the first step after `restart`, without `backward()` or
        `optimizer.step()`, and where the watched parameters got no gradient.
        """
        step = self._step
        now = self._moment()
        self._step = _Step(now)
        step.ended = now
        return partial(self._cost, step)

    def _cost(self, step: _Step) -> StepCost | None:
        if not step.waits or step.began is None or step.stepped is None or step.ended is None:
            return None
        waited = exchanged = 0.0
        for ready, over in step.waits:
            if ready is None or over is None:
                return None
            seconds, cpu = self._between(ready, over)
            waited, exchanged = waited + seconds, exchanged + cpu
        passes = max(self._between(step.began, step.stepped)[0] - waited, 0.0)
        one_pass = passes / len(step.waits)
        optimizer = self._between(step.stepped, step.ended)[0]
        exchanged = min(exchanged, waited)
        return StepCost(one_pass + optimizer, one_pass, exchanged, passes + optimizer, waited)

    def _moment(self) -> Any:
        """Return this moment: the clock's, and the CPU time of all threads of this process."""
        return time.perf_counter(), time.process_time()

    def _between(self, since: Any, until: Any) -> tuple[float, float]:
        """Return the seconds and the CPU seconds between two moments."""
        return until[0] - since[0], until[1] - since[1]

    def pass_begins(self, _parameter: torch.Tensor) -> None:
        """Record that a backward pass has reached the first layers; called in the pass."""
        when_backward_ends(self._gradients_ready)

    def _gradients_ready(self) -> None:
        now = self._moment()
        self._step.waits.append([now, now])
        self._step.waiting = True
        when_backward_ends(self._pass_returns)  # behind the callbacks that wait at its end

    def _pass_returns(self) -> None:
        self._step.waits[-1][1] = self._moment()

    def optimizer_begins(self, *_: object) -> None:
        """Record that an optimizer begins its step."""
        step = self._step
        if step.waiting:
            step.waiting = False
            step.stepped = step.waits[-1][1] = self._moment()


class DeviceClock(ComputeClock):
    """`ComputeClock` for parameters on a GPU; `finish_step` returns the cost of the step before."""

    @staticmethod
    def times(device: torch.device) -> bool:
        """Return whether this clock is for work on this device."""
        return bool(device.type != "cpu")

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """See `ComputeClock.watch`; of several GPUs the first one's stream counts."""
        super().watch(optimizers)
        devices = (p.device for each in optimizers for p in trained_by(each))
        self._device = next((d for d in devices if self.times(d)), None)

    def finish_step(self) -> Callable[[], StepCost | None]:
        """See `ComputeClock.finish_step`; it is the step before that has a cost now.

        The cost is None where the device has not ended that step.
        """
        step = self._step
        now = self._moment()
        self._step = _Step(now)
        step.ended = now
        before, self._finished = self._finished, step
        known = before.ended is not None and before.ended.query()
        cost = self._cost(before) if known else None
        return lambda: cost

    def _moment(self) -> Any:
        """Return an event of now in the stream that trains; None while a graph is captured."""
        module = torch.get_device_module(self._device)
        if getattr(module, "is_current_stream_capturing", bool)():
            return None
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(self._device))
        return event

    def _between(self, since: Any, until: Any) -> tuple[float, float]:
        return since.elapsed_time(until) / 1000, 0.0  # from milliseconds


class StepMeter:
    """What a state tells the driver of its steps: samples, times, and the sizes behind them."""

    def __init__(self) -> None:
        self.clock = ComputeClock()
        self._sources: list[CountsSamples] = []
        self._counted = Counted()
        self._parameters: int | None = None

    def follow(
        self,
        optimizers: Sequence[Optimizer],
        sources: list[CountsSamples],
        modules: Sequence[Module],
    ) -> None:
        """Measure the steps of these objects from now on."""
        if list(map(id, sources)) != list(map(id, self._sources)):
            self._sources = sources
            self._counted = self._count()
        self._parameters = count_parameters(modules)
        self.clock = clock_for(optimizers, self.clock)

    def tell_sizes(self, progress: TrainingProgress) -> None:
        """Note the sizes of the model and of the batch."""
        progress.parameters = self._parameters
        progress.micro_batches, progress.batch = division_of(self._sources)

    def finish_step(self, progress: TrainingProgress, version: int, committing: float) -> None:
        """Note the samples and the times of a step, whose commit took so many seconds."""
        waited = 0.0
        if self._sources:
            before = self._counted
            self._counted = after = self._count()
            progress.trained += after.samples - before.samples
            waited = after.waited - before.waited
            progress.micro_batches, progress.batch = division_of(self._sources)
        cost = self.clock.finish_step()
        progress.samples.record(version, cost)
        progress.timing = StepTiming(cost, waited, committing)

    def _count(self) -> Counted:
        """Return what the samplers and batches have counted so far."""
        counts = [source.counted for source in self._sources]
        return Counted(sum(each.samples for each in counts), sum(each.waited for each in counts))


def clock_for(optimizers: Sequence[Optimizer], before: ComputeClock) -> ComputeClock:
    """Return a clock that follows these optimizers.

    Reuse `before` if it already times this device type.
    """
    on_gpu = any(DeviceClock.times(p.device) for each in optimizers for p in trained_by(each))
    kind = DeviceClock if on_gpu else ComputeClock
    if type(before) is not kind:
        before.watch([])
        before = kind()
    before.watch(optimizers)
    return before


def _with_hooks(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer that calls hooks: this one, or the one that it wraps.

    Some wrap another optimizer and never call torch's constructor, such as usual ones of Lookahead.
    """
    if calls_hooks(optimizer):
        return optimizer
    inner = (each for each in vars(optimizer).values() if isinstance(each, Optimizer))
    return next(inner, None)
