"""The part of a module: parameters, buffers, extra state, and the flags of training."""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.message import Reader, Writer
from elastic_driver.worker.state_sync.part import Named, Outgoing, StatePart, names_in
from elastic_driver.worker.state_sync.taking import copied
from elastic_driver.worker.state_sync.values import TensorSpec, UnkeptError

_flags = torch.Tensor.requires_grad.__get__
_training = attrgetter("training")


class _Walk(NamedTuple):
    """A module and all inside, as they were at one look."""

    modules: list[nn.Module]
    paths: list[str]
    owners: list[dict[str, Any]]  # the three dictionaries of each module
    contents: list[dict[str, Any]]  # copies of these
    live: list[Any]  # all their values, one behind the other
    parameters: list[tuple[str, nn.Parameter]]
    buffers: Named
    extra: list[tuple[str, nn.Module]]  # modules with an extra state

    @classmethod
    def of(cls, root: nn.Module) -> "_Walk":
        found = list(root.named_modules())
        modules, paths = [module for _, module in found], [path for path, _ in found]
        owners = [d for m in modules for d in (m._parameters, m._buffers, m._modules)]
        extra = [(p, m) for p, m in found if type(m).get_extra_state is not _NO_EXTRA]
        return cls(
            modules,
            paths,
            owners,
            [dict(owner) for owner in owners],
            list(chain.from_iterable(map(dict.values, owners))),
            list(root.named_parameters()),
            list(root.named_buffers()),
            extra,
        )

    def is_current(self) -> bool:
        """Return whether nothing was added, removed or replaced since."""
        live = list(chain.from_iterable(map(dict.values, self.owners)))
        return len(live) == len(self.live) and all(map(is_, live, self.live))


_NO_EXTRA = nn.Module.get_extra_state


