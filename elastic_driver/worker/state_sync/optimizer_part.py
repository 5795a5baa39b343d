"""The part of an optimizer: its parameter groups, and what it remembers of each parameter."""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.message import Reader, Writer
from elastic_driver.worker.state_sync.part import (
    Named,
    Outgoing,
    StatePart,
    children_in,
    names_in,
    require_tensor,
)
from elastic_driver.worker.state_sync.taking import Taker, put_back
from elastic_driver.worker.state_sync.values import SIMPLE, TensorSpec

_END = object()


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


class OptimizerPart(StatePart):
    """An optimizer: parameter groups, and what it remembers of each parameter.

    Groups hold parameters by name, so that a receiver can make the same groups of its own.
    """

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        super().__init__(name, optimizer)
        self._live: list[Any] = [
            _END
        ]  # groups, parameters, and those of which it remembers something
        self._remembered: list[Any] = [_END]  # all that it remembers
        self._plain: list[int] = []  # places in there of what is no tensor
        self._shape: _Shape | None = None  # of these, once it is kept
        self._settings: list[tuple[list[Any], Any]] = []  # of each group: values, and their copy
        self._known: dict[str, Tensor] = {}  # the state's parameters, trained here or not
        self._named: dict[int, str] = {}  # names of these and of its own, by identity
        self._own: Named = []  # parameters that are in no module of the state
        self._refresh()

    # ---- what it has now

    def parameters(self) -> list[Tensor]:
        """Return the parameters that it trains."""
        return [p for group in self.thing.param_groups for p in group["params"]]

    def _refresh(self) -> None:
        if self._is_current():
            return
        state = self.thing.state
        self._live = [*self.thing.param_groups, *self.parameters(), _END, *state, _END]
        inside = [*chain.from_iterable(map(_inside, state.values())), _END]
        self._plain = [n for n, each in enumerate(inside[:-1]) if not isinstance(each, Tensor)]
        for place in self._plain:
            inside[place] = None
        self._remembered, self._shape, self._has_changed = inside, None, True

    def _is_current(self) -> bool:
        """Return whether nothing was added, removed or replaced since."""
        groups, state = self.thing.param_groups, self.thing.state
        parameters = chain.from_iterable([group["params"] for group in groups])
        if not all(map(is_, chain(groups, parameters, (_END,), state, (_END,)), self._live)):
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

    def require_kept(self) -> None:
        """See `StatePart.require_kept`."""
        for name, tensor in self.tensors():
            require_tensor(name, tensor)

    def take(self) -> _Kept:
        """Return groups and memory as they are, and copies of settings and what is no tensor."""
        groups = self.thing.param_groups
        if self._shape is None:
            memory = [
                (parameter, values, dict(values) if isinstance(values, dict) else values)
                for parameter, values in self.thing.state.items()
            ]
            self._shape = _Shape(list(groups), [list(group["params"]) for group in groups], memory)
        before = self._settings + [([], None)] * len(groups)
        self._settings = [
            self._settings_of(group, number, *before[number]) for number, group in enumerate(groups)
        ]
        others = Taker().take(self._others(), self.name) if self._plain else None
        return _Kept(self._shape, [copy for _, copy in self._settings], others)

    def _settings_of(
        self, group: dict[str, Any], number: int, values: list[Any], copy: Any
    ) -> tuple[list[Any], Any]:
        """Return the values of a group, and a copy: the one of before where nothing can differ."""
        now = list(group.values())
        if len(now) == len(values) and all(map(is_, now, values)):
            return values, copy
        settings = {key: value for key, value in group.items() if key != "params"}
        taken = Taker().take(settings, self._group(number))
        fixed = all(type(each) in SIMPLE or type(each) is tuple for each in settings.values())
        return (now if fixed else []), taken

    def roll_back(self) -> None:
        """Put back groups, settings and the structure of the state; `leaves` the tensors."""
        optimizer, (shape, settings, others) = self.thing, self.kept
        done: dict[int, Any] = {}
        optimizer.param_groups[:] = shape.groups
        for group, parameters, copy in zip(shape.groups, shape.parameters, settings, strict=True):
            content = put_back(copy, done)
            group["params"][:] = parameters
            for key in [key for key in group if key != "params" and key not in content]:
                del group[key]
            group.update(content)
        optimizer.state.clear()
        for parameter, values, content in shape.memory:
            if isinstance(values, dict):
                values.clear()
                values.update(content)
            optimizer.state[parameter] = values
        numbered = dict(self._numbered())
        for number, rest in put_back(others or {}, done).items():
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
        by_name |= self._known
        missing = [name for names, _ in document[1] for name in names if name not in by_name]
        if missing:
            raise UsageError(
                f"{self.name} trains {missing[0]!r} on the worker that holds the trained state, "
                "and this worker has no such parameter; build the same optimizer on every worker"
            )
        found = [spec.allocate() for spec in specs]
        own = dict(self._own)
        for name, written in zip(names_in(document[3]), children_in(document[3]), strict=True):
            if name in own and specs[written[1]].fits(own[name]):
                found[written[1]] = own[name]
        return found

    def accept(self, document: Any, tensors: Sequence[Tensor], /) -> None:
        """Make the received groups, with this process's parameters, and load the state."""
        optimizer, reader = self.thing, Reader(tensors, what=self.name)
        by_name = dict(self._known)
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


def _inside(values: Any) -> Any:
    return values.values() if isinstance(values, dict) else (values,)


def _on_device(values: Any, parameter: Tensor) -> Any:
    """Return a parameter's state with tensors on its device; those on the CPU stay there."""
    if not isinstance(values, dict):
        return values
    home = parameter.device
    return {
        key: value.to(home)
        if isinstance(value, Tensor) and value.device.type == home.type
        else value
        for key, value in values.items()
    }
