"""Reduces the gradients of one optimizer over the ranks, for `DistributedOptimizer`.

All ranks give a parameter the same name (`ParameterNames`), and reduce the same groups together.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from elastic_driver.horovod.common.exceptions import HorovodUsageError, NotInYetError
from elastic_driver.horovod.common.process_sets import ProcessSet
from elastic_driver.horovod.common.util import split_list
from elastic_driver.horovod.engine import lifecycle as running
from elastic_driver.horovod.torch.handles import synchronize
from elastic_driver.horovod.torch.movements import sparse_allreduce_async
from elastic_driver.horovod.torch.reductions import (
    Adasum,
    Average,
    Compress,
    Sum,
    allreduce,
    allreduce_async_,
    grouped_allreduce_async_,
)
from elastic_driver.words import counted
from elastic_driver.worker.torch_seams import version_of

Parameters = Iterable[tuple[str, torch.Tensor]]
Groups = int | Sequence[Sequence[torch.Tensor]] | None
ParamGroups = Sequence[dict[str, Any]]


class ParameterNames:
    """The names of an optimizer's parameters, also of those that are added later.

    All ranks give the same ones. A parameter that the script has not named has its place as name.
    """

    def __init__(self, param_groups: ParamGroups, named_parameters: Parameters | None) -> None:
        """Take names from the script.

        Args:
            param_groups: of the optimizer.
            named_parameters: pairs, of parameters outside of the optimizer, too; None for none.

        Raises HorovodUsageError for names that are not unique, or missing.
        """
        self._known: dict[torch.Tensor, str] = {}
        if named_parameters is None:
            return
        pairs = list(named_parameters)
        if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
            raise HorovodUsageError("named_parameters are pairs: give model.named_parameters()")
        counts = Counter(name for name, _ in pairs)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise HorovodUsageError(
                f"named_parameters have names more than once: {', '.join(twice)}"
            )
        self._known = {p: name for name, p in pairs}
        missing = sum(p not in self._known for group in param_groups for p in group["params"])
        if missing:
            lacks = counted(missing, "parameter")
            raise HorovodUsageError(f"named_parameters lack {lacks} of the optimizer")

    def of(self, param_groups: ParamGroups) -> dict[torch.Tensor, str]:
        """Return the name of each parameter of these groups."""
        return {
            p: self._known.get(p) or f"parameter.{number}.{index}"
            for number, group in enumerate(param_groups)
            for index, p in enumerate(group["params"])
        }


def groups_of(
    groups: Groups, num_groups: int, names: dict[torch.Tensor, str]
) -> list[list[torch.Tensor]]:
    """Return the groups as lists of parameters; raises HorovodUsageError for wrong ones.

    `num_groups` is the older form; it counts where there is no other, and warns the script.
    """
    if num_groups:
        warnings.warn("num_groups is the older form of groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None or groups == 0:
        return []
    if isinstance(groups, int):
        if groups < 0:
            raise HorovodUsageError(f"groups={groups}: give a number from 0 on, or lists")
        wanted = [p for p in names if p.requires_grad]
        return [part for part in split_list(wanted, min(groups, len(wanted))) if part]
    lists = [list(group) for group in groups]
    members = [id(p) for group in lists for p in group]
    if len(set(members)) != len(members):
        raise HorovodUsageError("groups have a parameter in common")
    if any(p not in names for group in lists for p in group):
        raise HorovodUsageError("groups have a parameter that the optimizer does not have")
    return lists


class HowToReduce(NamedTuple):
    """The arguments of `DistributedOptimizer` that say how gradients are reduced."""

    compression: Compress
    op: int
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet


class GradientReducer:
    """Reduces the gradients of one optimizer; belongs to it for its whole life.

    A hook of each parameter begins the reduction when the gradient is there. In a new world, and
    after `reset`, nothing is under way and all backward passes count anew. With Adasum it reduces
    nothing: the optimizer reduces its own steps.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        naming: ParameterNames,
        together: list[list[torch.Tensor]],
        passes: int,
        how: HowToReduce,
    ) -> None:
        """Hook onto all parameters that need a gradient.

        Args:
            param_groups: of the optimizer.
            naming: names parameters, also later ones.
            together: parameters that are reduced as one.
            passes: backward passes before a reduction.
            how: what is sent, and how it is combined.
        """
        self.passes = passes
        self.names: dict[torch.Tensor, str] = {}
        self._naming = naming
        self._how = how
        self._group_of = {p: group for group in together for p in group}
        self._ids: list[int] = []  # of the parameters
        self._hooks: dict[torch.Tensor, Any] = {}
        self._without_hook: list[torch.Tensor] = []
        self._sparse: set[torch.Tensor] = set()  # parameters that have had such a gradient
        self._engine: object = None
        self._left: dict[torch.Tensor, int] = {}  # backward passes until the reduction
        self._waiting: dict[torch.Tensor, None] = {}  # for the rest of their groups
        self._under_way: dict[torch.Tensor, Callable[[], torch.Tensor]] = {}
        self._taken: dict[torch.Tensor, _Taken] = {}
        self.follow(param_groups)
        for parameter in self._hooks:
            if parameter.grad is None:  # as Horovod's has it before the first backward pass
                parameter.grad = torch.zeros_like(parameter)

    def follow(self, param_groups: ParamGroups) -> None:
        """Reduce the gradients of exactly these parameters from now on; later ones included."""
        if self._how.op == Adasum:
            return
        ids = [id(p) for group in param_groups for p in group["params"]]
        if ids != self._ids:
            self._ids, self.names = ids, self._naming.of(param_groups)
            self._left = {p: self._left.get(p, self.passes) for p in self.names}
            for gone in [p for p in self._hooks if p not in self.names]:
                self._hooks.pop(gone).remove()
            self._without_hook = [p for p in self.names if p not in self._hooks]
        if self._without_hook:
            for parameter in [p for p in self._without_hook if p.requires_grad]:
                self._hook(parameter)
            self._without_hook = [p for p in self._without_hook if not p.requires_grad]

    def reset(self) -> None:
        """Forget what is under way, and count the backward passes anew."""
        self._engine = running.current()
        self._left = dict.fromkeys(self.names, self.passes)
        self._waiting.clear()
        self._under_way.clear()
        self._taken.clear()

    def is_busy(self) -> bool:
        """Return whether reductions of this world are under way."""
        return self.is_shared() and bool(self._under_way or self._waiting)

    def has_begun(self) -> bool:
        """Return whether there was a backward pass since the last step."""
        return self.is_shared() and any(left < self.passes for left in self._left.values())

    def unfinished(self) -> str:
        """Return what is half done since the last step; "" for nothing."""
        if self.is_busy():
            return "its gradients are being reduced"
        if not self.has_begun():
            return ""
        done = self.passes - min(self._left.values())
        return f"{done} of {self.passes} backward passes are done"

    def is_shared(self) -> bool:
        """Return whether gradients are reduced in this world."""
        engine = running.current()
        if engine is not self._engine:
            self.reset()
        if engine is None:
            return False
        number = self._how.process_set.process_set_id
        if number is None:
            return True  # the operation says what is wrong
        place = engine.sets[number]
        return place.index >= 0 and place.size > 1

    def finish(self) -> None:
        """Reduce what no backward pass has reduced, and wait for everything.

        A parameter without a gradient takes part with zeros, because other ranks may have one.

        Raises `NotInYetError` where there is no world, and AssertionError for a gradient that was
        changed while it was reduced.
        """
        if not self.is_shared():
            if running.current() is None and not running.awaits_run():
                raise NotInYetError("gradients are reduced in a world; call hvd.init() first")
            return
        try:
            self._require_unchanged()
            for parameter in self.names:
                pending = parameter in self._under_way or parameter in self._waiting
                if parameter.requires_grad and not pending:
                    self._begin(parameter)
            for parameter in list(self._waiting):  # the others of its group need no gradient
                if parameter in self._waiting:
                    self._reduce_group([p for p in self._group_of[parameter] if p in self._waiting])
            self._set_all()
        finally:
            self.reset()

    def reduced_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss whose gradients are the reduced ones; all ranks call this."""
        if not self.is_shared():
            return loss
        op = self._how.op
        name = f"loss.{next(iter(self.names.values()), '')}"
        return allreduce(loss.detach(), name=name, op=op, process_set=self._how.process_set)

    # ---- one gradient --------------------------------------------------------------------

    def _hook(self, parameter: torch.Tensor) -> None:
        myself = weakref.ref(self)

        def computed(parameter: torch.Tensor) -> None:
            reducer = myself()
            if reducer is not None:
                reducer._computed(parameter)

        self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(computed)

    def _computed(self, parameter: torch.Tensor) -> None:
        """Take note of a gradient; begin its reduction after the last backward pass."""
        if not self.is_shared():
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

    def _begin(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
            gradient = gradient.to_sparse(1) if parameter in self._sparse else gradient
            parameter.grad = gradient
        taken = self._taken[parameter] = _Taken(gradient, version_of(gradient))
        if gradient.is_sparse:
            self._sparse.add(parameter)
            if not self._how.sparse_as_dense:
                self._begin_sparse(parameter, gradient)
                return
        if parameter not in self._group_of:
            sent, context = self._compressed(taken)
            before, after = self._factors()
            name, process_set = self.names[parameter], self._how.process_set
            handle = allreduce_async_(
                sent, None, name, self._operation(), before, after, process_set
            )
            self._under_way[parameter] = lambda: self._how.compression.decompress(
                synchronize(handle), context
            )
            return
        self._waiting[parameter] = None
        group = self._group_of[parameter]
        if all(p in self._waiting for p in group if p.requires_grad):
            self._reduce_group([p for p in group if p in self._waiting])

    def _begin_sparse(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._how.op not in (Average, Sum):
            raise NotImplementedError("sparse gradients can be averaged or summed only")
        self._under_way[parameter] = sparse_allreduce_async(
            gradient, self.names[parameter], self._how.op, self._how.process_set
        )

    def _reduce_group(self, group: list[torch.Tensor]) -> None:
        """Begin the reduction of several gradients as one operation."""
        sent = [self._compressed(self._taken[parameter]) for parameter in group]
        before, after = self._factors()
        handle = grouped_allreduce_async_(
            [tensor for tensor, _ in sent],
            None,
            f"group.{self.names[group[0]]}",
            self._operation(),
            before,
            after,
            self._how.process_set,
        )
        results: list[torch.Tensor] = []

        def result(index: int) -> torch.Tensor:
            if not results:
                results.extend(synchronize(handle))
            return self._how.compression.decompress(results[index], sent[index][1])

        for index, parameter in enumerate(group):
            del self._waiting[parameter]
            self._under_way[parameter] = lambda index=index: result(index)  # type: ignore[misc]

    def _compressed(self, taken: "_Taken") -> tuple[torch.Tensor, Any]:
        gradient = taken.gradient
        # `.data` has a count of changes of its own: that of the gradient shows the script's alone.
        taken.moved = gradient.to_dense() if gradient.is_sparse else gradient.data
        return self._how.compression.compress(taken.moved)

    def _operation(self) -> int:
        return Sum if self._how.predivide != 1.0 else self._how.op

    def _factors(self) -> tuple[float, float]:
        """Return the factors before and after the sum, where the average is divided in two."""
        predivide = self._how.predivide
        if predivide == 1.0:
            return 1.0, 1.0
        return 1.0 / predivide, predivide / self._how.process_set.size()

    def _require_unchanged(self) -> None:
        """Raise for a gradient that is not as its reduction has found it: who won is chance."""
        for parameter, taken in self._taken.items():
            gradient = taken.gradient
            if parameter.grad is not gradient or version_of(gradient) != taken.version:
                raise AssertionError(
                    f"the gradient of {self.names.get(parameter, 'a parameter')} was changed while "
                    "it was reduced: call optimizer.synchronize() before that, and put the step "
                    "into `with optimizer.skip_synchronize():`"
                )

    def _set_all(self) -> None:
        """Wait for all results, and make them the gradients."""
        in_place = []
        for parameter, result in self._under_way.items():
            reduced, taken = result(), self._taken[parameter]
            gradient = taken.gradient
            if reduced is taken.moved and not gradient.is_sparse:
                in_place.append(gradient)
            elif reduced.is_sparse:
                parameter.grad = reduced
            elif gradient.is_sparse:
                parameter.grad = reduced.to_sparse(gradient.sparse_dim())
            else:
                gradient.copy_(reduced)
        torch.autograd.graph.increment_version(in_place)


class _Taken:
    """A gradient as its reduction has found it; `moved` is what is reduced in its place."""

    __slots__ = ("gradient", "moved", "version")

    def __init__(self, gradient: torch.Tensor, version: int) -> None:
        self.gradient = gradient
        self.version = version
        self.moved: torch.Tensor | None = None
