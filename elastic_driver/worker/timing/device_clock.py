"""What a step costs a rank whose parameters are on a GPU: `computing`'s clock, read on the device.

The processor runs ahead of a GPU, so its own clock says nothing. Here the moments are events in
the stream that trains: they pass when the GPU gets there. DistributedDataParallel and our own
exchanges let that stream wait for the gradients between the end of a pass and the optimizer, which
is where the waiting is left out, as on a processor. A step is told with the next one, once the GPU
has passed its last event; nobody ever waits for that, and a step that is not over by then is left
out. What is recorded into a CUDA graph is no moment, and such a step is not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from msgspec import Struct
from torch.optim import Optimizer

from elastic_driver.worker.timing.computing import ComputeClock
from elastic_driver.worker.timing.samples import StepCost

_MS = 1e-3


class Moment(Protocol):
    """A point in a device's time."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, later: Moment) -> float:
        """Milliseconds from here; both must have been passed."""


class _Pass(Struct):
    ready: Moment  # its gradients were there
    returned: Moment | None = None  # and it had ended, the waiting in it included


class _Step(Struct):
    began: Moment
    passes: list[_Pass]
    stepped: Moment  # the optimizer began
    ended: Moment

    def cost(self) -> StepCost | None:
        """What it took; None where the device is not that far."""
        if not self.ended.query():
            return None
        *earlier, last = self.passes
        waited = last.ready.elapsed_time(self.stepped)
        waited += sum(p.ready.elapsed_time(p.returned) for p in earlier if p.returned is not None)
        computed = max(self.began.elapsed_time(self.stepped) - waited, 0.0)
        one_pass = computed / len(self.passes) * _MS
        return StepCost(one_pass + self.stepped.elapsed_time(self.ended) * _MS, one_pass)


class DeviceClock(ComputeClock):
    """As `ComputeClock`, for parameters on a GPU; `finish_step` tells of the step before."""

    __slots__ = ("_began_at", "_device", "_finished", "_given_up", "_step_passes", "_stepped_at")

    DEVICE = "cuda"

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """See `ComputeClock.watch`; of several GPUs the first one's stream counts."""
        super().watch(optimizers)
        devices = (parameter.device for parameter in _trained(optimizers))
        self._device = next((d for d in devices if d.type == self.DEVICE), None)

    def restart(self) -> None:
        """See `ComputeClock.restart`."""
        self._began_at: Moment | None = None
        self._finished: _Step | None = None
        self._begin()

    def finish_step(self) -> StepCost | None:
        """See `ComputeClock.finish_step`; the step that ends here is told with the next one."""
        before, now = self._finished, self._moment()
        whole = self._began_at is not None and self._step_passes and not self._given_up
        self._finished = (
            _Step(self._began_at, self._step_passes, self._stepped_at, now)
            if whole and self._began_at and self._stepped_at and now
            else None
        )
        self._began_at = now
        self._begin()
        return None if before is None else before.cost()

    def _begin(self) -> None:
        self._step_passes: list[_Pass] = []
        self._stepped_at: Moment | None = None
        self._given_up = False  # some moment of this step is not known

    def _gradients_ready(self) -> None:
        moment = self._moment()
        if moment is None:
            self._given_up = True
            return
        self._step_passes.append(_Pass(moment))
        self._when_backward_ends(self._pass_returns)  # behind whoever waits at its end

    def _pass_returns(self) -> None:
        self._step_passes[-1].returned = self._moment()

    def _optimizer_begins(self, *_: object) -> None:
        if self._step_passes and self._stepped_at is None:
            self._stepped_at = self._moment()
            self._given_up |= self._stepped_at is None

    def _moment(self) -> Moment | None:
        """Now, in the stream that trains; None while it is recorded for later."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        moment: Moment = event
        return moment


def clock_for(optimizers: Sequence[Optimizer], before: ComputeClock) -> ComputeClock:
    """The clock for the device these train on, following them; `before` where that is its kind."""
    on_gpu = any(p.device.type == DeviceClock.DEVICE for p in _trained(optimizers))
    kind = DeviceClock if on_gpu else ComputeClock
    clock = before
    if type(before) is not kind:
        before.watch([])
        clock = kind()
    clock.watch(optimizers)
    return clock


def _trained(optimizers: Sequence[Optimizer]) -> Iterator[torch.Tensor]:
    return (p for o in optimizers for group in o.param_groups for p in group["params"])
