"""Plain values as a message: tagged lists of numbers, strings and bytes, which msgspec encodes.

Tensors and *parts* (modules, optimizers and other objects that have a part of their own) stand
apart, by number. Objects that occur twice stay one object. Reading runs no code but that of the
classes in the tables of `values`: a class is only looked up among the loaded modules.
"""

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.values import (
    LARGEST,
    SIMPLE,
    Kind,
    TensorSpec,
    atom_names,
    atoms,
    child_names,
    is_array,
    is_referred,
    is_scalar,
    kind_names,
    kind_of,
    kinds,
    looked_up,
    random_state,
    refuse,
    require_kept,
)

# What classes of the tables raise for data that no writer wrote.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)


class Writer:
    """Turns values into tagged lists; `tensors` collects name and tensor of each one inside.

    `parts`: the number of each object that has a part of its own, by its identity.
    """

    def __init__(self, parts: dict[int, int] | None = None) -> None:
        self.tensors: list[tuple[str, Tensor]] = []
        self._parts = parts or {}
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no identity is used twice

    def write(self, value: Any, path: str) -> Any:
        """Return a value as tagged data. Raises `UnkeptError` for a value of no known kind."""
        kind = type(value)
        if kind is int and not -LARGEST <= value < LARGEST:
            return ["int", str(value)]
        if kind in SIMPLE:
            return value if kind is not bytes else ["bytes", value]
        if id(value) in self._seen:
            return ["same", self._seen[id(value)]]
        if (container := kind_of(kind)) is not None:
            return self._write_container(value, container, path)
        return self._write_single(value, path)

    def _remember(self, value: Any) -> None:
        self._seen[id(value)] = len(self._alive)
        self._alive.append(value)

    def _write_container(self, value: Any, kind: Kind, path: str) -> Any:
        self._remember(value)
        items = kind.children(value)
        if isinstance(value, set | frozenset):  # the order of a set differs between processes
            items.sort(key=lambda item: repr(Writer(self._parts).write(item, path)))
        names = child_names(value, items)
        written = [self.write(v, f"{path}{n}") for v, n in zip(items, names, strict=True)]
        own = type(value)
        if own.__name__ in kind_names and kind_names[own.__name__] is own:
            return [own.__name__, kind.more(value), written]
        return ["class", [own.__module__, own.__qualname__], written]

    def _write_single(self, value: Any, path: str) -> Any:
        kind = type(value)
        if id(value) in self._parts:
            return ["part", self._parts[id(value)]]
        if isinstance(value, Tensor):
            require_kept(value, path)
            self._remember(value)
            self.tensors.append((path, value.detach()))
            trained = [isinstance(value, torch.nn.Parameter), value.requires_grad]
            return ["tensor", len(self.tensors) - 1, *trained]
        if kind in atoms:
            return [kind.__name__, atoms[kind][0](value)]
        if kind is slice:
            return [
                "slice",
                [self.write(each, path) for each in (value.start, value.stop, value.step)],
            ]
        if isinstance(value, enum.Enum):
            return ["enum", [kind.__module__, kind.__qualname__], value.name]
        if is_scalar(value):
            return ["scalar", value.dtype.str, value.tobytes()]
        if is_array(value):
            self._remember(value)
            return ["array", value.dtype.str, list(value.shape), value.tobytes()]
        if kind is bytearray:
            self._remember(value)
            return ["bytearray", bytes(value)]
        if (found := random_state(value)) is not None:
            return ["random", kind.__name__, self.write(found[0](), path)]
        if is_referred(value):
            return ["name", [value.__module__, value.__qualname__]]
        raise refuse(path, value)


