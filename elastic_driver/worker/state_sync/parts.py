"""How each kind of object in a state is kept at a commit, rolled back, sent and received.

`state` holds one part for each thing it was given. A part tells apart what a commit copies (the
*small* things: buffers, learning rates, whatever `state_dict()` of a scheduler or sampler says)
from what only the optimizer changes and a commit need not copy (the *large* ones: parameters
and the optimizer's own tensors), which only a `snapshot=True` state keeps copies of.

For sending, a part turns into a document and a list of tensors; the receiver makes the list of
tensors to write into from the document, so that parameters are written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.copying import copied, lasts
from elastic_driver.worker.state_sync.transfer import apart, join


class Spec(Struct, frozen=True, array_like=True):
    """What a receiver must know to make room for a tensor."""

    dtype: str
    shape: tuple[int, ...]
    device: str  # its type: "cpu", "cuda"

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """The spec of a tensor."""
        return cls(
            str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device.type
        )

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has this dtype and shape, on whatever device."""
        mine = Spec.of(tensor)
        return (mine.dtype, mine.shape) == (self.dtype, self.shape)

    def room(self, device: str | None = None) -> Tensor:
        """An uninitialised tensor, on `device` or this process's device of the same type.

        Raises `UsageError` for a type of number this version of torch does not have.
        """
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"no torch.{self.dtype} here; use one version of torch on every host")
        return torch.empty(self.shape, dtype=dtype, device=device or self.device)


Parcel = tuple[Any, list[Tensor]]  # a document, and the tensors that it names by index


class Part(Protocol):
    """One named thing in a state."""

    def keep(self) -> None:
        """A commit: copy the small things."""

    def roll_back(self) -> None:
        """Put the small things back to what `keep` copied."""

    def keep_large(self) -> None:
        """Copy the large things as well."""

    def roll_back_large(self) -> None:
        """Put the large things back."""

    def outgoing(self) -> Parcel:
        """A document of all of it, and the tensors it refers to."""

    def places(self, document: Any, specs: Sequence[Spec], /) -> list[Tensor]:
        """The tensors to receive into; those of this part's own where it has them."""

    def accept(self, document: Any, tensors: Sequence[Tensor], /) -> None:
        """Take over what has arrived."""

    def has_skipped(self) -> bool:
        """Whether this is a gradient scaler that has skipped a step since `keep`."""


class _Steady:
    """What most parts have nothing to do for."""

    def has_skipped(self) -> bool:
        """Whether this is a gradient scaler that has skipped a step since `keep`."""
        return False


class ModulePart(_Steady):
    """A module: parameters are large, buffers are small."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
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
        self._large = [(p, p.detach().clone()) for p in self._module.parameters()]

    def roll_back_large(self) -> None:
        """Put the parameters back, in place."""
        _copy_all([live for live, _ in self._large], [copy for _, copy in self._large])

    def outgoing(self) -> Parcel:
        """Parameters and buffers by name, and what modules keep as extra state."""
        document, tensors = apart(self._named())
        return {"tensors": document, "extra": self._extra()}, tensors

    def places(self, document: Any, specs: Sequence[Spec]) -> list[Tensor]:
        """This module's own tensors; raises `UsageError` where it is built differently."""
        names, mine = apart(self._named())
        if names != document["tensors"] or any(
            not spec.fits(tensor) for tensor, spec in zip(mine, specs, strict=True)
        ):
            raise UsageError(
                f"{self._name} is built differently on the worker that holds the trained state: "
                "parameters or buffers differ in name, shape or dtype; "
                "build the same model on every worker, whatever its rank"
            )
        return mine

    def accept(self, document: Any, _tensors: Sequence[Tensor], /) -> None:
        """Parameters and buffers are there already; load the extra state."""
        if document["extra"]:
            self._module.load_state_dict(document["extra"], strict=False)

    def _named(self) -> dict[str, Tensor]:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def _extra(self) -> dict[str, Any]:
        return {
            f"{prefix}.{_EXTRA}" if prefix else _EXTRA: module.get_extra_state()
            for prefix, module in self._module.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }


_SHAPE = attrgetter("shape")
_EXTRA = "_extra_state"  # torch's key for it


