"""`DistributedOptimizer`: reduces gradients over the ranks while the backward pass goes on."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from elastic_driver.horovod.common.exceptions import HorovodUsageError
from elastic_driver.horovod.common.process_sets import ProcessSet, global_process_set
from elastic_driver.horovod.torch.compression import Compression
from elastic_driver.horovod.torch.functions import same_objects
from elastic_driver.horovod.torch.gradient_reducer import (
    GradientReducer,
    Groups,
    HowToReduce,
    ParameterNames,
    Parameters,
    groups_of,
)
from elastic_driver.horovod.torch.handles import synchronize
from elastic_driver.horovod.torch.reductions import (
    Adasum,
    Average,
    Compress,
    grouped_allreduce_async_,
)
from elastic_driver.worker.torch_seams import is_step_of_scaler

_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() after "
    "optimizer.synchronize(): the gradients are reduced a second time. Put the step into "
    "`with optimizer.skip_synchronize():`"
)
_NEVER = (
    "optimizer.step() called inside optimizer.skip_synchronize() without optimizer.synchronize(): "
    "the gradients are being reduced"
)
_SCALED = (
    "a gradient scaler has looked at gradients that are not reduced: call optimizer.synchronize() "
    "before scaler.unscale_(optimizer) and scaler.step(optimizer), and put the latter into "
    "`with optimizer.skip_synchronize():`"
)
_FRAMES = 6  # from a step to the scaler that calls it, through wrappers of schedulers


class _DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc] # torch has no types
    """The methods that the script's optimizer gets in addition; see `DistributedOptimizer`."""

    _reducer: GradientReducer
    _parameter_names: dict[torch.Tensor, str]
    _synchronized: bool
    _should_synchronize: bool
    _compression: Compress

    @property
    def backward_passes_per_step(self) -> int:
        """Return the number of backward passes before a reduction."""
        return self._reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before a reduction."""
        self._reducer.passes = passes
        self._reducer.reset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; its gradients are reduced, too. All ranks add the same."""
        super().add_param_group(param_group)
        self._reducer.follow(self.param_groups)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the state as torch does; reductions that are under way are forgotten.

        Groups stay the same objects, as the script's first optimizer and its schedulers have them.
        """
        self._reducer.reset()
        self._synchronized = False
        with same_objects(self):
            super().load_state_dict(*args, **kwargs)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced.

        For scripts that change gradients before the step, such as clipping them; they put the
        step into `with optimizer.skip_synchronize():`.
        """
        self._reducer.follow(self.param_groups)
        self._reducer.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` inside this block take the gradients as they are."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Wait for the reduced gradients, then update the parameters.

        Gradients that `closure` computes are reduced as soon as it returns. For L-BFGS, which
        decides by the loss, the loss is reduced, too.

        Raises AssertionError where gradients are not reduced, or are changed meanwhile.
        """
        reducer = self._reducer
        if not self._should_synchronize:
            if reducer.is_busy():
                raise AssertionError(_NEVER)
            reducer.follow(self.param_groups)
        elif closure is None or reducer.has_begun():
            if self._synchronized:
                warnings.warn(_TWICE, stacklevel=2)
            elif reducer.is_shared() and _is_called_by_a_scaler(self):
                raise AssertionError(_SCALED)
            self.synchronize()
            closure = closure and self._reducing(closure, only_if_begun=True)
        else:
            reducer.follow(self.param_groups)
            closure = self._reducing(closure, only_if_begun=False)
        self._synchronized = False
        return super().step(closure)

    def _reducing(self, closure: Callable[[], Any], *, only_if_begun: bool) -> Callable[[], Any]:
        """Return the closure, followed by the reduction of the gradients that it has computed.

        `only_if_begun`: they were reduced before, so it may compute none.
        """

        def reducing() -> Any:
            loss = closure()
            reducer = self._reducer
            if not only_if_begun or reducer.has_begun():
                reducer.finish()
            if isinstance(self, torch.optim.LBFGS) and isinstance(loss, torch.Tensor):
                loss = reducer.reduced_loss(loss)
            return loss

        return reducing

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises AssertionError while they are being reduced.
        """
        if self._reducer.is_busy():
            raise AssertionError(
                "optimizer.zero_grad() called after loss.backward() and before "
                "optimizer.step() or optimizer.synchronize(): the gradients are being reduced"
            )
        self._reducer.follow(self.param_groups)
        super().zero_grad(set_to_none=set_to_none)


def _is_called_by_a_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an enabled gradient scaler makes this step."""
    if getattr(optimizer, "found_inf", None) is not None:  # it tells fused optimizers so
        return True
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None:
            break
        if is_step_of_scaler(frame.f_code):
            return True
        frame = frame.f_back
    return False


def forget_reductions(optimizer: torch.optim.Optimizer) -> None:
    """Drop what is under way in an optimizer of `DistributedOptimizer`; for any other, nothing."""
    if isinstance(optimizer, _DistributedOptimizer):
        optimizer._reducer.reset()
        optimizer._synchronized = False


def unfinished(optimizer: torch.optim.Optimizer) -> str:
    """Return what of a step of `DistributedOptimizer` is half done, which a commit would lose.

    "" for nothing, and for any other optimizer. Each rank has gradients of its own then, and those
    of a rank that is lost are nowhere else.
    """
    if isinstance(optimizer, _DistributedOptimizer):
        return optimizer._reducer.unfinished()
    return ""


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """Reduces what a step has changed, not the gradients."""

    def synchronize(self) -> None:
        """Do nothing: a step reduces its own changes."""

    def step(self, closure: Any = None) -> Any:
        """Update the parameters by the adaptive sum of the ranks' own steps."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        before = [p.detach().clone() for p in parameters]
        result = super(_DistributedOptimizer, self).step(closure)
        with torch.no_grad():
            changes = [p - old for p, old in zip(parameters, before, strict=True)]
            sent = [self._compression.compress(change) for change in changes]
            handle = grouped_allreduce_async_(
                [tensor for tensor, _ in sent], name="adasum.step", op=Adasum
            )
            for p, old, new, (_, context) in zip(
                parameters, before, synchronize(handle), sent, strict=True
            ):
                p.copy_(old + self._compression.decompress(new, context))
        return result


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Parameters | None = None,
    compression: Compress = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """Return the optimizer with a `step` that first reduces the gradients over the ranks.

    It has the class of the script's optimizer as a base, and shares its state and its parameter
    groups. It lives through changes of the world.

    Args:
        optimizer: the script's optimizer, which is not used directly any more.
        named_parameters: `model.named_parameters()`; the names have to be unique, and all
            parameters of the optimizer need one. None: names by position.
        compression: of what is sent.
        backward_passes_per_step: gradients of so many backward passes are added up before they
            are reduced.
        op: Average, Sum or Adasum; Adasum combines the steps of the ranks, not the gradients.
        gradient_predivide_factor: divides before the sum by this, and after it by the rest of the
            number of ranks; for Average only.
        num_groups: the older form of `groups`.
        groups: reduce gradients together: the number of groups, or lists of parameters.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks that share gradients; others train on their own.

    Raises ValueError for names that are not unique or missing, and for wrong groups.
    """
    naming = ParameterNames(optimizer.param_groups, named_parameters)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise HorovodUsageError("gradient_predivide_factor is for op=Average only")
    grouped = num_groups or groups is not None
    if op == Adasum and (grouped or process_set is not global_process_set):
        raise NotImplementedError("Adasum works without groups, and on all ranks only")
    methods = _DistributedAdasumOptimizer if op == Adasum else _DistributedOptimizer
    distributed = _with_methods(optimizer, methods)
    names = naming.of(optimizer.param_groups)
    distributed._reducer = GradientReducer(
        optimizer.param_groups,
        naming,
        groups_of(groups, num_groups, names),
        backward_passes_per_step,
        HowToReduce(compression, op, gradient_predivide_factor, sparse_as_dense, process_set),
    )
    distributed._parameter_names, distributed._compression = names, compression
    distributed._synchronized, distributed._should_synchronize = False, True
    return distributed


def _with_methods(optimizer: torch.optim.Optimizer, methods: type[Any]) -> Any:
    """Return an optimizer that shares all attributes, with these methods before its own."""
    base = type(optimizer)
    found: Any = object.__new__(type(base.__name__, (methods, base), {}))
    vars(found).update(vars(optimizer))
    vars(found).pop("step", None)  # a scheduler's, which belongs to the optimizer before
    return found