class Reader:
    """Makes values of what a `Writer` wrote.

    Args:
        tensors: the tensors, in the order of the writer's.
        parts: the objects with parts of their own, by number.
        what: of whom the values are, for errors.
    """

    def __init__(
        self, tensors: Sequence[Tensor], parts: Sequence[Any] = (), what: str = ""
    ) -> None:
        self._tensors, self._parts, self._what = tensors, parts, what
        self._objects: list[Any] = []
        self._used: set[int] = set()

    def read(self, data: Any, live: Any = None) -> Any:
        """Return the value of tagged data, in `live` itself where that is of the same kind.

        Raises `UsageError` for a class that this process does not know, and for data that a
        `Writer` does not write.
        """
        if type(data) is not list:
            return data
        try:
            return self._read(data, live)
        except _UNREADABLE as error:
            raise UsageError(f"{self._what or 'a value'} cannot be read: {error}") from error

    def _read(self, data: list[Any], live: Any) -> Any:
        tag = data[0]
        if tag == "same":
            return self._same(data[1])
        if tag in kind_names:
            kind = kind_names[tag]
            return self._read_container(kind, kinds[kind], data, live)
        if tag == "class":
            own = self._class(*data[1])
            found = kind_of(own)
            if found is None:
                raise UsageError(f"{own.__qualname__} is no dataclass or named tuple here")
            return self._read_container(own, found, data, live)
        if tag in atom_names:
            return atoms[atom_names[tag]][1](data[1])
        return self._read_single(tag, data, live)

    def _same(self, number: int) -> Any:
        found = self._objects[number]
        if found is None:  # a cycle closes before the tuple can be made
            raise UsageError(
                f"{self._what or 'a value'} has a tuple or frozen object that holds itself; use a "
                "list or an ordinary object there"
            )
        return found

    def _read_container(self, kind: type, how: Kind, data: list[Any], live: Any) -> Any:
        number = len(self._objects)
        reusable = type(live) is kind and id(live) not in self._used and how.fill is not None
        target = live if reusable else None
        if reusable:
            self._used.add(id(live))
        elif how.fill is not None:
            target = how.make([], data[1] if data[0] != "class" else None)
        self._objects.append(target)
        lives = _live_children(live, kind, data[2]) if type(live) is kind else [None] * len(data[2])
        items = [self.read(item, old) for item, old in zip(data[2], lives, strict=True)]
        if how.fill is None:
            self._objects[number] = target = how.make(items, data[1])
        else:
            how.fill(target, items)
        return target

    def _read_single(self, tag: str, data: list[Any], live: Any) -> Any:
        if tag == "part":
            return self._parts[data[1]]
        if tag == "tensor":
            found = self._tensors[data[1]]
            self._objects.append(found)
            return found
        if tag == "int":
            return int(data[1])
        if tag == "bytes":
            return bytes(memoryview(data[1]))  # no number, which would be a size
        if tag == "slice":
            return slice(*(self.read(each) for each in data[1]))
        if tag == "enum":
            return self._enum(*data[1])[data[2]]
        if tag == "name":
            return self._named(*data[1])
        if tag == "bytearray":
            target = live if type(live) is bytearray else bytearray()
            target[:] = memoryview(data[1])
            self._objects.append(target)
            return target
        if tag in ("scalar", "array"):
            return self._read_numpy(tag, data, live)
        if tag == "random":
            return self._read_random(data, live)
        raise UsageError(f"{self._what or 'a value'} is of an unknown kind {tag!r}")

    def _read_numpy(self, tag: str, data: list[Any], live: Any) -> Any:
        import numpy  # noqa: PLC0415 - only where a script uses it

        if tag == "scalar":
            return numpy.frombuffer(data[2], dtype=numpy.dtype(data[1]))[0]
        found = numpy.frombuffer(data[3], dtype=numpy.dtype(data[1])).reshape(data[2]).copy()
        same = is_array(live) and live.shape == found.shape and live.dtype == found.dtype
        if same and live.flags.writeable and id(live) not in self._used:
            self._used.add(id(live))
            live[...] = found
            found = live
        self._objects.append(found)
        return found

    def _read_random(self, data: list[Any], live: Any) -> Any:
        found = random_state(live)
        if found is None or type(live).__name__ != data[1]:
            raise UsageError(f"{self._what or 'a value'} is a random generator, {data[1]}, there")
        state = self.read(data[2])
        found[1](state)
        return live

    def _enum(self, module: str, name: str) -> Any:
        found = self._class(module, name)
        if not isinstance(found, enum.EnumMeta):
            raise UsageError(f"{self._what or 'a value'}: {name} of {module} is no enum here")
        return found

    def _named(self, module: str, name: str) -> Any:
        found = self._class(module, name, of="class or function")
        if not is_referred(found):
            raise UsageError(f"{self._what or 'a value'}: {name} of {module} is no class here")
        return found

    def _class(self, module: str, name: str, of: str = "class") -> Any:
        found = looked_up(module, name)
        if found is None:
            raise UsageError(
                f"{self._what or 'a value'} needs the {of} {name} of {module}, which this process "
                "has not loaded; import it at the top of the script on every worker"
            )
        return found


def places(data: Any, specs: Sequence[TensorSpec], live: Any) -> list[Tensor]:
    """Return the tensors to receive into: those of `live` at the same places, else new ones.

    `data` is what a `Writer` wrote, `specs` those of its tensors.
    """
    found: list[Tensor | None] = [None] * len(specs)
    used: set[int] = set()

    def visit(data: Any, live: Any) -> None:
        if type(data) is not list:
            return
        if data[0] == "tensor":
            number, is_parameter, needs_gradient = data[1:]
            spec = specs[number]
            if isinstance(live, Tensor) and id(live) not in used and spec.fits(live):
                used.add(id(live))
                found[number] = live
                return
            fresh = spec.allocate()
            fresh = torch.nn.Parameter(fresh, False) if is_parameter else fresh
            found[number] = fresh.requires_grad_(needs_gradient)
        elif data[0] in kind_names or data[0] == "class":
            own = kind_names.get(data[0]) or looked_up(*data[1])
            same = isinstance(own, type) and type(live) is own
            lives = _live_children(live, own, data[2]) if same else [None] * len(data[2])
            for item, old in zip(data[2], lives, strict=True):
                visit(item, old)

    visit(data, live)
    return [
        each if each is not None else spec.allocate()
        for each, spec in zip(found, specs, strict=True)
    ]


def _live_children(live: Any, kind: type, written: list[Any]) -> list[Any]:
    """Return the child of `live` that each written child is to fill; None where there is none."""
    how = kind_of(kind)
    children = how.children(live) if how is not None else []
    if issubclass(kind, set | frozenset):
        return [None] * len(written)
    half = len(written) // 2
    if how is not None and how.children is not list:  # keys, then values
        mine = dict(
            zip(
                map(_key, children[: len(children) // 2]),
                children[len(children) // 2 :],
                strict=True,
            )
        )
        return [None] * half + [mine.get(repr(key)) for key in written[:half]]
    return (children + [None] * len(written))[: len(written)]


def _key(key: Any) -> str:
    return (
        repr(Writer().write(key, "key"))
        if type(key) not in SIMPLE or type(key) is bytes
        else repr(key)
    )