class Settings:
    """A copy of a parameter group's settings: learning rate, momentum, flags."""

    __slots__ = ("_lasting", "_values")

    def __init__(self, group: dict[str, Any]) -> None:
        settings = {key: value for key, value in group.items() if key != "params"}
        self._lasting = all(map(lasts, settings.values()))
        self._values = settings if self._lasting else copied(settings)

    def still_of(self, group: dict[str, Any]) -> bool:
        """Whether the group certainly has these settings yet: the same objects, none of which can
        change."""
        values = self._values
        same = self._lasting and len(group) == len(values) + 1
        return same and all(map(is_, values.values(), map(group.get, values)))

    def fresh(self) -> dict[str, Any]:
        """The settings, for a group to have as its own."""
        return {key: copied(value) for key, value in self._values.items()}


class OptimizerPart(_Steady):
    """An optimizer: its state is large; learning rates and other settings of groups are small."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self._name, self._optimizer = name, optimizer
        self._kept: list[Settings] = []
        self._large: dict[str, Any] | None = None

    def keep(self) -> None:
        """Copy the settings of each parameter group that has others than at the last commit."""
        groups, kept = self._optimizer.param_groups, self._kept
        if len(groups) != len(kept):
            self._kept = [Settings(group) for group in groups]
            return
        for index, group in enumerate(groups):
            if not kept[index].still_of(group):
                kept[index] = Settings(group)

    def roll_back(self) -> None:
        """Put the settings back."""
        for group, kept in zip(self._optimizer.param_groups, self._kept, strict=True):
            group.update(kept.fresh())

    def keep_large(self) -> None:
        """Copy the state of every parameter."""
        self._large = copied(self._optimizer.state_dict())

    def roll_back_large(self) -> None:
        """Put the state of every parameter back."""
        if self._large is not None:
            self._load(copied(self._large))

    def outgoing(self) -> Parcel:
        """`state_dict()` with its tensors taken out."""
        return apart(self._optimizer.state_dict())

    def places(self, document: Any, specs: Sequence[Spec]) -> list[Tensor]:
        """Fresh tensors: this optimizer may not have made its own yet (Adam's are lazy)."""
        groups = [len(group["params"]) for group in self._optimizer.param_groups]
        placeholders = [torch.empty(0)] * len(specs)
        theirs = [len(g["params"]) for g in join(document, placeholders)["param_groups"]]
        if groups != theirs:
            raise UsageError(
                f"{self._name} has parameter groups of {groups} parameters, on the worker that "
                f"holds the trained state {theirs}; build the same optimizer on every worker"
            )
        return [spec.room() for spec in specs]

    def accept(self, document: Any, tensors: Sequence[Tensor]) -> None:
        """Load what has arrived."""
        self._load(join(document, tensors))

    def _load(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)
        # torch casts floating state to its parameter's dtype; state kept in another is put back.
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for index, values in state["state"].items():
            mine = self._optimizer.state[parameters[index]]
            for key, value in values.items():
                if isinstance(value, Tensor) and mine[key].dtype != value.dtype:
                    mine[key] = value.to(mine[key].device)


class StatefulPart:
    """Anything with `state_dict()` and `load_state_dict()`: schedulers, scalers, samplers."""

    def __init__(self, name: str, thing: Any) -> None:
        self._name, self._thing = name, thing
        self._kept: Any = None

    def keep(self) -> None:
        """Copy its state."""
        self._kept = copied(self._thing.state_dict())

    def roll_back(self) -> None:
        """Load the copy back."""
        self._thing.load_state_dict(copied(self._kept))

    def has_skipped(self) -> bool:
        """Whether a scaler has lowered its scale since `keep`: torch's documented sign."""
        get_scale = getattr(self._thing, "get_scale", None)
        if get_scale is None or not isinstance(self._kept, dict) or "scale" not in self._kept:
            return False
        return bool(get_scale() < self._kept["scale"])

    def keep_large(self) -> None:
        """All of it is small."""

    def roll_back_large(self) -> None:
        """All of it is small."""

    def outgoing(self) -> Parcel:
        """Its state with the tensors taken out."""
        return apart(self._thing.state_dict())

    def places(self, _document: Any, specs: Sequence[Spec], /) -> list[Tensor]:
        """Fresh tensors."""
        return [spec.room() for spec in specs]

    def accept(self, document: Any, tensors: Sequence[Tensor]) -> None:
        """Load what has arrived."""
        self._thing.load_state_dict(join(document, tensors))


def part_for(name: str, thing: Any) -> Part | None:
    """The part that handles `thing`, or None for a plain value."""
    if isinstance(thing, nn.Module):
        return ModulePart(name, thing)
    if isinstance(thing, Optimizer):
        return OptimizerPart(name, thing)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return StatefulPart(name, thing)
    return None


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """In one call, on a GPU in few launches: models have hundreds of buffers."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
