"""The parts of a state: how each kind of object is kept, rolled back, sent and received.

`state` holds one part for each object it was given. A commit copies the *small* things of a part
(buffers, learning rates, what `state_dict()` of a scheduler or sampler returns). The *large* ones
(parameters, the optimizer's own tensors) change only in `optimizer.step()`, so a commit need not
copy them; only a `snapshot=True` state does.

For sending, a part becomes a document and a list of tensors. The receiver makes the tensors to
receive into from the document, so that parameters are written in place.
"""

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.values import TensorKind, apart, copied, is_immutable, join

_SHAPE = attrgetter("shape")
_EXTRA = "_extra_state"  # torch's key for it
Outgoing = tuple[Any, list[tuple[str, Tensor]]]  # a document; name and tensor of each index in it


class TensorSpec(TensorKind, frozen=True, array_like=True):
    """Dtype, shape and type of device ("cpu", "cuda") of a tensor that a receiver allocates."""

    device: str

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Return the spec of a tensor."""
        kind = TensorKind.of(tensor)
        return cls(kind.dtype, kind.shape, tensor.device.type)

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor has this dtype and shape, on any device."""
        return TensorKind(self.dtype, self.shape) == TensorKind.of(tensor)

    def allocate(self, device: str | None = None) -> Tensor:
        """Return an uninitialised tensor, on `device` or this process's device of the same type.

        Raises `UsageError` for a dtype that this version of torch does not have.
        """
        return torch.empty(self.shape, dtype=self.torch_dtype, device=device or self.device)


class StatePart:
    """Any object with `state_dict()` and `load_state_dict()`, all of it small: a scheduler, …"""

    def __init__(self, name: str, thing: Any) -> None:
        self._name, self._thing = name, thing
        self._kept: Any = None

    def keep(self) -> None:
        """Copy the small things, at a commit."""
        self._kept = copied(self._thing.state_dict())

    def roll_back(self) -> None:
        """Put the small things back to what `keep` copied."""
        self._thing.load_state_dict(copied(self._kept))

    def keep_large(self) -> None:
        """Copy the large things as well."""

    def roll_back_large(self) -> None:
        """Put the large things back."""

    def outgoing(self) -> Outgoing:
        """Return a document of all of it, and the tensors that it refers to."""
        return apart(self._thing.state_dict(), self._name)

    def places(self, _document: Any, specs: Sequence[TensorSpec], /) -> list[Tensor]:
        """Return the tensors to receive into; those of this part's own where it has them.

        Raises `UsageError` where this part is built differently from the sender's.
        """
        return [spec.allocate() for spec in specs]

    def accept(self, document: Any, tensors: Sequence[Tensor], /) -> None:
        """Load what has arrived."""
        self._thing.load_state_dict(join(document, tensors))

    def has_skipped(self) -> bool:
        """Return whether this is a gradient scaler that has skipped a step since `keep`.

        It then has lowered its scale (https://docs.pytorch.org/docs/stable/amp.html).
        """
        if not isinstance(self._kept, dict) or "scale" not in self._kept:
            return False
        return hasattr(self._thing, "get_scale") and bool(
            self._thing.get_scale() < self._kept["scale"]
        )


class ModulePart(StatePart):
    """A module: parameters are large, buffers are small."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        # Walking the modules at each commit would cost more than the copies themselves.
        self._owners = [part._buffers for part in module.modules()]
        self._live: list[Tensor] = []  # the buffers at the last commit
        self._kept: list[Tensor] = []  # their copies
        self._shapes: list[torch.Size] = []
        self._large: list[tuple[Tensor, Tensor]] = []

    def keep(self) -> None:
        """Copy the buffers, into the same copies as long as the buffers stay the same objects."""
        live = [b for owner in self._owners if owner for b in owner.values() if b is not None]
        if not live and not self._kept:
            return
        same = len(live) == len(self._live) and all(map(is_, live, self._live))
        shapes = list(map(_SHAPE, live))
        if same and shapes == self._shapes:
            _copy_all(self._kept, live)
        else:
            self._live, self._shapes = live, shapes
            self._kept = [buffer.detach().clone() for buffer in live]

    def roll_back(self) -> None:
        """Put the buffers back, in place."""
        _copy_all(self._live, self._kept)

    def keep_large(self) -> None:
        """Copy the parameters."""
        self._large = [(p, p.detach().clone()) for p in self._thing.parameters()]

    def roll_back_large(self) -> None:
        """Put the parameters back, in place."""
        _copy_all([live for live, _ in self._large], [copy for _, copy in self._large])

    def outgoing(self) -> Outgoing:
        """Return parameters and buffers by name, and what modules keep as extra state."""
        document, tensors = apart(self._named(), self._name)
        extra = {
            f"{prefix}.{_EXTRA}" if prefix else _EXTRA: module.get_extra_state()
            for prefix, module in self._thing.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        return {"tensors": document, "extra": extra}, tensors

    def places(self, document: Any, specs: Sequence[TensorSpec], /) -> list[Tensor]:
        """Return this module's own tensors."""
        names, mine = apart(self._named())
        if names != document["tensors"] or not all(
            spec.fits(tensor) for (_, tensor), spec in zip(mine, specs, strict=True)
        ):
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


class GroupSettings:
    """A copy of a parameter group's settings: learning rate, momentum, flags."""

    def __init__(self, group: dict[str, Any]) -> None:
        settings = {key: value for key, value in group.items() if key != "params"}
        self._immutable = all(map(is_immutable, settings.values()))
        self._values = settings if self._immutable else copied(settings)

    def still_of(self, group: dict[str, Any]) -> bool:
        """Return whether the group certainly has these settings yet.

        True only where all of them are the same objects, and none of them can change.
        """
        values = self._values
        same = self._immutable and len(group) == len(values) + 1
        return same and all(map(is_, values.values(), map(group.get, values)))

    def fresh(self) -> dict[str, Any]:
        """Return a copy of the settings that a group can own."""
        return {key: copied(value) for key, value in self._values.items()}


class OptimizerPart(StatePart):
    """An optimizer: its state is large; learning rates and other settings of groups are small."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        super().__init__(name, optimizer)
        self._kept: list[GroupSettings] = []
        self._large: dict[str, Any] | None = None

    def keep(self) -> None:
        """Copy the settings of each parameter group that has changed since the last commit."""
        groups, kept = self._thing.param_groups, self._kept
        if len(groups) != len(kept):
            self._kept = [GroupSettings(group) for group in groups]
            return
        for index, group in enumerate(groups):
            if not kept[index].still_of(group):
                kept[index] = GroupSettings(group)

    def roll_back(self) -> None:
        """Put the settings back."""
        for group, kept in zip(self._thing.param_groups, self._kept, strict=True):
            group.update(kept.fresh())

    def keep_large(self) -> None:
        """Copy the state of every parameter."""
        self._large = copied(self._thing.state_dict())

    def roll_back_large(self) -> None:
        """Put the state of every parameter back."""
        if self._large is not None:
            self._load(copied(self._large))

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
        """Load what has arrived."""
        self._load(join(document, tensors))

    def _load(self, state: dict[str, Any]) -> None:
        self._thing.load_state_dict(state)
        # torch casts floating state to its parameter's dtype; state kept in another is put back.
        parameters = [p for group in self._thing.param_groups for p in group["params"]]
        for index, values in state["state"].items():
            mine = self._thing.state[parameters[index]]
            for key, value in values.items():
                if isinstance(value, Tensor) and mine[key].dtype != value.dtype:
                    mine[key] = value.to(mine[key].device)


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
