"""`DistributedOptimizer`: reduces gradients over the ranks while the backward pass goes on."""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elastic_driver.horovod.common.exceptions import HorovodUsageError
from elastic_driver.horovod.common.process_sets import ProcessSet, global_process_set
from elastic_driver.horovod.engine import running
from elastic_driver.horovod.torch.compression import Compression
from elastic_driver.horovod.torch.handles import synchronize
from elastic_driver.horovod.torch.movements import sparse_allreduce_async
from elastic_driver.horovod.torch.parameter_names import Groups, Parameters, groups_of, names_of
from elastic_driver.horovod.torch.reductions import (
    Adasum,
    Average,
    Compress,
    Sum,
    allreduce_async_,
    grouped_allreduce_async_,
)

_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() after "
    "optimizer.synchronize(): the gradients are reduced a second time. Put the step into "
    "`with optimizer.skip_synchronize():`"
)


class GradientReducer:
    """Reduces the gradients of one optimizer; belongs to it for its whole life.

    A hook of each parameter begins the reduction when the gradient is there. In a new world, and
    after `reset`, nothing is under way and all backward passes count anew.
    """

    def __init__(
        self,
        groups: list[list[torch.Tensor]],
        names: dict[torch.Tensor, str],
        *,
        compression: Compress,
        passes: int,
        op: int,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.names = names
        self.passes = passes
        self._group_of = {p: group for group in groups for p in group}
        self._compression = compression
        self._op = op
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._hooks: dict[torch.Tensor, Any] = {}
        self._sparse: set[torch.Tensor] = set()  # parameters that have had such a gradient
        self._engine: object = None
        self._left: dict[torch.Tensor, int] = {}  # backward passes until the reduction
        self._waiting: dict[torch.Tensor, None] = {}  # for the rest of their groups
        self._under_way: dict[torch.Tensor, Callable[[], torch.Tensor]] = {}
        self.hook()
        for parameter in self._hooks:
            if parameter.grad is None:  # as Horovod's has it before the first backward pass
                parameter.grad = torch.zeros_like(parameter)

    def reset(self) -> None:
        """Forget what is under way, and count the backward passes anew."""
        self._engine = running.current()
        self._left = dict.fromkeys(self.names, self.passes)
        self._waiting.clear()
        self._under_way.clear()

    def hook(self) -> None:
        """Hook onto parameters that need a gradient and have no hook yet."""
        for parameter in self.names:
            if parameter.requires_grad and parameter not in self._hooks:
                myself = weakref.ref(self)

                def computed(
                    parameter: torch.Tensor, ref: "weakref.ref[GradientReducer]" = myself
                ) -> None:
                    reducer = ref()
                    if reducer is not None:
                        reducer.computed(parameter)

                handle = parameter.register_post_accumulate_grad_hook(computed)
                self._hooks[parameter] = handle

    def unhook(self) -> None:
        """Remove all hooks."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def is_busy(self) -> bool:
        """Return whether reductions of this world are under way."""
        return self._is_shared() and bool(self._under_way or self._waiting)

    def computed(self, parameter: torch.Tensor) -> None:
        """Take note of a gradient; begin its reduction after the last backward pass."""
        if not self._is_shared():
            return
        if self._left[parameter] <= 0:
            raise AssertionError(
                f"the gradient of {self.names[parameter]} was computed more than "
                f"{self.passes} times before optimizer.step(); give DistributedOptimizer a "
                "larger backward_passes_per_step"
            )
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._begin(parameter)

    def finish(self) -> None:
        """Reduce what no backward pass has reduced, and wait for everything.

        A parameter without a gradient takes part with zeros, because other ranks may have one.
        """
        if not self._is_shared():
            return
        for parameter in self.names:
            pending = parameter in self._under_way or parameter in self._waiting
            if parameter.requires_grad and not pending:
                self._begin(parameter)
        for parameter in list(self._waiting):  # the others of its group need no gradient
            if parameter in self._waiting:
                self._reduce_group([p for p in self._group_of[parameter] if p in self._waiting])
        under_way, self._under_way = self._under_way, {}
        try:
            for parameter, result in under_way.items():
                self._set(parameter, result())
        finally:
            self.reset()

    def _is_shared(self) -> bool:
        """Return whether gradients are reduced in this world."""
        engine = running.current()
        if engine is not self._engine:
            self.reset()
        if engine is None:
            return False
        number = self._process_set.process_set_id
        if number is None:
            return True  # the operation says what is wrong
        place = engine.sets[number]
        return place.index >= 0 and place.size > 1

    def _begin(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            if parameter in self._sparse:
                parameter.grad = parameter.grad.to_sparse(1)
        if parameter.grad.is_sparse:
            self._sparse.add(parameter)
            if not self._sparse_as_dense:
                self._begin_sparse(parameter)
                return
        if parameter not in self._group_of:
            sent, context = self._compressed(parameter)
            before, after = self._factors()
            name = self.names[parameter]
            handle = allreduce_async_(
                sent, None, name, self._operation(), before, after, self._process_set
            )
            self._under_way[parameter] = lambda: self._compression.decompress(
                synchronize(handle), context
            )
            return
        self._waiting[parameter] = None
        group = self._group_of[parameter]
        if all(p in self._waiting for p in group if p.requires_grad):
            self._reduce_group([p for p in group if p in self._waiting])

    def _begin_sparse(self, parameter: torch.Tensor) -> None:
        if self._op not in (Average, Sum):
            raise NotImplementedError("sparse gradients can be averaged or summed only")
        assert parameter.grad is not None  # noqa: S101 - the caller has seen it
        name = self.names[parameter]
        self._under_way[parameter] = sparse_allreduce_async(
            parameter.grad, name, self._op, self._process_set
        )

    def _reduce_group(self, group: list[torch.Tensor]) -> None:
        """Begin the reduction of several gradients as one operation."""
        sent = [self._compressed(parameter) for parameter in group]
        before, after = self._factors()
        handle = grouped_allreduce_async_(
            [tensor for tensor, _ in sent],
            None,
            f"group.{self.names[group[0]]}",
            self._operation(),
            before,
            after,
            self._process_set,
        )
        results: list[torch.Tensor] = []

        def result(index: int) -> torch.Tensor:
            if not results:
                results.extend(synchronize(handle))
            return self._compression.decompress(results[index], sent[index][1])

        for index, parameter in enumerate(group):
            del self._waiting[parameter]
            self._under_way[parameter] = lambda index=index: result(index)  # type: ignore[misc]

    def _compressed(self, parameter: torch.Tensor) -> tuple[torch.Tensor, Any]:
        assert parameter.grad is not None  # noqa: S101 - `_begin` has seen to it
        dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        return self._compression.compress(dense)

    def _operation(self) -> int:
        return Sum if self._predivide != 1.0 else self._op

    def _factors(self) -> tuple[float, float]:
        """Return the factors before and after the sum, where the average is divided in two."""
        if self._predivide == 1.0:
            return 1.0, 1.0
        return 1.0 / self._predivide, self._predivide / self._process_set.size()

    def _set(self, parameter: torch.Tensor, reduced: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or reduced.is_sparse:
            parameter.grad = reduced
        elif gradient.is_sparse:
            parameter.grad = reduced.to_sparse(gradient.sparse_dim())
        elif reduced is not gradient:
            gradient.copy_(reduced)


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

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the state as torch does; reductions that are under way are forgotten."""
        self._reducer.reset()
        self._synchronized = False
        super().load_state_dict(*args, **kwargs)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced.

        For scripts that change gradients before the step, such as clipping them; they put the
        step into `with optimizer.skip_synchronize():`.
        """
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
        """Wait for the reduced gradients, then update the parameters."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(_TWICE, stacklevel=2)
            self.synchronize()
        self._synchronized = False
        self._reducer.hook()
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises AssertionError while they are being reduced.
        """
        if self._reducer.is_busy():
            raise AssertionError(
                "optimizer.zero_grad() called after loss.backward() and before "
                "optimizer.step() or optimizer.synchronize(): the gradients are being reduced"
            )
        self._reducer.hook()
        super().zero_grad(set_to_none=set_to_none)


def forget_reductions(optimizer: torch.optim.Optimizer) -> None:
    """Drop what is under way in an optimizer of `DistributedOptimizer`; for any other, nothing."""
    if isinstance(optimizer, _DistributedOptimizer):
        optimizer._reducer.reset()
        optimizer._synchronized = False


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """Reduces what a step has changed, not the gradients."""

    def synchronize(self) -> None:
        """Do nothing: a step reduces its own changes."""

    def step(self, closure: Any = None) -> Any:
        """Update the parameters by the adaptive sum of the ranks' own steps."""
        parameters = [p for p in self._parameter_names if p.requires_grad]
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
    names = names_of(optimizer, named_parameters)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise HorovodUsageError("gradient_predivide_factor is for op=Average only")
    grouped = num_groups or groups is not None
    if op == Adasum and (grouped or process_set is not global_process_set):
        raise NotImplementedError("Adasum works without groups, and on all ranks only")
    methods = _DistributedAdasumOptimizer if op == Adasum else _DistributedOptimizer
    distributed = _with_methods(optimizer, methods)
    distributed._reducer = GradientReducer(
        groups_of(groups, num_groups, names),
        {} if op == Adasum else names,
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
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
