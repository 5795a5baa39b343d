"""`elastic.wrap`: DistributedDataParallel for the current world, taken down with it.

A DDP object hooks itself onto the parameters it wraps, and its hooks stay until its reducer is
gone. The model outlives many worlds, so `membership` takes every wrapper down when it leaves a
world. It does so explicitly: a reference kept in a traceback would otherwise leave the hooks of a
dead group on live parameters.

For `--auto-scale` the wrapper measures how much the gradients of the ranks differ from their mean.
The larger a batch is, the less each of its samples teaches. How much less follows from the noise of
the gradients: from the squared norm of each rank's own gradient, and that of the mean over ranks
(`features.sizes.gauge`). Both are measured in DistributedDataParallel's communication hook, in
the first steps of a world and then in every `EVERY`th, which all ranks count alike. Gradients on a
GPU are not measured: reading their norm would stop the stream.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from elastic_driver import contract
from elastic_driver.words.progress import GradientNorms
from elastic_driver.worker import current
from elastic_driver.worker.state_sync.contents import beginnings
from elastic_driver.worker.state_sync.sharing import gather_rows
from elastic_driver.worker.torch_seams import (
    OpenDataParallel,
    copy_all,
    flatten,
    unflatten,
    version_of,
)
from elastic_driver.worker.world.gloo import CollectiveWaits, current_waits, refuse_if_lost


class _Within:
    """The mutable field of this module."""

    shares = False  # inside `without_ddp_sync`: a `FixedBatch` sums the gradients


_within = _Within()
Hook = Callable[[Any, Any], Future[torch.Tensor]]  # of a state and a bucket of gradients
Looks = tuple[list[tuple[int, int, int]], list[bytes]]
_wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
# Models that all ranks had alike, and how their tensors looked then.
_in_sync: weakref.WeakKeyDictionary[Module, Looks] = weakref.WeakKeyDictionary()


def wrap(model: Module, **ddp_kwargs: Any) -> DistributedDataParallel:
    """Return `model` under DistributedDataParallel in the current world.

    Call it as the first step of the function under `@elastic.run`, which runs again after each
    change of the world. The model stays on its device. As with DistributedDataParallel, all ranks
    then have the parameters and buffers of rank 0; where no rank has changed them since the state
    was synchronised, nothing is sent.

    Args:
        model: the module to train; its parameters stay the same objects.
        ddp_kwargs: passed on to DistributedDataParallel.

    Raises `UsageError` before this process is in a world.
    """
    place = current.place()
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device.type != "cpu":
        ddp_kwargs.setdefault("device_ids", [parameter.device.index])
    if place.size > 1 and not _changed_anywhere(model, place.size):
        ddp_kwargs.setdefault("init_sync", False)
    ddp = ElasticDataParallel(model, **ddp_kwargs)
    _wrapped.add(ddp)
    return ddp


class ElasticDataParallel(OpenDataParallel):
    """DistributedDataParallel whose waits for gloo can be given up, see `gloo`.

    A communication hook makes that possible, and a broadcast of buffers that is ours. Gradients and
    buffers have the bits that they have without these.
    """

    def __init__(self, model: Module, **ddp_kwargs: Any) -> None:
        super().__init__(model, **ddp_kwargs)
        self.last_pass_is_local = False  # under `no_sync`
        waits = current_waits()
        self._mean = None if waits is None else _GradientMean(waits, self.process_group)
        if self._mean is not None:
            super().register_comm_hook(None, self._mean.communicate)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """See DistributedDataParallel."""
        refuse_if_lost()
        self.last_pass_is_local = not self.require_backward_grad_sync and not _within.shares
        return super().forward(*inputs, **kwargs)

    def broadcast_tensors(
        self, tensors: Sequence[torch.Tensor], bucket_bytes: int, source: int
    ) -> None:
        """See `OpenDataParallel`."""
        if self._mean is None:
            super().broadcast_tensors(tensors, bucket_bytes, source)
        else:
            _broadcast(tensors, source, self._mean.group)

    def see_join_work(self, work: Any) -> None:
        """Note what tells, in `join()`, how many ranks take part in this pass; None: all."""
        if self._mean is not None:
            counts = work is not None and not self.divides_by_first_size
            self._mean.taking_part = work if counts else None

    def forget_group(self) -> None:
        """Drop the process group: this wrapper is of no use any more."""
        if self._mean is not None:
            self._mean.group = None

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Register a communication hook of the script, as torch does."""
        if self._mean is None:
            super().register_comm_hook(state, hook)
            return
        self.check_hook(hook)
        if self._mean.of_script is not None:
            raise RuntimeError("a communication hook is registered once for each wrapper")
        self._mean.of_script = partial(hook, state)


