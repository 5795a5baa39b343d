"""How much the gradients of the ranks differ from their mean, for `--auto-scale`.

The larger a batch is, the less each of its samples teaches. How much less follows from the noise of
the gradients: from the squared norm of each rank's own gradient, and that of the mean over ranks
(`policies.scaling.noise`). Both are measured in DistributedDataParallel's communication hook, in
the first steps of a world and then in every `EVERY`th, which all ranks count alike. Gradients on a
GPU are not measured: reading their norm would stop the stream.
"""

import os
import threading

import torch
import torch.distributed as dist

from elastic_driver import contract
from elastic_driver.words.progress import GradientNorms

FIRST = 16  # steps of a world that are all measured
EVERY = 64  # of the later ones
KEPT = 0.9  # the weight of all earlier measurements against the newest one


class _Step:
    """The buckets of one step."""

    def __init__(self) -> None:
        self.own = self.mean = 0.0
        self.open = 0  # buckets whose mean is not known yet
        self.last = False  # all buckets have begun


class GradientMeter:
    """Measures the steps of one wrapper; its buckets may end in any order, in other threads."""

    def __init__(self) -> None:
        self._steps = 0
        self._step: _Step | None = None  # None: this step is not measured
        self._lock = threading.Lock()

    def begin(self, bucket: dist.GradBucket) -> _Step | None:
        """Take in a bucket of this rank's gradients; return what `end` needs, if anything."""
        gradients = bucket.buffer()
        if bucket.index() == 0:
            self._steps += 1
            due = self._steps <= FIRST or self._steps % EVERY == 0
            self._step = _Step() if due else None
        step = self._step
        if step is None or gradients.is_sparse or gradients.device.type != "cpu":
            self._step = None
            return None
        own = _squared(gradients)
        with self._lock:
            step.own += own
            step.open += 1
            step.last = bucket.is_last()
        return step

    def end(self, step: _Step, mean: torch.Tensor) -> None:
        """Take in the mean of that bucket over all ranks."""
        squared = _squared(mean)
        with self._lock:
            step.mean += squared
            step.open -= 1
            complete = step.last and not step.open
        if complete:
            _Measured.take(step.own, step.mean)


class _Measured:
    """The norms that were measured in the present world."""

    weight = own = mean = 0.0

    @classmethod
    def take(cls, own: float, mean: float) -> None:
        cls.weight = KEPT * cls.weight + 1
        cls.own, cls.mean = KEPT * cls.own + own, KEPT * cls.mean + mean

    @classmethod
    def forget(cls) -> None:
        cls.weight = cls.own = cls.mean = 0.0


def new_meter(size: int) -> GradientMeter | None:
    """Return a meter for a wrapper in a new world; None if the job does not ask for it."""
    _Measured.forget()
    wanted = os.environ.get(contract.MEASURE_GRADIENTS) == "1"
    return GradientMeter() if wanted and size > 1 else None


def gradient_norms() -> GradientNorms | None:
    """Return what was measured in this world; None: nothing."""
    if not _Measured.weight:
        return None
    return GradientNorms(_Measured.own / _Measured.weight, _Measured.mean / _Measured.weight)


def _squared(tensor: torch.Tensor) -> float:
    """Return the squared norm of a flat tensor."""
    if tensor.dtype in (torch.float32, torch.float64):
        return float(torch.dot(tensor, tensor))  # the fastest way
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) ** 2
