"""The parts of a script's objects: those of modules and of gradient scalers, and who gets which.

The part of a module has its parameters, buffers, extra state, and the flags of training. The part
of a gradient scaler has its state, and how far it is in the step of each optimizer: `unscale_()`
notes that an optimizer's gradients are unscaled, and what was found in them, until `update()`. No
`state_dict()` has that. A step that was begun and is done again would find it: `step()` would take
new gradients for unscaled ones, and `unscale_()` would refuse to work twice.
"""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from elastic_driver.errors import UsageError
from elastic_driver.worker import torch_seams
from elastic_driver.worker.state_sync.contents import TensorSpec, UnkeptError
from elastic_driver.worker.state_sync.message import Reader, Writer
from elastic_driver.worker.state_sync.optimizer_part import OptimizerPart
from elastic_driver.worker.state_sync.part import (
    ATTRIBUTES,
    NEVER,
    Attribute,
    Attributes,
    Named,
    Outgoing,
    Rest,
    StatePart,
    Structure,
    looks_of,
    names_in,
    require_tensor,
)
from elastic_driver.worker.state_sync.taking import copied
from elastic_driver.worker.torch_seams import (
    WithStatistics,
    buffers_of,
    children_of,
    parameters_of,
    unsaved_buffers_of,
)

_END = object()
_NO_EXTRA = nn.Module.get_extra_state
_flags = torch.Tensor.requires_grad.__get__
_training = attrgetter("training")


class _Walk(NamedTuple):
    """A module and all inside, as they were at one look."""

    modules: list[nn.Module]
    paths: list[str]
    owners: list[dict[str, Any]]  # the three dictionaries of each module
    contents: list[dict[str, Any]]  # copies of these
    live: list[Any]  # all their values, one behind the other, and an end
    parameters: list[tuple[str, nn.Parameter]]
    buffers: Named
    trained: list[nn.Parameter]  # the parameters alone
    extra: list[tuple[str, nn.Module]]  # modules with an extra state

    @classmethod
    def of(cls, root: nn.Module) -> "_Walk":
        found = list(root.named_modules())
        modules = [module for _, module in found]
        paths = [path for path, _ in found]
        owners = [d for m in modules for d in (parameters_of(m), buffers_of(m), children_of(m))]
        extra = [(p, m) for p, m in found if type(m).get_extra_state is not _NO_EXTRA]
        return cls(
            modules,
            paths,
            owners,
            [dict(owner) for owner in owners],
            [*chain.from_iterable(map(dict.values, owners)), _END],
            list(root.named_parameters()),
            list(root.named_buffers()),
            list(root.parameters()),
            extra,
        )

    def is_current(self) -> bool:
        """Return whether nothing was added, removed or replaced since."""
        live = chain.from_iterable(map(dict.values, self.owners))
        return all(map(is_, chain(live, (_END,)), self.live))


class _Kept(NamedTuple):
    """What a commit keeps of a module."""

    walk: _Walk
    training: list[bool]  # of each module
    flags: list[bool]  # `requires_grad` of each parameter
    extra: list[Any]
    own: list[Attribute]