def _broadcast(tensors: Sequence[torch.Tensor], source: int, group: Any) -> None:
    """Give all ranks of a group the tensors of one of them, in one message for each dtype.

    Torch's own function waits in C++, where a wait cannot be given up.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    sent = []
    for own in alike.values():
        flat = flatten(own)
        work = dist.broadcast(flat, group_src=source, group=group, async_op=True)
        sent.append((own, flat, work))
    for own, flat, work in sent:
        work.wait()
        if dist.get_rank(group) != source:
            copy_all(own, unflatten(flat, own))


class _GradientMean:
    """The communication hook: the script's own if it has one, else the mean over ranks.

    It holds no wrapper: the wrapper's reducer holds it, in C++, where no cycle is collected.
    """

    def __init__(self, waits: CollectiveWaits, group: Any) -> None:
        self._waits = waits
        self._size = dist.get_world_size(group)
        self.group = group  # None: the wrapper was taken down
        self._meter = new_meter(self._size)
        self.taking_part: Any = None  # torch's work that counts the ranks of this pass; None: all
        self.of_script: Callable[[Any], Future[torch.Tensor]] | None = None

    def communicate(self, _state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        if self.of_script is not None:
            device = bucket.buffer().device
            return self._waits.guarded(self.of_script(bucket), lambda tensor: tensor, device)
        gradients = bucket.buffer()
        meter = self._meter
        measured = None if meter is None else meter.begin(bucket)
        # In this way torch's reducer divides where there is no hook.
        size = self._size
        if self.taking_part is not None:
            size = int(self.taking_part.get_future().wait()[0].item())
        if gradients.is_sparse:
            gradients.div_(size)
        else:
            gradients.mul_(1.0 / size)
        work = dist.all_reduce(gradients, group=self.group, async_op=True)
        assert work is not None  # noqa: S101 - it is asynchronous

        # A thread of gloo calls it, and forgets it later. It must not have the last reference to
        # the group then, whose end waits for this thread: it does not hold `self`.
        def mean(_: object) -> torch.Tensor:
            if meter is not None and measured is not None:
                meter.end(measured, gradients)
            return gradients

        return self._waits.guarded(work.get_future(), mean, gradients.device)


@contextlib.contextmanager
def without_ddp_sync(model: Module) -> Iterator[None]:
    """Disable the communication of all wrappers of `model` inside; `FixedBatch` does it for them.

    Their own mean over ranks would be wrong where ranks have different numbers of micro-batches,
    and would hang where one has none. Unlike `no_sync`, buffers are not broadcast either.
    """
    wrappers = [ddp for ddp in _wrapped if ddp.module is model]
    _within.shares = True
    before = [(d.require_backward_grad_sync, d.require_forward_param_sync) for d in wrappers]
    for ddp in wrappers:
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
    try:
        yield
    finally:
        _within.shares = False
        for ddp, (gradients, parameters) in zip(wrappers, before, strict=True):
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = gradients, parameters


def mark_in_sync(model: Module) -> None:
    """Record that all ranks hold this model with the same values, now."""
    _in_sync[model] = _looks(model)


def _looks(model: Module) -> Looks:
    """Return object, memory, version and the first bytes of each tensor of a model.

    Torch's functions of initialisation count no version where they are given `parameter.data`.
    """
    tensors = (*model.parameters(), *model.buffers())
    objects = [(id(each), each.data_ptr(), version_of(each)) for each in tensors]
    return objects, beginnings(tensors)


def _changed_anywhere(model: Module, size: int) -> bool:
    """Return whether a rank has changed the model since all had it alike. Collective."""
    changed = _in_sync.get(model) != _looks(model)
    return any(row[0] for row in gather_rows([changed], size))


def wrapped_models() -> list[Module]:
    """Return the models that `wrap` has wrapped in this world, and that the script still uses."""
    return [ddp.module for ddp in list(_wrapped)]


def passes_are_local() -> bool:
    """Return whether the last pass through a wrapper summed no gradients over the ranks."""
    return any(isinstance(ddp, ElasticDataParallel) and ddp.last_pass_is_local for ddp in _wrapped)


def tear_down_wrappers() -> None:
    """Remove the hooks of every wrapper from the parameters and drop its process group."""
    for ddp in list(_wrapped):
        ddp.reducer = ddp.logger = None  # the last references: the destructor removes the hooks
        ddp.process_group = None
        if isinstance(ddp, ElasticDataParallel):
            ddp.forget_group()
    _wrapped.clear()
    _in_sync.clear()


# ---- how much the gradients of the ranks differ ----------------------------------------

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
