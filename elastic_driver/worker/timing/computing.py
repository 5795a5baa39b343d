"""What a step costs this rank by itself, without the time it waits for others.

In a synchronous step all ranks finish together, so step times name nobody; what tells a slow rank
is how long its own part took. A step runs from one commit to the next. Its waiting is inside
`backward()`, where DistributedDataParallel sums at the end, or between `backward()` and
`optimizer.step()`, where `FixedBatch` and hand-written all-reduces do:

    commit ─ data, forward, backward ─ [waiting] ─ optimizer.step() … commit
           └────────── / passes ───┘             └──────── + ───────┘

The time of a step is that of one forward-backward pass plus the optimizer's, so that ranks with
different numbers of micro-batches compare. Where a pass ends, the autograd engine tells: a hook on
one parameter queues a callback, and callbacks run in order, ours before the one in which
DistributedDataParallel waits (it queues its own only when the last gradient is there).

What is computed behind the passes, to exchange the gradients, hides in the waiting: there the
processor's time of this process is taken, and `samples` stretches it as the kernel does.

`State` owns a clock and asks at each commit. Left out are what lies between `backward()` and
`optimizer.step()` and anything a script waits for elsewhere (then no rank stands out). Of
parameters on a GPU only the GPU knows (`device_clock`); on any other device nothing is measured.
Costs a few microseconds a step and no message. Times are seconds.
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

    DEVICE = "cpu"  # where the parameters are
    __slots__ = (
        "_began",
        "_exchanged",
        "_hooks",
        "_passes",
        "_ready",
        "_ready_cpu",
        "_returned",
        "_returned_cpu",
        "_several",
        "_stepped",
        "_waited",
    )

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._began: float | None = None  # the commit before; None: the step was not seen whole
        self._several = False  # whether some step has had more than one pass
        self._clear()

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow the training of these optimizers' parameters from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.restart()
        for optimizer in optimizers:
            parameter = _last_trained(optimizer)
            if parameter is not None and parameter.device.type == self.DEVICE:
                hook = parameter.register_post_accumulate_grad_hook(self._pass_begins)
                self._hooks += [hook, optimizer.register_step_pre_hook(self._optimizer_begins)]

    def restart(self) -> None:
        """Forget the step under way: it is not one that can be compared."""
        self._began = None
        self._clear()

    def finish_step(self) -> StepCost | None:
        """The step ends here, and the next begins; what it took, or None where that is not known.

        It is not for the first one after `restart`, for a step without `backward()` or without
        `optimizer.step()`, and where the watched parameters had no gradient.
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
        self._passes = 0  # backward passes so far
        self._waited = 0.0  # seconds
        self._exchanged = 0.0  # seconds that this process ran in that time, all its threads
        self._ready: float | None = None  # when the last pass had its gradients
        self._ready_cpu = 0.0
        self._returned = 0.0  # when that pass had ended, the waiting in it included
        self._returned_cpu = 0.0
        self._stepped: float | None = None  # when the optimizer began

    _when_backward_ends = staticmethod(
        torch.autograd.Variable._execution_engine.queue_callback  # to be called once, in order
    )

    def _pass_begins(self, _parameter: torch.Tensor) -> None:
        self._when_backward_ends(self._gradients_ready)

    def _gradients_ready(self) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        if self._ready is not None:  # a further pass: what was done since the last one is no wait
            self._several = True
            self._waited += self._returned - self._ready
            self._exchanged += self._returned_cpu - self._ready_cpu
        self._ready = self._returned = now
        self._ready_cpu = self._returned_cpu = cpu
        self._passes += 1
        if self._several:
            self._when_backward_ends(
                self._pass_returns
            )  # behind whoever waits at the end of this pass

    def _pass_returns(self) -> None:
        self._returned, self._returned_cpu = time.perf_counter(), time.process_time()

    def _optimizer_begins(self, *_: Any) -> None:
        if self._ready is not None:
            self._stepped = time.perf_counter()
            self._waited += self._stepped - self._ready
            self._exchanged += time.process_time() - self._ready_cpu
            self._ready = None


def _last_trained(optimizer: Optimizer) -> torch.Tensor | None:
    """The parameter nearest to the loss, as models are usually written down."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return trained[-1] if trained else None
