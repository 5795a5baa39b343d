"""The state of a machine as bytes, and the way back.

The state is a graph of objects that refer to each other: one worker is in several tables. So a
snapshot keeps which object is which, the order of dictionaries, and every type; a machine that
comes back from it decides the same as the one it was made of, and has the same snapshot.

The form is msgpack: `[FORMAT, classes, root]`. A plain value stands for itself. Anything else is a
list that begins with its kind: a number below 0 for the containers, else the place of its class in
`classes`, where its fields are named. An object that occurs again is a reference to the first time.
Nothing is evaluated or imported: only classes on a list can come back, those that the modules of
machines define themselves, and only with the fields that they have here. Pure.
"""

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import chain
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeVar

import msgspec

from elastic_driver.errors import UsageError

FORMAT = 1
_PURE_PACKAGES = ("elastic_driver.core.", "elastic_driver.policies.")
_PURE_MODULES = frozenset(
    (
        *("elastic_driver.settings", "elastic_driver.brain.algorithm"),
        *("elastic_driver.brain.cluster", "elastic_driver.brain.documents"),
        *("elastic_driver.brain.jobs", "elastic_driver.brain.plans", "elastic_driver.brain.speeds"),
    )
)
_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))
# Errors that reading wrong bytes can raise; the last two by huge numbers and by deep nesting.
_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
_AGAIN, _LIST, _TUPLE, _SET, _DICT, _DEQUE = range(-6, 0)
Restored = TypeVar("Restored", bound="Restorable")


class SnapshotError(UsageError):
    """Bytes that are no snapshot for this version."""


class Restorable:
    """A machine whose state is all of its attributes, and comes back from a snapshot."""

    def snapshot(self) -> bytes:
        """See `Machine.snapshot`."""
        return pack(self)

    @classmethod
    def restored(cls: type[Restored], snapshot: bytes) -> Restored:
        """Return the machine of a snapshot; raises `SnapshotError` for one of another version."""
        machine = unpack(snapshot)
        if not isinstance(machine, cls):
            raise SnapshotError(f"this is a snapshot of a {type(machine).__name__}")
        return machine


def pack(root: object) -> bytes:
    """Return an object, and everything it refers to, as bytes."""
    packer = _Packer()
    packed = packer.pack(root)
    classes = [(_name(kind), _fields(kind)) for kind in packer.classes]
    return msgspec.msgpack.encode((FORMAT, classes, packed))


def unpack(snapshot: bytes) -> object:
    """Return the object of a snapshot; raises `SnapshotError` if that is impossible."""
    try:
        found, classes, root = msgspec.msgpack.decode(snapshot)
    except _DAMAGE as error:
        raise SnapshotError(f"a snapshot is damaged: {error}") from None
    if found != FORMAT:
        hint = "use the version of elastic-driver that wrote it"
        raise SnapshotError(f"a snapshot has format {found}, only {FORMAT} can be read; {hint}")
    try:
        return _Unpacker([_class(name, names) for name, names in classes]).unpack(root)
    except _DAMAGE as error:
        raise SnapshotError(f"a snapshot is damaged: {error}") from error


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


@cache
def _fields(kind: Any) -> tuple[str, ...] | None:
    """Return the names of a record's fields; None for a class without a list of them."""
    if is_dataclass(kind):
        return tuple(each.name for each in fields(kind))
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    names: tuple[str, ...] | None = getattr(kind, "_fields", None)  # of a NamedTuple
    return names


_OF_PYTHON: dict[str, type] = {_name(kind): kind for kind in (Counter, OrderedDict)}


@cache
def _classes_of(module: ModuleType) -> dict[str, type]:
    """Return the classes that a module defines itself, and that may be part of a state."""
    name = module.__name__
    found = [each for each in vars(module).values() if isinstance(each, type)]
    own = [each for each in found if each.__module__ == name and _holds(each)]
    return {_name(each): each for each in own}


def _holds(kind: Any) -> bool:
    """Return whether objects of a class are state: no errors, interfaces, or helpers."""
    if issubclass(kind, BaseException) or getattr(kind, "_is_protocol", False):
        return False
    return _fields(kind) is not None or not kind.__name__.startswith("_")


def _class(name: str, names: Iterable[str] | None) -> type:
    """Return a class by its name; raises `SnapshotError` if it is not one of ours, or differs."""
    module = name.partition(":")[0]
    is_pure = module in _PURE_MODULES or module.startswith(_PURE_PACKAGES)
    if not is_pure and name not in _OF_PYTHON:
        raise SnapshotError(f"a snapshot holds a {name}, which no machine has")
    loaded = sys.modules.get(module)
    listed = _classes_of(loaded) if is_pure and loaded is not None else _OF_PYTHON
    found = listed.get(name)
    expected = None if found is None else _fields(found)
    if found is None or (None if names is None else tuple(names)) != expected:
        hint = "use the version of elastic-driver that wrote it"
        raise SnapshotError(f"a snapshot holds another {name} than this version has; {hint}")
    return found


