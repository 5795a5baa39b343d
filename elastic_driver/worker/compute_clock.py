"""Measures the cost of a step to this rank, without the time it waits for others.

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

Computing that goes on behind the passes to exchange gradients hides in the waiting. It is measured
as the CPU time of this process during the wait, and `samples` scales it by the slowdown.

`State` owns a clock and asks it at each commit. Not seen are work between `backward()` and
`optimizer.step()`, and any other wait of the script (then no rank stands out). Parameters on a GPU
need `device_clock`; on any other device nothing is measured. Costs a few microseconds a step and no
message. Times are seconds.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch.optim import Optimizer

from elastic_driver.worker.heartbeat.progress import StepCost

_MS = 1e-3


class ComputeClock:
    """Measures the steps of the training thread that owns it."""

    DEVICE = "cpu"  # the type of the parameters' device

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._began: float | None = None  # the last commit; None: the step was not seen whole
        self._several = False  # whether some step had more than one pass
        self._clear()

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow these optimizers' parameters from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.restart()
        for optimizer in optimizers:
            trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
            if trained and trained[-1].device.type == self.DEVICE:  # usually nearest to the loss
                hook = trained[-1].register_post_accumulate_grad_hook(self._pass_begins)
                self._hooks += [hook, optimizer.register_step_pre_hook(self._optimizer_begins)]

    def restart(self) -> None:
        """Drop the current step: it does not compare."""
        self._began = None
        self._clear()

    def finish_step(self) -> StepCost | None:
        """End the step and begin the next; return its cost, None where it is not known.

        It is not known for the first step after `restart`, without `backward()` or
        `optimizer.step()`, and where the watched parameters got no gradient.
        """
        now = time.perf_counter()
        began, stepped, passes, waited = self._began, self._stepped, self._passes, self._waited
        exchanged = min(self._exchanged, waited)
        self._began = now
        self._clear()
        if began is None or stepped is None or not passes:
            return None
        one_pass = max(stepped - began - waited, 0.0) / passes
        return StepCost(one_pass + now - stepped, one_pass, exchanged)

    def _clear(self) -> None:
        self._passes = 0  # backward passes of this step so far
        self._waited = 0.0
        self._exchanged = 0.0  # CPU time of all threads of this process while it waited
        self._ready: float | None = None  # when the last pass had its gradients
        self._ready_cpu = 0.0
        self._returned = 0.0  # when that pass had ended, including its wait
        self._returned_cpu = 0.0
        self._stepped: float | None = None  # when the optimizer began

    _when_backward_ends = staticmethod(
        torch.autograd.Variable._execution_engine.queue_callback  # calls once, in order
    )

    def _pass_begins(self, _parameter: torch.Tensor) -> None:
        self._when_backward_ends(self._gradients_ready)

    def _gradients_ready(self) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        if self._ready is not None:  # a further pass: the time since the last one was no wait
            self._several = True
            self._waited += self._returned - self._ready
            self._exchanged += self._returned_cpu - self._ready_cpu
        self._ready = self._returned = now
        self._ready_cpu = self._returned_cpu = cpu
        self._passes += 1
        if self._several:  # behind the callbacks that wait at the end of this pass
            self._when_backward_ends(self._pass_returns)

    def _pass_returns(self) -> None:
        self._returned, self._returned_cpu = time.perf_counter(), time.process_time()

    def _optimizer_begins(self, *_: Any) -> None:
        if self._ready is not None:
            self._stepped = time.perf_counter()
            self._waited += self._stepped - self._ready
            self._exchanged += time.process_time() - self._ready_cpu
            self._ready = None


class _PassEvents(Struct):
    ready: torch.cuda.Event  # its gradients were there
    returned: torch.cuda.Event | None = None  # it had ended, including its wait


class _StepEvents(Struct):
    began: torch.cuda.Event
    passes: list[_PassEvents]
    stepped: torch.cuda.Event  # the optimizer began
    ended: torch.cuda.Event

    def cost(self) -> StepCost | None:
        """Return the cost of the step; None where the device is not that far."""
        if not self.ended.query():
            return None
        *earlier, last = self.passes
        waited = last.ready.elapsed_time(self.stepped)
        waited += sum(p.ready.elapsed_time(p.returned) for p in earlier if p.returned is not None)
        computed = max(self.began.elapsed_time(self.stepped) - waited, 0.0)
        one_pass = computed / len(self.passes) * _MS
        return StepCost(one_pass + self.stepped.elapsed_time(self.ended) * _MS, one_pass)


class DeviceClock(ComputeClock):
    """`ComputeClock` for parameters on a GPU; `finish_step` returns the cost of the step before."""

    DEVICE = "cuda"

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """See `ComputeClock.watch`; of several GPUs the first one's stream counts."""
        super().watch(optimizers)
        devices = (parameter.device for parameter in _parameters(optimizers))
        self._device = next((d for d in devices if d.type == self.DEVICE), None)

    def restart(self) -> None:
        """See `ComputeClock.restart`."""
        self._began_at: torch.cuda.Event | None = None
        self._finished: _StepEvents | None = None
        self._begin()

    def finish_step(self) -> StepCost | None:
        """See `ComputeClock.finish_step`; returns the cost of the step before this one."""
        before, now = self._finished, self._record_event()
        began, passes, stepped = self._began_at, self._step_passes, self._stepped_at
        self._finished = None
        if began and passes and stepped and now and not self._incomplete:
            self._finished = _StepEvents(began, passes, stepped, now)
        self._began_at = now
        self._begin()
        return None if before is None else before.cost()

    def _begin(self) -> None:
        self._step_passes: list[_PassEvents] = []
        self._stepped_at: torch.cuda.Event | None = None
        self._incomplete = False  # some event of this step is not known

    def _gradients_ready(self) -> None:
        event = self._record_event()
        if event is None:
            self._incomplete = True
            return
        self._step_passes.append(_PassEvents(event))
        self._when_backward_ends(self._pass_returns)  # behind the callbacks that wait at its end

    def _pass_returns(self) -> None:
        self._step_passes[-1].returned = self._record_event()

    def _optimizer_begins(self, *_: object) -> None:
        if self._step_passes and self._stepped_at is None:
            self._stepped_at = self._record_event()
            self._incomplete |= self._stepped_at is None

    def _record_event(self) -> torch.cuda.Event | None:
        """Return an event of now in the stream that trains; None while a graph is captured."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def clock_for(optimizers: Sequence[Optimizer], before: ComputeClock) -> ComputeClock:
    """Return a clock that follows these optimizers.

    Reuse `before` if it already times this device type.
    """
    on_gpu = any(p.device.type == DeviceClock.DEVICE for p in _parameters(optimizers))
    kind = DeviceClock if on_gpu else ComputeClock
    clock = before
    if type(before) is not kind:
        before.watch([])
        clock = kind()
    clock.watch(optimizers)
    return clock


def _parameters(optimizers: Sequence[Optimizer]) -> Iterator[torch.Tensor]:
    return (p for o in optimizers for group in o.param_groups for p in group["params"])
