"""The parts of a state: modules, optimizers, and other objects that can load their own state.

A part knows what belongs to its object *now*: `look()` walks it at every commit and says whether
its structure has changed. `tensors()` are its leaves that live in memory of their own; whether they
are copied at a commit is decided in `leaves`. Everything else is small and is copied by `keep()`:
flags, settings of parameter groups, extra state, a scheduler's `state_dict()`. `roll_back()` puts
back structure and values, in the script's own objects.

For sending, a part becomes a document of plain data and a list of tensors (`message`).
"""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.message import Reader, Writer
from elastic_driver.worker.state_sync.taking import Taker, copied, put_back
from elastic_driver.worker.state_sync.values import TensorSpec, UnkeptError

Named = list[tuple[str, Tensor]]
Outgoing = tuple[Any, Named]  # a document of plain data; name and tensor of each number in it

_flags = torch.Tensor.requires_grad.__get__
_training = attrgetter("training")


class StatePart:
    """Any object with `state_dict()` and `load_state_dict()`, all of it small: a scheduler, …"""

    def __init__(self, name: str, thing: Any) -> None:
        self.name, self.thing = name, thing
        self._kept: Any = None
        self._has_changed = False  # since the last look

    def look(self) -> bool:
        """Walk the object; return whether its structure is another than at the last look."""
        self._refresh()
        changed, self._has_changed = self._has_changed, False
        return changed

    def _refresh(self) -> None:
        """Follow the structure of now."""

    def tensors(self) -> Named:
        """Return the leaves of this part that `leaves` looks after, by name."""
        return []

    def keep(self) -> None:
        """Copy all small things, at a commit. Raises `UnkeptError` for what cannot be kept."""
        self._kept = copied(self._state())

    def roll_back(self) -> None:
        """Put back the structure and the small things of the last `keep`."""
        self.thing.load_state_dict(copied(self._kept))

    def outgoing(self) -> Outgoing:
        """Return a document of the whole part, and the tensors that the document refers to."""
        writer = Writer()
        return [self._class(), writer.write(self._state(), self.name)], writer.tensors

    def values(self) -> list[tuple[str, Any]]:
        """Return name and value of each small thing that ranks are to have alike."""
        state = self._kept
        if isinstance(state, dict):
            return [(f"{self.name}.{key}", value) for key, value in state.items()]
        return [(self.name, state)]

    def places(self, document: Any, specs: Sequence[TensorSpec], /) -> list[Tensor]:
        """Return the tensors to receive into: this part's own tensors where it has them.

        Raises `UsageError` where this part is built differently from the sender's.
        """
        self._require_class(document[0])
        return [spec.allocate() for spec in specs]

    def accept(self, document: Any, tensors: Sequence[Tensor], /) -> None:
        """Load the received document and tensors."""
        self.thing.load_state_dict(Reader(tensors, what=self.name).read(document[1]))

    def _state(self) -> Any:
        try:
            return self.thing.state_dict()
        except UsageError:
            raise
        except Exception as error:  # a script's own method
            problem = f"its state_dict() has failed ({error})"
            raise UnkeptError(
                self.name, problem, "mend it, or leave it out of the state"
            ) from error

    def _class(self) -> str:
        return type(self.thing).__qualname__

    def _require_class(self, theirs: str) -> None:
        if theirs != self._class():
            raise UsageError(
                f"{self.name} is of the class {self._class()}, in the trained state it is "
                f"{theirs}; build the same objects on every worker"
            )


# ---- modules --------------------------------------------------------------------------------


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
        """Return parameters and buffers by name."""
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
        names, walk = _names_in(document[1]), self._walk
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
        for path, tensor in chain(walk.parameters, walk.buffers):
            if tensor.layout != torch.strided or nn.parameter.is_lazy(tensor):
                _require_tensor(f"{self.name}.{path}", tensor)
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


