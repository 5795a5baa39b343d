"""Plain values as a message: tagged lists of numbers, strings and bytes, which msgspec encodes.

Tensors and *parts* (modules, optimizers and other objects that have a part of their own) stand
apart, by number. Objects that occur twice stay one object. Reading runs no code but that of the
classes in the tables of `values`: a class is only looked up among the loaded modules.
"""

import enum
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.contents import (
    TensorSpec,
    UnkeptError,
    new_random,
    random_more,
    random_state,
    require_sent,
)
from elastic_driver.worker.state_sync.values import (
    LARGEST,
    OTHER,
    SIMPLE,
    Kind,
    atom_names,
    atoms,
    child_names,
    first_line,
    is_array,
    is_referred,
    is_scalar,
    is_single,
    kind_names,
    kind_of,
    kinds,
    knot,
    looked_up,
    too_deep,
    unkept,
    written_dtype,
)

_PENDING = object()  # in place of a tuple whose content is still to be read


class Writer:
    """Turns values into tagged lists; `tensors` collects name and tensor of each one inside.

    `parts`: the number of each object that has a part of its own, by its identity.
    """

    def __init__(self, parts: Mapping[int, Any] | None = None) -> None:
        self.tensors: list[tuple[str, Tensor]] = []
        self._parts = parts or {}
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no identity is used twice
        self._open: set[int] = set()  # tuples, and the like, that are being written

    def write(self, value: Any, path: str) -> Any:
        """Return a value as tagged data. Raises `UnkeptError` for a value of no known kind."""
        try:
            return self._write(value, path)
        except RecursionError:
            raise too_deep(path) from None

    def _write(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in SIMPLE:
            return _simple(value)
        if id(value) in self._seen:
            if id(value) in self._open:
                raise knot(path, value)
            return ["same", self._seen[id(value)]]
        if (container := kind_of(kind)) is not None:
            return self._write_container(value, container, path)
        return self._write_single(value, path)

    def _remember(self, value: Any) -> None:
        self._seen[id(value)] = len(self._alive)
        self._alive.append(value)

    def _write_container(self, value: Any, kind: Kind, path: str) -> Any:
        if kind.problem is not None:
            raise UnkeptError(path, *kind.problem)
        self._remember(value)
        if kind.fill is None:
            self._open.add(id(value))
        items = self._children(value, kind, path)
        names = child_names(value, items)
        written = [self._write(v, f"{path}{n}") for v, n in zip(items, names, strict=True)]
        self._open.discard(id(value))
        own = type(value)
        if own.__name__ in kind_names and kind_names[own.__name__] is own:
            return [own.__name__, kind.more(value), written]
        return ["class", [own.__module__, own.__qualname__], written]

    def _children(self, value: Any, kind: Kind, path: str) -> list[Any]:
        items = kind.children(value)
        if isinstance(value, set | frozenset):  # their order differs between processes
            items.sort(key=lambda each: self._sorted_by(each, path))
        return items

    def _sorted_by(self, value: Any, path: str) -> str:
        return repr(type(self)(self._parts)._write(value, path))

    def _write_single(self, value: Any, path: str) -> Any:
        kind = type(value)
        if id(value) in self._parts:
            return ["part", self._parts[id(value)]]
        if isinstance(value, Tensor):
            require_sent(value, path)
            self._remember(value)
            self.tensors.append((path, value.detach().resolve_conj().resolve_neg()))
            trained = [isinstance(value, torch.nn.Parameter), value.requires_grad]
            return ["tensor", len(self.tensors) - 1, *trained]
        if kind in atoms and is_single(value):
            written = atoms[kind][0](value)
            return [kind.__name__, _simple(written) if type(written) is str else written]
        if kind is slice:
            return [
                "slice",
                [self._write(each, path) for each in (value.start, value.stop, value.step)],
            ]
        if isinstance(value, enum.Enum) and is_single(value):
            own = [kind.__module__, kind.__qualname__]
            if isinstance(value, enum.Flag):
                return ["flag", own, self._write(int(value.value), path)]
            return ["enum", own, value.name]
        if is_scalar(value) or is_array(value):
            return self._write_numpy(value, path)
        if kind is bytearray:
            self._remember(value)
            return ["bytearray", bytes(value)]
        if random_state(value) is not None:
            return self._write_random(value, path)
        if is_referred(value):
            return ["name", [value.__module__, value.__qualname__]]
        raise unkept(path, value)

    def _write_random(self, value: Any, path: str) -> Any:
        found = random_state(value)
        assert found is not None  # noqa: S101 - the caller has looked
        state = self._write(found[0](), path)
        return ["random", type(value).__name__, state, random_more(value)]

    def _write_numpy(self, value: Any, path: str) -> Any:
        if is_array(value):
            self._remember(value)
        dtype = self._write(written_dtype(value.dtype), path)
        if not is_array(value):
            return ["scalar", dtype, value.tobytes()]
        return ["array", dtype, list(value.shape), self._content_of(value)]

    def _content_of(self, array: Any) -> Any:
        return array.tobytes()


class ComparingWriter(Writer):
    """Writes equal values alike, for digests: nobody reads them again.

    Tables are equal in any order, and tuples whether they are one object or two. Random generators
    are at different places on each rank. `parts`: the path of each.
    """

    def _write(self, value: Any, path: str) -> Any:
        written = super()._write(value, path)
        if type(value) is tuple:
            self._seen.pop(id(value), None)
        return written

    def _children(self, value: Any, kind: Kind, path: str) -> list[Any]:
        items = super()._children(value, kind, path)
        if isinstance(value, dict) and not isinstance(value, OrderedDict):
            half = len(items) // 2
            pairs = sorted(
                zip(items[:half], items[half:], strict=True),
                key=lambda pair: self._sorted_by(pair[0], path),
            )
            items = [key for key, _ in pairs] + [each for _, each in pairs]
        return items

    def _write_random(self, value: Any, path: str) -> Any:  # noqa: ARG002 - see `Writer`
        return ["random", type(value).__name__]

    def _content_of(self, array: Any) -> Any:
        if array.dtype.names:
            from numpy.lib.recfunctions import repack_fields  # noqa: PLC0415 - seldom

            array = repack_fields(array, recurse=True)  # what is between the fields is no content
        in_order = array.flags.c_contiguous and array.nbytes
        return zlib.crc32(array.reshape(-1).view("u1") if in_order else array.tobytes())


def _simple(value: Any) -> Any:
    """Return a simple value as msgpack can carry it."""
    kind = type(value)
    if kind is int and not -LARGEST <= value < LARGEST:
        return ["int", str(value)]
    if kind is bytes:
        return ["bytes", value]
    if kind is str and not value.isascii():  # a name of a file may not be UTF-8
        data = value.encode("utf-8", "surrogatepass")
        return value if data == value.encode("utf-8", "replace") else ["str", data]
    return value


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
        self._tensors = tensors
        self._parts = parts
        self._what = what or "a value"
        self._objects: list[Any] = []
        self._used: set[int] = set()

    def read(self, data: Any, live: Any = None) -> Any:
        """Return the value of tagged data, in `live` itself where that is of the same kind.

        Raises `UsageError` for a class that this process does not know, and for data that a
        `Writer` does not write.
        """
        return _guarded(self._what, lambda: self._read(data, live))

    def _read(self, data: Any, live: Any = None) -> Any:
        if type(data) is not list:
            return data
        tag = data[0]
        if tag == "same":
            found = _at(self._objects, data[1])
            if found is _PENDING:
                raise ValueError("a tuple holds itself")
            return found
        if tag in kind_names:
            kind = kind_names[tag]
            return self._read_container(kind, kinds[kind], data, live)
        if tag == "class":
            own = self._class(*data[1])
            found = kind_of(own) if isinstance(own, type) else None
            if found is None:
                raise ValueError(f"{data[1][1]} is no dataclass or named tuple here")
            return self._read_container(own, found, data, live)
        if tag in atom_names:
            return atoms[atom_names[tag]][1](_text(data[1]))
        return _READERS[tag](self, data, live)

    def _read_container(self, kind: type, how: Kind, data: list[Any], live: Any) -> Any:
        number = len(self._objects)
        more = data[1] if data[0] != "class" else None
        reusable = type(live) is kind and id(live) not in self._used and how.fill is not None
        if kind is deque:
            reusable = reusable and live.maxlen == more
        target = live if reusable else _PENDING
        if reusable:
            self._used.add(id(live))
        elif more == OTHER and type(live) is defaultdict:
            target = defaultdict(live.default_factory)
        elif how.fill is not None:
            target = how.make([], more)
        self._objects.append(target)
        lives = _live_children(live, kind, data[2]) if type(live) is kind else [None] * len(data[2])
        items = [self._read(item, old) for item, old in zip(data[2], lives, strict=True)]
        if how.fill is None:
            self._objects[number] = target = how.make(items, more)
        else:
            how.fill(target, items)
        return target

    def _read_tensor(self, data: list[Any], _live: Any) -> Any:
        found = _at(self._tensors, data[1])
        self._objects.append(found)
        return found

    def _read_enum(self, data: list[Any], _live: Any) -> Any:
        own = self._class(*data[1])
        if not (isinstance(own, type) and issubclass(own, enum.Enum)):
            raise ValueError(f"{data[1][1]} is no enumeration here")
        return own[data[2]] if data[0] == "enum" else own(self._read(data[2]))

    def _read_name(self, data: list[Any], _live: Any) -> Any:
        module, name = data[1]
        found = self._class(module, name, "class or function")
        if not is_referred(found):
            raise ValueError(f"{data[1][1]} is no class or function here")
        return found

    def _read_bytes(self, data: list[Any], live: Any) -> Any:
        fits = type(live) is bytearray and id(live) not in self._used
        target = live if fits else bytearray()
        self._used.add(id(target))
        target[:] = bytes(data[1])
        self._objects.append(target)
        return target

    def _read_numpy(self, data: list[Any], live: Any) -> Any:
        import numpy  # noqa: PLC0415 - only where a script uses it

        place = len(self._objects)
        self._objects.append(None)
        if data[0] == "scalar":
            del self._objects[place]
        dtype = numpy.lib.format.descr_to_dtype(self._read(data[1]))
        shape, content = (data[2], data[3]) if data[0] == "array" else ((), data[2])
        if dtype.hasobject:
            raise ValueError(f"no array of the type {dtype} is sent")
        empty = not content
        found = numpy.zeros(shape, dtype) if empty else numpy.ndarray(shape, dtype, content).copy()
        if found.nbytes != len(content) and dtype.itemsize:
            raise ValueError("an array is shorter than it says")
        if data[0] == "scalar":
            return found[()]
        same = is_array(live) and live.shape == found.shape and live.dtype == found.dtype
        if same and live.flags.writeable and id(live) not in self._used:
            self._used.add(id(live))
            live[...] = found
            found = live
        self._objects[place] = found
        return found

    def _read_random(self, data: list[Any], live: Any) -> Any:
        more = self._read(data[3])
        found = random_state(live)
        if found is None or type(live).__name__ != data[1] or random_more(live) != more:
            live = new_random(data[1], more)
            found = random_state(live)
        assert found is not None  # noqa: S101 - it is one now
        found[1](self._read(data[2]))
        return live

    def _class(self, module: str, name: str, of: str = "class") -> Any:
        found = looked_up(module, name)
        if found is None:
            raise UsageError(
                f"{self._what} needs the {of} {name} of {module}, which this process "
                "has not loaded; import it at the top of the script on every worker"
            )
        return found


_READERS: dict[str, Callable[[Reader, list[Any], Any], Any]] = {
    "part": lambda me, data, _: _at(me._parts, data[1]),
    "tensor": Reader._read_tensor,
    "int": lambda _me, data, _: int(data[1]),
    "bytes": lambda _me, data, _: bytes(data[1]),
    "str": lambda _me, data, _: _text(data),
    "slice": lambda me, data, _: slice(*(me._read(each) for each in data[1])),
    "enum": Reader._read_enum,
    "flag": Reader._read_enum,
    "name": Reader._read_name,
    "bytearray": Reader._read_bytes,
    "scalar": Reader._read_numpy,
    "array": Reader._read_numpy,
    "random": Reader._read_random,
}


def places(data: Any, specs: Sequence[TensorSpec], live: Any) -> list[Tensor]:
    """Return the tensors to receive into: those of `live` at the same places, else new ones.

    `data` is what a `Writer` wrote, `specs` those of its tensors. Raises `UsageError` for data that
    no `Writer` writes.
    """
    found: list[Tensor | None] = [None] * len(specs)
    used: set[int] = set()

    def visit(data: Any, live: Any) -> None:
        if type(data) is not list:
            return
        if data[0] == "tensor":
            number, is_parameter, needs_gradient = data[1:]
            found[number] = _place(_at(specs, number), live, used, is_parameter, needs_gradient)
        elif data[0] in kind_names or data[0] == "class":
            own = kind_names.get(data[0]) or looked_up(*data[1])
            same = isinstance(own, type) and type(live) is own
            lives = _live_children(live, own, data[2]) if same else [None] * len(data[2])
            for item, old in zip(data[2], lives, strict=True):
                visit(item, old)

    _guarded("a value", lambda: visit(data, live))
    return [
        each if each is not None else spec.allocate()
        for each, spec in zip(found, specs, strict=True)
    ]


def _place(
    spec: TensorSpec, live: Any, used: set[int], is_parameter: bool, needs_gradient: bool
) -> Tensor:
    if isinstance(live, Tensor) and id(live) not in used and spec.fits(live):
        used.add(id(live))
        return live if live.requires_grad == needs_gradient else live.requires_grad_(needs_gradient)
    fresh = spec.allocate()
    fresh = torch.nn.Parameter(fresh, False) if is_parameter else fresh
    return fresh.requires_grad_(needs_gradient)


def _guarded(what: str, read: Callable[[], Any]) -> Any:
    """Return the result of `read`; raises `UsageError` for whatever it raises."""
    try:
        return read()
    except UsageError:
        raise
    except RecursionError:
        raise UsageError(f"{what} cannot be read: it is nested too deep") from None
    except Exception as error:  # data from elsewhere, read by classes of the script
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"{what} cannot be read: {problem}") from error


def _text(data: Any) -> Any:
    """Return a string that is no UTF-8; other data as they are."""
    is_text = type(data) is list and data[:1] == ["str"]
    return bytes(data[1]).decode("utf-8", "surrogatepass") if is_text else data


def _at(objects: Sequence[Any], number: Any) -> Any:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no number of an object")
    return objects[number]


def _live_children(live: Any, kind: type, written: list[Any]) -> list[Any]:
    """Return the child of `live` that each written child is to fill; None where there is none."""
    how = kind_of(kind)
    if how is None or issubclass(kind, set | frozenset):
        return [None] * len(written)
    children = how.children(live)
    half = len(written) // 2
    if how.children is list:
        return (children + [None] * len(written))[: len(written)]
    # Keys, then values.
    keys = map(_key, children[: len(children) // 2])
    mine = dict(zip(keys, children[len(children) // 2 :], strict=True))
    return [None] * half + [mine.get(repr(key)) for key in written[:half]]


def _key(key: Any) -> str:
    """Return a key as a `Writer` writes it; "" for one that no sender has."""
    try:
        return repr(Writer().write(key, "key"))
    except UnkeptError:
        return ""