def _is_inexact(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


class ModulePart(StatePart):
    """A module: parameters, buffers, extra state, and the flags `training` and `requires_grad`."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._walk = _Walk.of(module)
        self._unchanging = _Unchanging(name, self._walk.modules)
        self._attributes = Attributes(
            name, list(zip(self._walk.paths, self._walk.modules, strict=True))
        )

    def _refresh(self) -> None:
        if not self._walk.is_current():
            self._walk = _Walk.of(self.thing)
            self._has_changed = True
            self._unchanging = _Unchanging(self.name, self._walk.modules)
            self._attributes.follow(list(zip(self._walk.paths, self._walk.modules, strict=True)))

    def structure(self) -> Structure:
        """See `StatePart.structure`."""
        walk = self._walk
        return Structure(walk.owners, (), ((_training, walk.modules), (_flags, walk.trained)))

    def tensors(self) -> Named:
        """Return parameters and buffers by name. Raises `UnkeptError` for one of another kind."""
        return [
            (f"{self.name}.{n}", t) for n, t in chain(self._walk.parameters, self._walk.buffers)
        ]

    def buffers(self) -> Named:
        """Return the buffers of now, by their names in the module."""
        return self._walk.buffers

    def unsure_buffers(self) -> list[tuple[str, list[Tensor]]]:
        """Return the floating-point buffers of each module that has any, by the module's path.

        Nobody knows whether ranks have them alike. Those of torch's own normalisations and
        observers are left out: they are statistics of each rank's batches.
        """
        found = []
        for path, module in zip(self._walk.paths, self._walk.modules, strict=True):
            own = [b for b in buffers_of(module).values() if b is not None and _is_inexact(b)]
            if own and not isinstance(module, WithStatistics):
                found.append((f"{self.name}.{path}" if path else self.name, own))
        return found

    def require_kept(self) -> None:
        """See `StatePart.require_kept`."""
        for name, tensor in self.tensors():
            require_tensor(name, tensor)

    def take(self) -> _Kept:
        """Return the structure, flags, and a copy of the extra state."""
        walk = self._walk
        before: _Kept | None = self.kept
        if self._keeps_nothing():
            self._unchanging.require_unchanged()
        own = self._attributes.take()
        training = list(map(_training, walk.modules))
        flags = list(map(_flags, walk.trained))
        known = before if before is not None and before.walk is walk else None
        if known is not None and known[1:] == (training, flags, [], []) and not (walk.extra or own):
            return known
        extra = [copied(module.get_extra_state()) for _, module in walk.extra]
        return _Kept(walk, training, flags, extra, own)

    def rest(self) -> Rest:
        """See `StatePart.rest`: there is nothing but tensors and flags."""
        kept: _Kept = self.kept
        if kept.walk is not self._walk or kept.extra or kept.own or self._keeps_nothing():
            return NEVER
        return Rest(self._attributes.rest_until)

    def _keeps_nothing(self) -> bool:
        walk = self._walk
        return not (walk.parameters or walk.buffers or walk.extra)

    def copies(self) -> Any:
        """See `StatePart.copies`."""
        return [self.kept.extra, [each.copy for each in self.kept.own]]

    def roll_back(self) -> None:
        """Put back the structure, flags and extra state; `leaves` does so for the tensors."""
        walk, training, flags, extra, own = self.kept
        if not walk.is_current():
            for owner, content in zip(walk.owners, walk.contents, strict=True):
                owner.clear()
                owner.update(content)
        if self._walk is not walk:
            self._walk, self._has_changed = walk, True
        for module, flag in zip(walk.modules, training, strict=True):
            module.training = flag
        for parameter, flag in zip(walk.trained, flags, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        for (_, module), state in zip(walk.extra, extra, strict=True):
            module.set_extra_state(copied(state))
        self._attributes.put_back(own)

    def values(self) -> list[tuple[str, Any]]:
        """See `StatePart.values`."""
        walk, training, flags, extra, _ = self.kept
        found = [
            (f"{self.name}.{path} (extra state)", state)
            for (path, _), state in zip(walk.extra, extra, strict=True)
        ]
        found.append((f"training flags of {self.name!r}", training))
        found.append((f"requires_grad of {self.name!r}", flags))
        return found

    def outgoing(self) -> Outgoing:
        """Return the tensors by name, flags, and extra state."""
        walk = self._walk
        writer = Writer()
        tensors = {n: t.detach() for n, t in chain(walk.parameters, walk.buffers)}
        flags = list(map(_flags, walk.trained))
        extra = {p: copied(m.get_extra_state()) for p, m in walk.extra}
        document = [
            self._class(),
            writer.write(tensors, self.name),
            [flags, list(map(_training, walk.modules))],
            writer.write(extra, f"{self.name} (extra state)"),
            self._registered(),
            self._attributes.outgoing(writer.tensors),
        ]
        return document, writer.tensors

    def places(self, document: Any, specs: Sequence[TensorSpec], /) -> list[Tensor]:
        """Return this module's own tensors; buffers that it lacks are made."""
        self._require_class(document[0])
        self._refresh()
        names = names_in(document[1])
        registered = document[4]
        theirs = dict(zip(names, specs, strict=False))
        self._require_same({n: spec for n, spec in theirs.items() if n not in registered})
        self._take_over_buffers(theirs, registered)
        self._refresh()
        mine = dict(chain(self._walk.parameters, self._walk.buffers))
        tail = [spec.allocate() for spec in specs[len(names) :]]  # of the extra state
        return [mine[name] for name in names] + tail

    def accept(self, document: Any, tensors: Sequence[Tensor], /) -> None:
        """Load flags and extra state; parameters and buffers were received in place."""
        flags, training = document[2]
        walk = self._walk
        if len(training) != len(walk.modules) or len(flags) != len(walk.parameters):
            raise self._differs("it has other submodules")
        for module, flag in zip(walk.modules, training, strict=True):
            module.training = flag
        for (_, parameter), flag in zip(walk.parameters, flags, strict=True):
            parameter.requires_grad_(flag)
        extra = Reader(tensors, what=self.name).read(document[3])
        for path, module in walk.extra:
            if path in extra:
                module.set_extra_state(extra[path])
        if len(document) > ATTRIBUTES:  # older checkpoints have none
            self._attributes.accept(document[ATTRIBUTES], tensors)

    def _registered(self) -> dict[str, tuple[bool, str]]:
        """Return, for each buffer, whether it is persistent, and the name under which it is sent.

        A tensor may be registered more than once, and is sent once; "": the buffer is None.
        """
        sent = {id(tensor): name for name, tensor in self._walk.buffers}
        found = {}
        for path, module in zip(self._walk.paths, self._walk.modules, strict=True):
            prefix = f"{path}." if path else ""
            for name, tensor in buffers_of(module).items():
                is_persistent = name not in unsaved_buffers_of(module)
                found[prefix + name] = is_persistent, sent.get(id(tensor), "")
        return found

    def _take_over_buffers(
        self, theirs: dict[str, TensorSpec], registered: dict[str, tuple[bool, str]]
    ) -> None:
        """Make the buffers of the sender, drop those that it has no more, and resize the others.

        `registered`: see `_registered`, of the sender.
        """
        owners = dict(zip(self._walk.paths, self._walk.modules, strict=True))
        strange = [name for name in registered if name.rpartition(".")[0] not in owners]
        if strange:
            raise self._differs(f"this one has no {strange[0]!r}")
        for path, owner in owners.items():
            prefix = f"{path}." if path else ""
            for name in [name for name in buffers_of(owner) if prefix + name not in registered]:
                delattr(owner, name)
        made: dict[str, Tensor | None] = {}  # by the name under which they are sent
        for name, (is_persistent, sent_as) in registered.items():
            path, _, own = name.rpartition(".")
            old = buffers_of(owners[path]).pop(own, None)
            spec = theirs.get(sent_as)
            vars(owners[path]).pop(own, None)
            if sent_as in made:
                old = made[sent_as]
            elif old is None or spec is None or any(old is each for each in made.values()):
                old = None if spec is None else spec.allocate()
            elif not spec.fits(old):
                old.data = spec.allocate(old.device.type)
            if sent_as:
                made[sent_as] = old
            owners[path].register_buffer(own, old, persistent=is_persistent)

    def _require_same(self, theirs: dict[str, TensorSpec]) -> None:
        """Raise `UsageError` where the parameters are others than the sender's."""
        mine = dict(self._walk.parameters)
        lacks = next((name for name in theirs if name not in mine), None)
        more = next((name for name in mine if name not in theirs), None)
        if lacks or more:
            raise self._differs(
                f"this one has no {lacks!r}" if lacks else f"only this one has {more!r}"
            )
        for name, spec in theirs.items():
            kind = TensorSpec.of(mine[name])
            if kind[:2] != spec[:2]:
                raise self._differs(f"{name!r} is {_shown(kind)} here and {_shown(spec)} there")

    def _differs(self, what: str) -> UsageError:
        return UsageError(
            f"{self.name} is built differently on the worker that holds the trained state: {what}; "
            "build the same model on every worker, whatever its rank"
        )


class OwnStatePart(StatePart):
    """A module without parameters and buffers that has a `state_dict()` of its own: a metric, …"""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._attributes = _Unchanging(name, list(module.modules()))

    def take(self) -> Any:
        """See `StatePart.take`. Raises `UnkeptError` where the module keeps nothing."""
        state = super().take()
        if not state:
            self._attributes.require_unchanged()
        return state


class _Unchanging:
    """The plain attributes of modules that keep none of them: they must not change."""

    def __init__(self, name: str, modules: Sequence[nn.Module]) -> None:
        self._name, self._modules = name, modules
        self._first: Any = None

    def require_unchanged(self) -> None:
        """Raise `UnkeptError` where they are not what they were at the first call."""
        looks = list(map(looks_of, self._modules))
        if self._first is None:
            self._first = looks
        elif looks != self._first:
            raise UnkeptError(
                self._name,
                f"it is a module ({type(self._modules[0]).__qualname__}) whose plain attributes "
                "change, and which keeps none of them: it has no parameters, buffers or extra "
                "state",
                "register them as buffers, or define get_extra_state() and set_extra_state()",
            )


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


class _KeptScaler(NamedTuple):
    """What a commit keeps of a scaler."""

    state: dict[str, Any]  # its own, with tensors in place of numbers that are on its device
    steps: dict[int, dict[str, Any]]  # by identity of an optimizer; between steps there are none

    def plain(self) -> dict[str, Any]:
        """Return the state as `state_dict()` would have."""
        return {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in self.state.items()
        }


class ScalerPart(StatePart):
    """A `torch.amp.GradScaler`."""

    def take(self) -> _KeptScaler:
        """See `StatePart.take`. Waits for no device, as `state_dict()` would."""
        steps = torch_seams.scaler_steps(self.thing)
        return _KeptScaler(self._read(), {key: dict(step) for key, step in steps.items()})

    def _read(self) -> dict[str, Any]:
        keeps_itself = type(self.thing).state_dict is not GradScaler.state_dict
        found = None if keeps_itself else torch_seams.scaler_state(self.thing)
        state: dict[str, Any] = super().take() if found is None else found
        return state

    def roll_back(self) -> None:
        """See `StatePart.roll_back`."""
        kept: _KeptScaler = self.kept
        self.thing.load_state_dict(kept.plain())
        self._put(kept.steps)

    def values(self) -> list[tuple[str, Any]]:
        """See `StatePart.values`."""
        kept: _KeptScaler = self.kept
        return [(f"{self.name}.{key}", value) for key, value in kept.plain().items()]

    def accept(self, document: Any, tensors: Sequence[Tensor], /) -> None:
        """See `StatePart.accept`: the sender is between two steps."""
        super().accept(document, tensors)
        self._put({})

    def _put(self, kept: dict[int, dict[str, Any]]) -> None:
        steps = torch_seams.scaler_steps(self.thing)
        steps.clear()
        steps.update({key: dict(step) for key, step in kept.items()})


def part_for(name: str, thing: Any) -> StatePart | None:
    """Return the part that handles `thing`, or None for a plain value."""
    if isinstance(thing, nn.Module):
        keeps_itself = type(thing).state_dict is not nn.Module.state_dict
        empty = not (any(True for _ in thing.parameters()) or any(True for _ in thing.buffers()))
        return OwnStatePart(name, thing) if keeps_itself and empty else ModulePart(name, thing)
    if isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict:
        return OptimizerPart(name, thing)
    if isinstance(thing, GradScaler):
        return ScalerPart(name, thing)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return StatePart(name, thing)
    return None