def _names_in(written: Any) -> list[str]:
    """Return the keys of a dictionary that a `Writer` wrote; all are strings."""
    items = written[2]
    return list(items[: len(items) // 2])


# ---- optimizers -----------------------------------------------------------------------------


class OptimizerPart(StatePart):
    """An optimizer: parameter groups, and what it remembers of each parameter.

    Groups hold parameters by name, so that a receiver can make the same groups of its own.
    """

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        super().__init__(name, optimizer)
        self._live: list[Any] = []
        self._committed: list[Any] = []
        self._named: dict[
            int, str
        ] = {}  # names of all parameters that the state knows, by identity
        self._own: Named = []  # parameters that are in no module of the state
        self._refresh()

    # ---- what it has now

    def parameters(self) -> list[Tensor]:
        """Return the parameters that it trains."""
        return [p for group in self.thing.param_groups for p in group["params"]]

    def _refresh(self) -> None:
        state = self.thing.state
        live = [*self.thing.param_groups, *self.parameters(), None, *state]
        for values in state.values():
            live += values.values() if isinstance(values, dict) else (values,)
        if len(live) != len(self._live) or not all(map(is_, live, self._live)):
            self._live, self._has_changed = live, True

    def know(self, names: dict[int, str]) -> None:
        """Take in the names of the state's parameters, by identity; the others are this part's."""
        self._own = []
        self._named = dict(names)
        for number, parameter in enumerate(self.parameters()):
            if id(parameter) not in self._named:
                self._named[id(parameter)] = f"{self.name}.params.{number}"
                self._own.append((f"{self.name}.params.{number}", parameter))

    def tensors(self) -> Named:
        """Return its tensors for each parameter, and the parameters that are in no module."""
        found = list(self._own)
        for number, parameter in self._numbered():
            values = self.thing.state.get(parameter)
            if isinstance(values, dict):
                prefix = f"{self.name}.state.{number}."
                found += [(prefix + str(k), v) for k, v in values.items() if isinstance(v, Tensor)]
        return found

    def own_parameters(self) -> Named:
        """Return the parameters that are in no module and no attribute of the state, by name."""
        return self._own

    def _numbered(self) -> list[tuple[int, Tensor]]:
        return list(enumerate(self.parameters()))

    def _others(self) -> dict[int, dict[Any, Any]]:
        """Return, by number of the parameter, what it remembers that is not a tensor."""
        found = {}
        for number, parameter in self._numbered():
            values = self.thing.state.get(parameter)
            if isinstance(values, dict):
                rest = {k: v for k, v in values.items() if not isinstance(v, Tensor)}
                if rest:
                    found[number] = rest
        return found

    # ---- commits

    def keep(self) -> None:
        """Note groups and state as they are, and copy settings and what is no tensor."""
        optimizer, taker = self.thing, Taker()
        groups = [
            (
                g,
                list(g["params"]),
                taker.take({k: v for k, v in g.items() if k != "params"}, self._group(n)),
            )
            for n, g in enumerate(optimizer.param_groups)
        ]
        memory = [
            (parameter, values, dict(values) if isinstance(values, dict) else values)
            for parameter, values in optimizer.state.items()
        ]
        self._kept = (
            list(optimizer.param_groups),
            groups,
            memory,
            taker.take(self._others(), self.name),
        )

    def roll_back(self) -> None:
        """Put back groups, settings and the structure of the state; `leaves` the tensors."""
        optimizer, (order, groups, memory, others) = self.thing, self._kept
        done: dict[int, Any] = {}
        optimizer.param_groups[:] = order
        for group, parameters, settings in groups:
            content = put_back(settings, done)
            group["params"][:] = parameters
            for key in [key for key in group if key != "params" and key not in content]:
                del group[key]
            group.update(content)
        optimizer.state.clear()
        for parameter, values, content in memory:
            if isinstance(values, dict):
                values.clear()
                values.update(content)
            optimizer.state[parameter] = values
        numbered = dict(self._numbered())
        for number, rest in put_back(others, done).items():
            optimizer.state[numbered[number]].update(rest)
        self._refresh()

    def values(self) -> list[tuple[str, Any]]:
        """See `StatePart.values`."""
        found: list[tuple[str, Any]] = []
        for number, group in enumerate(self.thing.param_groups):
            where = self._group(number)
            names = [self._named.get(id(p), "?") for p in group["params"]]
            found.append((f"parameters of {where}", names))
            for key, value in group.items():
                if key != "params":
                    found.append((f"{'learning rate' if key == 'lr' else key} of {where}", value))
        return [*found, (f"{self.name}.state", self._others())]

    def _group(self, number: int) -> str:
        return f"group {number} of {self.name!r}"

    # ---- sending

    def outgoing(self) -> Outgoing:
        """Return groups with the names of their parameters, and the state by number."""
        writer, optimizer = Writer(), self.thing
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            names = [self._named[id(p)] for p in group["params"]]
            groups.append([names, writer.write(settings, self._group(number))])
        state: dict[int, Any] = {}
        for number, parameter in self._numbered():
            if parameter in optimizer.state:
                state[number] = optimizer.state[parameter]
        own = {name: tensor.detach() for name, tensor in self._own}
        return [
            self._class(),
            groups,
            writer.write(state, f"{self.name}.state"),
            writer.write(own, self.name),
        ], writer.tensors

    def places(self, document: Any, specs: Sequence[TensorSpec], /) -> list[Tensor]:
        """Return new tensors for the state (Adam's are made late), and its own parameters."""
        self._require_class(document[0])
        self._refresh()
        by_name = {name: p for p in self.parameters() for name in [self._named.get(id(p), "")]}
        by_name |= self._strangers
        missing = [name for names, _ in document[1] for name in names if name not in by_name]
        if missing:
            raise UsageError(
                f"{self.name} trains {missing[0]!r} on the worker that holds the trained state, "
                "and this worker has no such parameter; build the same optimizer on every worker"
            )
        found = [spec.allocate() for spec in specs]
        own = dict(self._own)
        for name, written in zip(_names_in(document[3]), _children_of(document[3]), strict=True):
            if name in own and specs[written[1]].fits(own[name]):
                found[written[1]] = own[name]
        return found

    def accept(self, document: Any, tensors: Sequence[Tensor], /) -> None:
        """Make the received groups, with this process's parameters, and load the state."""
        optimizer, reader = self.thing, Reader(tensors, what=self.name)
        by_name = dict(self._strangers)
        by_name |= {self._named[id(p)]: p for p in self.parameters() if id(p) in self._named}
        live = optimizer.param_groups
        made = []
        for number, (names, settings) in enumerate(document[1]):
            group = live[number] if number < len(live) else {"params": []}
            old = {key: value for key, value in group.items() if key != "params"}
            content = reader.read(settings, old)
            group["params"][:] = [by_name[name] for name in names]
            for key in [key for key in group if key != "params" and key not in content]:
                del group[key]
            group.update(content)
            made.append(group)
        optimizer.param_groups[:] = made
        state = reader.read(document[2])
        numbered = dict(self._numbered())
        for parameter in [p for p in optimizer.state if isinstance(p, Tensor)]:
            del optimizer.state[parameter]
        for number, values in state.items():
            optimizer.state[numbered[number]] = _on_device(values, numbered[number])
        self._refresh()

    @property
    def _strangers(self) -> dict[str, Tensor]:
        """Parameters of the state by name, whether this optimizer trains them or not."""
        return self.known

    known: dict[str, Tensor] = {}  # noqa: RUF012 - set by `tree`, before a state is received


def _children_of(written: Any) -> list[Any]:
    items = written[2]
    return list(items[len(items) // 2 :])


def _on_device(values: Any, parameter: Tensor) -> Any:
    """Return a parameter's state with tensors on its device, as torch's optimizers want them."""
    if isinstance(values, dict):
        # Counters of steps stay on the CPU, unless they are the parameter's shape.
        return {
            k: v.to(parameter.device) if isinstance(v, Tensor) and v.shape == parameter.shape else v
            for k, v in values.items()
        }
    return values


# ---- which part an object gets ----------------------------------------------------------------


def part_for(name: str, thing: Any) -> StatePart | None:
    """Return the part that handles `thing`, or None for a plain value."""
    if isinstance(thing, nn.Module):
        keeps_itself = type(thing).state_dict is not nn.Module.state_dict
        empty = not (any(True for _ in thing.parameters()) or any(True for _ in thing.buffers()))
        return StatePart(name, thing) if keeps_itself and empty else ModulePart(name, thing)
    if isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict:
        return OptimizerPart(name, thing)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return StatePart(name, thing)
    return None
