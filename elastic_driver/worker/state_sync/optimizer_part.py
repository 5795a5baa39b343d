"""The part of an optimizer: its parameter groups, and what it remembers of each parameter."""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.contents import TensorSpec, require_sent
from elastic_driver.worker.state_sync.message import Reader, Writer, places
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
    require_tensor,
    trained_by,
)
from elastic_driver.worker.state_sync.taking import Taker, as_kept, put_back
from elastic_driver.worker.state_sync.values import SIMPLE

_END = object()
_lists = itemgetter("params")


class _Shape(NamedTuple):
    """The groups of an optimizer, and what it remembers."""

    groups: list[dict[str, Any]]
    parameters: list[list[Tensor]]  # of each group
    memory: list[tuple[Any, Any, Any]]  # parameter, what is remembered of it, its content


class _Kept(NamedTuple):
    """What a commit keeps of an optimizer."""

    shape: _Shape
    settings: list[Any]  # of each group
    others: Any  # copies of what is remembered and is no tensor
    own: list[Attribute]


class OptimizerPart(StatePart):
    """An optimizer: parameter groups, and what it remembers of each parameter.

    Groups hold parameters by name, so that a receiver can make the same groups of its own.
    """

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        super().__init__(name, optimizer)
        # Groups, parameters, and those of which it remembers something.
        self._seen: list[Any] = [_END]
        self._remembered: list[Any] = [_END]  # all that it remembers
        self._plain: list[int] = []  # places in there of what is no tensor
        self._shape: _Shape | None = None  # of these, once it is kept
        self._settings: list[tuple[list[Any], Any]] = []  # of each group: values, and their copy
        self._is_fixed = False  # all settings are values that stay what they are
        self._known: dict[str, Tensor] = {}  # the state's parameters, trained here or not
        self._named: dict[int, str] = {}  # names of these and of its own, by identity
        self._own: Named = []  # parameters that are in no module of the state
        self._attributes = Attributes(name, [("", optimizer)])
        self._refresh()

    # ---- what it has now

    def parameters(self) -> list[Tensor]:
        """Return the parameters that it trains."""
        return trained_by(self.thing)

    def _refresh(self) -> None:
        if self._is_current():
            return
        state = self.thing.state
        self._seen = [*self.thing.param_groups, *self.parameters(), _END, *state, _END]
        inside = [*chain.from_iterable(map(_inside, state.values())), _END]
        self._plain = [n for n, each in enumerate(inside[:-1]) if not isinstance(each, Tensor)]
        for place in self._plain:
            inside[place] = None
        self._remembered = inside
        self._shape = None
        self._has_changed = True

    def structure(self) -> Structure | None:
        """See `StatePart.structure`."""
        groups, state = self.thing.param_groups, self.thing.state
        if self._plain or not all(isinstance(values, dict) for values in state.values()):
            return None
        lists = [group["params"] for group in groups]
        return Structure([state, *state.values()], [groups, *lists, state], ((_lists, groups),))

    def _is_current(self) -> bool:
        """Return whether nothing was added, removed or replaced since."""
        groups, state = self.thing.param_groups, self.thing.state
        parameters = chain.from_iterable([group["params"] for group in groups])
        if not all(map(is_, chain(groups, parameters, (_END,), state, (_END,)), self._seen)):
            return False
        try:
            inside = chain(chain.from_iterable(map(dict.values, state.values())), (_END,))
            return all(map(is_, self._but_plain(inside), self._remembered))
        except TypeError:  # one is no dictionary
            return False

    def _but_plain(self, inside: Iterable[Any]) -> Iterable[Any]:
        """Return what is remembered without numbers, which are other objects after each step."""
        if not self._plain:
            return inside
        found = list(inside)
        if len(found) == len(self._remembered):
            for place in self._plain:
                if not isinstance(found[place], Tensor):
                    found[place] = None
        return found

    def know(self, parameters: dict[str, Tensor]) -> None:
        """Take in the parameters of the state by name; all others that it trains are its own."""
        self._known = parameters
        self._named = {id(parameter): name for name, parameter in parameters.items()}
        self._own = []
        for number, parameter in enumerate(self.parameters()):
            if id(parameter) not in self._named:
                self._named[id(parameter)] = f"{self.name}.params.{number}"
                self._own.append((f"{self.name}.params.{number}", parameter))

    def tensors(self) -> Named:
        """Return the parameters that are in no module, and the tensors that it remembers."""
        return self._own + [(name, tensor) for name, tensor, _ in self.remembered()]

    def remembered(self) -> list[tuple[str, Tensor, Tensor | None]]:
        """Return name, tensor, and parameter of each tensor that it remembers."""
        found = []
        parameters = [p for p in self.parameters() if p in self.thing.state]
        for number, (label, values) in enumerate(self._memory()):
            parameter = parameters[number] if number < len(parameters) else None
            for name, value in _named(f"{self.name}.state.{label}", values):
                if isinstance(value, Tensor):
                    found.append((name, value, parameter))
        return found

    def _memory(self) -> list[tuple[Any, Any]]:
        """Return all that it remembers: by number of the parameter, then by other keys."""
        state = self.thing.state
        numbered = [(n, state[p]) for n, p in enumerate(self.parameters()) if p in state]
        return numbered + [(k, v) for k, v in state.items() if not isinstance(k, Tensor)]

    def own_parameters(self) -> Named:
        """Return the parameters that are in no module and no attribute of the state, by name."""
        return self._own

    def _others(self) -> list[Any]:
        """Return what it remembers that is no tensor, in the order of `_memory`."""
        found: list[Any] = []
        for _, values in self._memory():
            if isinstance(values, dict):
                found.append({k: v for k, v in values.items() if not isinstance(v, Tensor)})
            else:
                found.append(None if isinstance(values, Tensor) else values)
        return found

    # ---- commits

    def require_kept(self) -> None:
        """See `StatePart.require_kept`."""
        for name, tensor in self.tensors():
            require_tensor(name, tensor)
            require_sent(tensor, name)

    def take(self) -> _Kept:
        """Return groups and memory as they are, and copies of settings and what is no tensor."""
        groups = self.thing.param_groups
        attributes = self._attributes.take()
        if self._shape is None:
            memory = [
                (parameter, values, dict(values) if isinstance(values, dict) else values)
                for parameter, values in self.thing.state.items()
            ]
            for key, values in self.thing.state.items():
                own = [key, *values] if isinstance(values, dict) else [key]
                keys = [each for each in own if not isinstance(each, Tensor)]
                Taker(alone=True).take(keys, f"{self.name}.state")
            self._shape = _Shape(list(groups), [list(group["params"]) for group in groups], memory)
        before = self._settings + [([], None)] * len(groups)
        self._settings = [
            self._settings_of(group, number, *before[number]) for number, group in enumerate(groups)
        ]
        others = Taker(alone=True).take(self._others(), self.name) if self._plain else None
        settings = [copy for _, copy in self._settings]
        self._is_fixed = all(values[0] is not _END for values, _ in self._settings)
        return _Kept(self._shape, settings, others, attributes)

    def rest(self) -> Rest:
        """See `StatePart.rest`: the groups have their settings, and nothing else changes."""
        kept: _Kept = self.kept
        if kept.shape is not self._shape or kept.own or self._plain or not self._is_fixed:
            return NEVER
        groups = self.thing.param_groups
        return Rest(self._attributes.rest_until, groups, [dict(group) for group in groups])

    def _settings_of(
        self, group: dict[str, Any], number: int, values: list[Any], copy: Any
    ) -> tuple[list[Any], Any]:
        """Return the values of a group, and a copy: the one of before where nothing can differ."""
        now = [*group, *group.values()]
        if len(now) == len(values) and all(map(is_, now, values)):
            return values, copy
        settings = _settings(group)
        taken = Taker(alone=True).take(settings, self._group(number))
        fixed = all(type(each) in SIMPLE or type(each) is tuple for each in settings.values())
        return (now if fixed else [_END]), taken

    def copies(self) -> Any:
        """See `StatePart.copies`."""
        return [self.kept.settings, self.kept.others, [each.copy for each in self.kept.own]]

    def roll_back(self) -> None:
        """Put back groups, settings and the structure of the state; `leaves` the tensors."""
        optimizer, (shape, settings, others, own) = self.thing, self.kept
        done: dict[int, Any] = {}
        optimizer.param_groups[:] = shape.groups
        for group, parameters, copy in zip(shape.groups, shape.parameters, settings, strict=True):
            _fill_group(group, parameters, put_back(copy, done))
        optimizer.state.clear()
        for parameter, values, content in shape.memory:
            if isinstance(values, dict):
                values.clear()
                values.update(content)
            optimizer.state[parameter] = values
        if others is not None:
            keys = [p for p in self.parameters() if p in optimizer.state]
            keys += [key for key in optimizer.state if not isinstance(key, Tensor)]
            for key, rest in zip(keys, put_back(others, done), strict=True):
                if isinstance(optimizer.state[key], dict):
                    optimizer.state[key].update(rest)
                elif rest is not None:
                    optimizer.state[key] = rest
        self._attributes.put_back(own)
        self._refresh()

    def values(self) -> list[tuple[str, Any]]:
        """See `StatePart.values`."""
        shape, settings, others, _ = self.kept
        found: list[tuple[str, Any]] = []
        done: dict[int, Any] = {}
        for number, (parameters, kept) in enumerate(zip(shape.parameters, settings, strict=True)):
            where = self._group(number)
            names = [self._named.get(id(p), "?") for p in parameters]
            found.append((f"parameters of {where}", names))
            for key, value in as_kept(kept, done).items():
                found.append((f"{'learning rate' if key == 'lr' else key} of {where}", value))
        return [*found, (f"{self.name}.state", as_kept(others, done))]

    def _group(self, number: int) -> str:
        return f"group {number} of {self.name!r}"

    # ---- sending

    def outgoing(self) -> Outgoing:
        """Return groups with the names of their parameters, and the state by number."""
        writer = Writer()
        optimizer = self.thing
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            settings = _settings(group)
            names = [self._named[id(p)] for p in group["params"]]
            groups.append([names, writer.write(settings, self._group(number))])
        numbered, others = self._state_by_number(self.parameters())
        own = dict(self._own)
        return [
            self._class(),
            groups,
            writer.write(numbered, f"{self.name}.state"),
            writer.write(others, f"{self.name}.state"),
            writer.write(own, self.name),
            self._attributes.outgoing(writer.tensors),
        ], writer.tensors

    def _state_by_number(
        self, parameters: Sequence[Tensor]
    ) -> tuple[dict[int, Any], dict[Any, Any]]:
        """Return what is remembered of each of these parameters, by number, and all else."""
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        numbered: dict[int, Any] = {}
        others: dict[Any, Any] = {}
        for key, values in self.thing.state.items():  # in its order
            if key in numbers:
                numbered[numbers[key]] = values
            elif not isinstance(key, Tensor):
                others[key] = values
        return numbered, others

    def _theirs(self, groups: Any) -> list[list[Tensor]]:
        """Return this process's parameters of the sender's groups.

        Raises `UsageError` where there is no such parameter.
        """
        by_name = dict(self._known)
        by_name |= {self._named[id(p)]: p for p in self.parameters() if id(p) in self._named}
        missing = [name for names, _ in groups for name in names if name not in by_name]
        if missing:
            raise UsageError(
                f"{self.name} trains {missing[0]!r} on the worker that holds the trained state, "
                "and this worker has no such parameter; build the same optimizer on every worker"
            )
        return [[by_name[name] for name in names] for names, _ in groups]

    def _live(self, parameters: Sequence[Sequence[Tensor]]) -> list[Any]:
        """Return what this process has of a document: settings of groups, and all state."""
        live = self.thing.param_groups
        settings = [*map(_settings, live), *({} for _ in parameters)][: len(parameters)]
        return [*settings, *self._state_by_number(list(chain.from_iterable(parameters)))]

    def places(self, document: Any, specs: Sequence[TensorSpec], /) -> list[Tensor]:
        """Return its own tensors, and new ones for those that it lacks: Adam's are made late."""
        self._require_class(document[0])
        self._refresh()
        live = [*self._live(self._theirs(document[1])), dict(self._own)]
        settings = [written for _, written in document[1]]
        return places(["list", None, [*settings, *document[2:]]], specs, live)

    def accept(self, document: Any, tensors: Sequence[Tensor], /) -> None:
        """Make the received groups, with this process's parameters, and load the state."""
        optimizer = self.thing
        reader = Reader(tensors, what=self.name)
        parameters = self._theirs(document[1])
        *settings, numbered, others = self._live(parameters)
        groups = optimizer.param_groups[: len(parameters)]
        groups += [{"params": []} for _ in parameters[len(groups) :]]
        for group, own, (_, written), old in zip(
            groups, parameters, document[1], settings, strict=True
        ):
            _fill_group(group, own, reader.read(written, old))
        optimizer.param_groups[:] = groups
        found = reader.read(document[2], numbered), reader.read(document[3], others)
        flat = list(chain.from_iterable(parameters))
        optimizer.state.clear()
        for number, values in found[0].items():
            optimizer.state[flat[number]] = _on_device(values, flat[number])
        optimizer.state.update(found[1])
        if len(document) > ATTRIBUTES:  # older checkpoints have none
            self._attributes.accept(document[ATTRIBUTES], tensors)
        self._refresh()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return all of a group but its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def _fill_group(group: dict[str, Any], parameters: list[Tensor], settings: dict[str, Any]) -> None:
    """Make a group have these parameters, in its own list, and these settings."""
    group["params"][:] = parameters
    for key in _settings(group).keys() - settings.keys():
        del group[key]
    group.update(settings)


def _named(name: str, values: Any) -> list[tuple[str, Any]]:
    if isinstance(values, dict):
        return [(f"{name}.{key}", value) for key, value in values.items()]
    return [(name, values)]


def _inside(values: Any) -> Any:
    return values.values() if isinstance(values, dict) else (values,)


def _on_device(values: Any, parameter: Tensor) -> Any:
    """Return a parameter's state with tensors on its device; those on the CPU stay there."""
    home = parameter.device
    if isinstance(values, dict) and home.type != "cpu":
        for key, value in values.items():
            if isinstance(value, Tensor) and value.device.type == home.type:
                values[key] = value.to(home)
    return values
