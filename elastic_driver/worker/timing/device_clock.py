"""`computing`'s clock for parameters on a GPU, read on the device.

The processor runs ahead of a GPU, so its own clock says nothing. Here the moments are events in the
stream that trains; an event has passed when the GPU gets there. DistributedDataParallel and our own
exchanges let that stream wait for the gradients between the end of a pass and the optimizer; that
wait is left out. The cost of a step is returned with the next step, once the GPU has passed its
last event. Nobody ever waits for that: a step that is not over by then is left out. So is a step
that is captured into a CUDA graph, where events have no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from msgspec import Struct
from torch.optim import Optimizer

from elastic_driver.worker.timing.computing import ComputeClock
from elastic_driver.worker.timing.samples import StepCost

_MS = 1e-3


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
