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

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from elastic_driver.worker.timing.samples import StepCost


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