class _Packer:
    """Turns objects into lists, each object once."""

    def __init__(self) -> None:
        self.classes: dict[type, int] = {}  # each with its place in the list of classes
        self._places: dict[int, int] = {}  # by identity: the objects so far, in their order
        self._forms: dict[type, Callable[[Any], list[Any]]] = {}

    def pack(self, value: Any) -> Any:
        """Return a value in the form of a snapshot; raises `TypeError` if it has none."""
        kind: Any = type(value)
        if kind in _PLAIN:
            return value
        form = self._forms.get(kind)
        if form is None:
            form = self._forms[kind] = self._form_of(kind)
        if not _is_value(kind):
            known = self._places.get(id(value))
            if known is not None:
                return [_AGAIN, known]
            self._places[id(value)] = len(self._places)
        return form(value)

    def _form_of(self, kind: Any) -> Callable[[Any], list[Any]]:
        """Return the function that packs the values of a type."""
        pack_all = self._all
        if kind is tuple or kind is list:
            code = _TUPLE if kind is tuple else _LIST
            return lambda value: [code, *pack_all(value)]
        if kind is set:
            return lambda value: [_SET, *pack_all(sorted(value))]
        if kind is deque:
            return lambda value: [_DEQUE, value.maxlen, *pack_all(value)]
        if issubclass(kind, dict):
            code = _DICT if kind is dict else self._number(kind)
            return lambda value: [code, *pack_all(chain.from_iterable(value.items()))]
        code = self._number(kind)
        if issubclass(kind, Enum):
            packed = {each: [code, each.value] for each in kind}
            return packed.__getitem__
        values = _values(kind)
        return lambda value: [code, *pack_all(values(value))]

    def _all(self, values: Iterable[Any]) -> list[Any]:
        pack = self.pack
        return [v if type(v) in _PLAIN else pack(v) for v in values]

    def _number(self, kind: Any) -> int:
        number = self.classes[kind] = len(self.classes)
        if _class(_name(kind), _fields(kind)) is not kind:
            raise TypeError(f"a {_name(kind)} cannot be in a snapshot")
        return number


@cache
def _is_value(kind: Any) -> bool:
    """Return whether objects of a class never change, so that it does not matter which is which."""
    frozen = issubclass(kind, msgspec.Struct) and bool(kind.__struct_config__.frozen)
    return frozen or issubclass(kind, tuple | Enum)


@cache
def _values(kind: Any) -> Callable[[Any], Iterable[Any]]:
    """Return a function that reads all fields of an object; without a list, their names too."""
    names = _fields(kind)
    if names is None:
        return lambda plain: chain.from_iterable(vars(plain).items())
    if len(names) > 1:
        return attrgetter(*names)
    return lambda record: [getattr(record, name) for name in names]


class _Unpacker:
    """Turns lists back into objects."""

    def __init__(self, classes: list[type]) -> None:
        self._classes = classes
        self._objects: list[Any] = []  # in the order of their first occurrence

    def unpack(self, packed: Any) -> Any:
        """Return the value of its form in a snapshot."""
        if not isinstance(packed, list):
            return packed
        code, *rest = packed
        if code >= 0:
            return self._unpack_record(self._classes[code], rest)
        if code == _TUPLE:
            return tuple(map(self.unpack, rest))
        if code == _AGAIN:
            return self._objects[rest[0]]
        if code == _DICT:
            return self._fill_dict({}, rest)
        new: Any = {_LIST: list, _SET: set}[code]() if code != _DEQUE else deque(maxlen=rest.pop(0))
        self._objects.append(new)
        (new.update if code == _SET else new.extend)(map(self.unpack, rest))
        return new

    def _unpack_record(self, kind: Any, rest: list[Any]) -> Any:
        if issubclass(kind, Enum):
            return kind(rest[0])
        if issubclass(kind, tuple):
            return kind(*map(self.unpack, rest))
        if issubclass(kind, dict):
            return self._fill_dict(kind(), rest)
        if issubclass(kind, msgspec.Struct):
            return self._unpack_struct(kind, rest)
        new = kind.__new__(kind)
        self._objects.append(new)
        names = _fields(kind)
        named = (rest[::2], rest[1::2]) if names is None else (names, rest)
        for name, value in zip(*named, strict=True):
            object.__setattr__(new, name, self.unpack(value))
        return new

    def _unpack_struct(self, kind: type[msgspec.Struct], rest: list[Any]) -> msgspec.Struct:
        place = len(self._objects)
        if not kind.__struct_config__.frozen:
            self._objects.append(None)  # nothing inside refers to it
        values = zip(kind.__struct_fields__, map(self.unpack, rest), strict=True)
        new = kind(**dict(values))
        if not kind.__struct_config__.frozen:
            self._objects[place] = new
        return new

    def _fill_dict(self, new: dict[Any, Any], rest: list[Any]) -> dict[Any, Any]:
        self._objects.append(new)
        for key, value in zip(rest[::2], rest[1::2], strict=True):
            found = self.unpack(key)
            new[found] = self.unpack(value)
        return new
