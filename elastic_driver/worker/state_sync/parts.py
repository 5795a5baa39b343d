"""The parts of a state: how each kind of object is kept, rolled back, sent and received.

`state` holds one part for each object it was given. A commit copies the *small* things of a part
(buffers, learning rates, the `state_dict()` of a scheduler or sampler). The *large* ones
(parameters, the optimizer's own tensors) change only in `optimizer.step()`, so a commit need not
copy them; only a `snapshot=True` state does. `StepCounter` counts these steps.

For sending, a part becomes a document and a list of tensors. The receiver makes the tensors to
receive into from the document, so that parameters are written in place.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_driver.errors import UsageError

# For those who still import them from here.
from elastic_driver.worker.positions import Advancing as Advancing  # noqa: PLC0414
from elastic_driver.worker.positions import Counted as Counted  # noqa: PLC0414
from elastic_driver.worker.positions import CountsSamples as CountsSamples  # noqa: PLC0414
from elastic_driver.worker.positions import division_of as division_of  # noqa: PLC0414
from elastic_driver.worker.state_sync.values import IMMUTABLE, TensorSpec, apart, copied, join

_SHAPE = attrgetter("shape")
Outgoing = tuple[Any, list[tuple[str, Tensor]]]  # a document; name and tensor of each index in it


class StatePart:
    """Any object with `state_dict()` and `load_state_dict()`, all of it small: a scheduler, …"""

    def __init__(self, name: str, thing: Any) -> None:
        self._name, self._thing = name, thing
        self._kept: Any = None

    def keep(self, large: bool = False) -> None:  # noqa: ARG002 - nothing is large here
        """Copy the small things, at a commit; with `large` the large ones as well."""
        self._kept = copied(self._thing.state_dict())

    def roll_back(self, large: bool = False) -> None:  # noqa: ARG002 - as above
        """Put the copies of `keep` back."""
        self._thing.load_state_dict(copied(self._kept))

    def outgoing(self) -> Outgoing:
        """Return a document of the whole part, and the tensors that the document refers to."""
        return apart(self._thing.state_dict(), self._name)

    def places(self, _document: Any, specs: Sequence[TensorSpec], /) -> list[Tensor]:
        """Return the tensors to receive into: this part's own tensors where it has them.

        Raises `UsageError` where this part is built differently from the sender's.
        """
        return [spec.allocate() for spec in specs]

    def accept(self, document: Any, tensors: Sequence[Tensor], /) -> None:
        """Load the received document and tensors."""
        self._thing.load_state_dict(join(document, tensors))

    def has_skipped(self) -> bool:
        """Return whether this is a gradient scaler that has skipped a step since `keep`.

        It then has lowered its scale (https://docs.pytorch.org/docs/stable/amp.html).
        """
        if not hasattr(self._thing, "get_scale") or "scale" not in (self._kept or ()):
            return False
        return bool(self._thing.get_scale() < self._kept["scale"])


class ModulePart(StatePart):
    """A module: parameters are large, buffers are small."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        # Walking the modules at each commit would cost more than the copies themselves.
        self._owners = [part._buffers for part in module.modules()]
        self._live: list[Tensor] = []  # the buffers at the last commit
        self._shapes: list[torch.Size] = []
        self._copies: list[Tensor] = []
        self._large = _Snapshot()  # of the parameters

    def keep(self, large: bool = False) -> None:
        """Copy the buffers, into the same copies as long as the buffers stay the same objects."""
        live = [b for owner in self._owners if owner for b in owner.values() if b is not None]
        shapes = list(map(_SHAPE, live))
        if shapes == self._shapes and all(map(is_, live, self._live)):
            _copy_all(self._copies, live)
        else:
            self._live, self._shapes = live, shapes
            self._copies = [buffer.detach().clone() for buffer in live]
        if large:
            self._large.take(list(self._thing.parameters()))

    def roll_back(self, large: bool = False) -> None:
        """Put the buffers and, with `large`, the parameters back, in place."""
        _copy_all(self._live, self._copies)
        if large:
            _copy_all(self._large.live, self._large.copies)

    def outgoing(self) -> Outgoing:
        """Return parameters and buffers by name, and the extra state of modules."""
        document, tensors = apart(self._named(), self._name)
        state = self._thing.state_dict().items()
        extra = {key: value for key, value in state if key.split(".")[-1] == "_extra_state"}
        return {"tensors": document, "extra": extra}, tensors

    def places(self, document: Any, specs: Sequence[TensorSpec], /) -> list[Tensor]:
        """Return this module's own tensors."""
        names, mine = apart(self._named())
        kinds = [TensorSpec.of(tensor)[:2] for _, tensor in mine]
        if names != document["tensors"] or kinds != [spec[:2] for spec in specs]:
            raise UsageError(
                f"{self._name} is built differently on the worker that holds the trained state: "
                "parameters or buffers differ in name, shape or dtype; "
                "build the same model on every worker, whatever its rank"
            )
        return [tensor for _, tensor in mine]

    def accept(self, document: Any, _tensors: Sequence[Tensor], /) -> None:
        """Load the extra state; parameters and buffers were received in place."""
        if document["extra"]:
            self._thing.load_state_dict(document["extra"], strict=False)

    def _named(self) -> dict[str, Tensor]:
        return {**dict(self._thing.named_parameters()), **dict(self._thing.named_buffers())}


class OptimizerPart(StatePart):
    """An optimizer: its state is large; learning rates and other settings of groups are small."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        super().__init__(name, optimizer)
        self._document: Any = None  # of the state, without its tensors
        self._large = _Snapshot()  # of these

    def keep(self, large: bool = False) -> None:
        """Copy the settings of each parameter group and, with `large`, the state."""
        self._kept = [
            {
                key: value if type(value) in IMMUTABLE else copied(value)
                for key, value in group.items()
                if key != "params"
            }
            for group in self._thing.param_groups
        ]
        if large:
            document, tensors = apart(self._thing.state_dict())
            self._document = copied(document)
            self._large.take([tensor for _, tensor in tensors])

    def roll_back(self, large: bool = False) -> None:
        """Put the settings and, with `large`, the state of every parameter back."""
        for group, kept in zip(self._thing.param_groups, self._kept, strict=True):
            group.update(copied(kept))
        if large:
            copies = [copy.clone() for copy in self._large.copies]  # torch keeps what it loads
            self._load(join(copied(self._document), copies))

    def places(self, document: Any, specs: Sequence[TensorSpec], /) -> list[Tensor]:
        """Return new tensors: this optimizer may not have made its own yet (Adam's are lazy)."""
        groups = [len(group["params"]) for group in self._thing.param_groups]
        placeholders = [torch.empty(0)] * len(specs)
        theirs = [len(g["params"]) for g in join(document, placeholders)["param_groups"]]
        if groups != theirs:
            raise UsageError(
                f"{self._name} has parameter groups of {groups} parameters, on the worker that "
                f"holds the trained state {theirs}; build the same optimizer on every worker"
            )
        return super().places(document, specs)

    def accept(self, document: Any, tensors: Sequence[Tensor], /) -> None:
        """Load the received document and tensors."""
        self._load(join(document, tensors))

    def _load(self, state: dict[str, Any]) -> None:
        self._thing.load_state_dict(state)
        # torch casts floating state to its parameter's dtype; put state of another dtype back.
        parameters = [p for group in self._thing.param_groups for p in group["params"]]
        for index, values in state["state"].items():
            mine = self._thing.state[parameters[index]]
            for key, value in values.items():
                if isinstance(value, Tensor) and mine[key].dtype != value.dtype:
                    mine[key] = value.to(mine[key].device)


class _Snapshot:
    """Copies of tensors, in the same memory as long as the tensors stay of the same kinds."""

    def __init__(self) -> None:
        self.live: list[Tensor] = []  # at the last `take`
        self.copies: list[Tensor] = []
        self._kinds: list[tuple[torch.Size, torch.dtype, torch.device]] = []

    def take(self, live: list[Tensor]) -> None:
        """Copy these tensors."""
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in live]
        if kinds == self._kinds:
            _copy_all(self.copies, live)
        else:
            self._kinds = kinds
            self.copies = [tensor.detach().clone() for tensor in live]
        self.live = live


def part_for(name: str, thing: Any) -> StatePart | None:
    """Return the part that handles `thing`, or None for a plain value."""
    if isinstance(thing, nn.Module):
        return ModulePart(name, thing)
    if isinstance(thing, Optimizer):
        return OptimizerPart(name, thing)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return StatePart(name, thing)
    return None


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy in one call, on a GPU in few launches: models have hundreds of buffers."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)


# ---- optimizer steps ---------------------------------------------------------------------


def count_parameters(models: Sequence[nn.Module]) -> int | None:
    """Return how many parameters models have; None: none, or a lazy one that has no shape yet."""
    unique = {id(each): each for model in models for each in model.parameters()}
    if any(nn.parameter.is_lazy(each) for each in unique.values()):
        return None
    return sum(each.numel() for each in unique.values()) or None


class StepCounter:
    """Counts the steps of optimizers since the last commit, by hooks inside `optimizer.step()`.

    Positions in the data move there too, so weights and positions are never a step apart.
    `steps` counts finished steps, of all optimizers together. `unfinished` counts optimizers that
    are inside `step()`: above zero at rest, a step was interrupted and its tensors are half
    written. `settle` is called before each step: it waits for the gradients, and raises where they
    will never come, so that no optimizer works with them.
    """

    def __init__(self) -> None:
        self.settle: Callable[[], None] = lambda: None  # a state in no world waits for nothing
        self._hooks: list[Any] = []
        self.restart()

    def watch(self, optimizers: Sequence[Optimizer], positions: Sequence[Advancing]) -> None:
        """Count these optimizers from now on, and move these positions with the first one."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [optimizer.register_step_pre_hook(self._before) for optimizer in optimizers]
        self._hooks += [optimizer.register_step_post_hook(self._after) for optimizer in optimizers]
        self._optimizers, self._positions = optimizers, positions

    def restart(self) -> None:
        """Count from zero: the tensors are again those of a commit."""
        self.steps = self.unfinished = 0

    def at_rest(self) -> bool:
        """Return whether no optimizer has touched a tensor since the last commit."""
        return self.steps == 0 and self.unfinished == 0

    def advance(self) -> None:
        """Move the positions: a batch was used up."""
        for position in self._positions:
            position.advance()

    def _before(self, *_: Any) -> None:
        self.settle()
        self.unfinished += 1

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self.unfinished -= 1
        self.steps += 1
        if optimizer is self._optimizers[0]:
            self.advance()