class ModulePart(StatePart):
    """A module: parameters, buffers, extra state, and the flags `training` and `requires_grad`."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._walk = _Walk.of(module)
        self._committed = self._walk
        self._attributes: list[Any] | None = None  # of a module that keeps nothing

    def _refresh(self) -> None:
        if not self._walk.is_current():
            self._walk, self._has_changed = _Walk.of(self.thing), True

    def tensors(self) -> Named:
        """Return parameters and buffers by name. Raises `UnkeptError` for one of another kind."""
        for path, tensor in chain(self._walk.parameters, self._walk.buffers):
            if nn.parameter.is_lazy(tensor) or tensor.layout != torch.strided:
                _require_tensor(f"{self.name}.{path}", tensor)
        return [
            (f"{self.name}.{n}", t) for n, t in chain(self._walk.parameters, self._walk.buffers)
        ]

    def buffers(self) -> list[Tensor]:
        """Return the buffers of now."""
        return [buffer for _, buffer in self._walk.buffers]

    def keep(self) -> None:
        """Note the structure, and copy flags and extra state."""
        walk = self._committed = self._walk
        self._require_kept(walk)
        extra = [(path, copied(module.get_extra_state())) for path, module in walk.extra]
        flags = [bool(_flags(p)) for _, p in walk.parameters]
        self._kept = extra, list(map(_training, walk.modules)), flags

    def roll_back(self) -> None:
        """Put back the structure, flags and extra state; `leaves` does so for the tensors."""
        walk, (extra, training, flags) = self._committed, self._kept
        if not walk.is_current():
            for owner, content in zip(walk.owners, walk.contents, strict=True):
                owner.clear()
                owner.update(content)
        if self._walk is not walk:
            self._walk, self._has_changed = walk, True
        for module, flag in zip(walk.modules, training, strict=True):
            module.training = flag
        for (_, parameter), flag in zip(walk.parameters, flags, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        for (_, module), (_, state) in zip(walk.extra, extra, strict=True):
            module.set_extra_state(copied(state))

    def values(self) -> list[tuple[str, Any]]:
        """See `StatePart.values`."""
        extra, training, flags = self._kept
        found = [(f"{self.name}.{path} (extra state)", state) for path, state in extra]
        found.append((f"training flags of {self.name!r}", training))
        found.append((f"requires_grad of {self.name!r}", flags))
        return found

    def outgoing(self) -> Outgoing:
        """Return the tensors by name, flags, and extra state."""
        walk, writer = self._walk, Writer()
        tensors = {n: t.detach() for n, t in chain(walk.parameters, walk.buffers)}
        flags = [bool(_flags(p)) for _, p in walk.parameters]
        extra = {p: m.get_extra_state() for p, m in walk.extra}
        document = [
            self._class(),
            writer.write(tensors, self.name),
            [flags, list(map(_training, walk.modules))],
            writer.write(extra, f"{self.name} (extra state)"),
            self._transient(),
        ]
        return document, writer.tensors

    def places(self, document: Any, specs: Sequence[TensorSpec], /) -> list[Tensor]:
        """Return this module's own tensors; buffers that it lacks are made."""
        self._require_class(document[0])
        self._refresh()
        names, walk = names_in(document[1]), self._walk
        mine = dict(chain(walk.parameters, walk.buffers))
        for name, spec in zip(names, specs, strict=False):
            if name not in mine and name in document[4]:
                self._add_buffer(name, spec, persistent=document[4][name])
                self._refresh()
                mine = dict(chain(self._walk.parameters, self._walk.buffers))
        self._require_same(names, mine, specs)
        tail = [spec.allocate() for spec in specs[len(names) :]]  # of the extra state
        return [mine[name] for name in names] + tail

    def accept(self, document: Any, tensors: Sequence[Tensor], /) -> None:
        """Load flags and extra state; parameters and buffers were received in place."""
        flags, training = document[2]
        walk = self._walk
        if len(training) != len(walk.modules) or len(flags) != len(walk.parameters):
            raise UsageError(_OTHERWISE.format(name=self.name, what="it has other submodules"))
        for module, flag in zip(walk.modules, training, strict=True):
            module.training = flag
        for (_, parameter), flag in zip(walk.parameters, flags, strict=True):
            parameter.requires_grad_(flag)
        extra = Reader(tensors, what=self.name).read(document[3])
        for path, module in walk.extra:
            if path in extra:
                module.set_extra_state(extra[path])

    def _transient(self) -> dict[str, bool]:
        """Return, for each buffer, whether it is persistent."""
        found = {}
        for path, module in zip(self._walk.paths, self._walk.modules, strict=True):
            prefix = f"{path}." if path else ""
            for name in module._buffers:
                found[prefix + name] = name not in module._non_persistent_buffers_set
        return found

    def _add_buffer(self, name: str, spec: TensorSpec, *, persistent: bool) -> None:
        path, _, own = name.rpartition(".")
        owner = dict(zip(self._walk.paths, self._walk.modules, strict=True)).get(path)
        if owner is not None:
            owner._buffers.pop(own, None)
            owner.register_buffer(own, spec.allocate(), persistent=persistent)

    def _require_same(
        self, names: Sequence[str], mine: dict[str, Tensor], specs: Sequence[TensorSpec]
    ) -> None:
        lacks = next((name for name in names if name not in mine), None)
        more = next((name for name in mine if name not in names), None)
        if lacks or more:
            what = f"this one has no {lacks!r}" if lacks else f"only this one has {more!r}"
            raise UsageError(_OTHERWISE.format(name=self.name, what=what))
        for name, spec in zip(names, specs, strict=False):
            kind = TensorSpec.of(mine[name])
            if kind[:2] != spec[:2]:
                what = f"{name!r} is {_shown(kind)} here and {_shown(spec)} there"
                raise UsageError(_OTHERWISE.format(name=self.name, what=what))

    def _require_kept(self, walk: _Walk) -> None:
        """Raise `UnkeptError` for a module that keeps nothing, once its attributes change."""
        if walk.parameters or walk.buffers or walk.extra:
            return
        attributes = [v for m in walk.modules for v in vars(m).values()]
        before, self._attributes = self._attributes, attributes
        plain = [
            a for a, b in zip(attributes, before or (), strict=False) if a is not b and _is_plain(a)
        ]
        if before is not None and plain:
            raise UnkeptError(
                self.name,
                f"it is a module ({self._class()}) whose plain attributes change, and which keeps "
                "none of them: it has no parameters, buffers or extra state",
                "register them as buffers, or define get_extra_state() and set_extra_state()",
            )


_OTHERWISE = (
    "{name} is built differently on the worker that holds the trained state: {what}; build the "
    "same model on every worker, whatever its rank"
)


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | Tensor | list | dict | set | tuple)


def _require_tensor(name: str, tensor: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        problem, hint = "it has no shape yet (it is lazy)", "run one batch before the first commit"
    else:
        problem, hint = f"it is of layout {tensor.layout}", "keep dense tensors in the state"
    raise UnkeptError(name, problem, hint)


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
