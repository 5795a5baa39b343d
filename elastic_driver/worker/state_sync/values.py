"""The kinds of plain values that a state can keep and send: tables of types.

A plain value is a tree: numbers, strings, dates, paths, enums, NumPy values, tensors, and
containers of them. `taking` copies such values for a commit, `message` sends them. What is in no
table cannot be kept, and `UnkeptError` names it.

Classes and functions are sent by name, if other workers find them by it. A worker that joins has
loaded what the script loads before its training function is called, and has not run that function.
So what is imported or defined in there has no name that it knows. NumPy is imported only where a
script uses it.
"""

import dataclasses
import decimal
import enum
import fractions
import pathlib
import sys
import types
import uuid
import warnings
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta, timezone
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import torch

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.contents import UnkeptError, torch_dtype

SIMPLE = frozenset({int, float, bool, str, bytes, type(None)})
LARGEST = 2**63  # of whole numbers that msgpack carries
OTHER = "?"  # in place of the name of a factory
DEEPEST = 100  # containers inside of each other: each Python can walk as many
_OF_PYTHON = 1 << 9  # of a class: it was made by a class statement (Py_TPFLAGS_HEAPTYPE)


def unkept(path: str, value: Any) -> UnkeptError:
    """Return the error that names a value of an unknown kind."""
    kind = type(value)
    if is_of_numpy(value):
        return UnkeptError(
            path,
            f"it is a {kind.__name__} of NumPy with the dtype {value.dtype}",
            "keep numbers, text and dates in it, not objects, and fields that do not overlap",
        )
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | enum.Enum):
        named = value if hasattr(value, "__qualname__") else kind
        return UnkeptError(path, *no_name(named.__module__, named.__qualname__))
    if isinstance(value, types.GeneratorType) or hasattr(value, "__next__"):
        return UnkeptError(
            path,
            f"it is an iterator ({kind.__name__}), whose position nobody knows",
            "keep a counter or a sampler in the state, and make the iterator anew in each world",
        )
    return UnkeptError(
        path,
        f"it is of the class {kind.__qualname__}",
        "turn it into a dataclass, give the class state_dict() and load_state_dict(), or keep it "
        "outside of the state",
    )


def knot(path: str, value: Any) -> UnkeptError:
    """Return the error for a tuple, or the like, inside of itself: nobody could make it again."""
    return UnkeptError(path, f"it is a {type(value).__name__} that holds itself", "use a list")


def too_deep(path: str) -> UnkeptError:
    """Return the error for a value that cannot be walked to its end."""
    return UnkeptError(path, "it is nested too deep", "keep flatter values in the state")


# ---- kinds of containers ------------------------------------------------------------------


class Kind(NamedTuple):
    """How one type of container is taken apart, filled, and made.

    `children` returns all that is inside, keys before values. `fill` makes an object hold these
    children; None: the object cannot change. `make` returns a new object for them; its second
    argument is what `more` returned, plain data about the object itself. `problem`: why objects of
    this type cannot be kept.
    """

    children: Callable[[Any], list[Any]]
    fill: Callable[[Any, list[Any]], None] | None
    make: Callable[[list[Any], Any], Any]
    more: Callable[[Any], Any] = lambda _: None
    problem: tuple[str, str] | None = None


def _fill_list(target: list[Any], items: list[Any]) -> None:
    target[:] = items


def _table(items: list[Any]) -> dict[Any, Any]:
    """Return keys and the values behind them as a dictionary."""
    half = len(items) // 2
    return dict(zip(items[:half], items[half:], strict=True))


def _fill_dict(target: Any, items: list[Any]) -> None:
    pairs = _table(items)
    target.clear()
    target.update(pairs)


def _fill_counter(target: Any, items: list[Any]) -> None:
    target.clear()
    dict.update(target, _table(items))


def _fill_set(target: set[Any], items: list[Any]) -> None:
    target.clear()
    target.update(items)


def _fill_deque(target: deque[Any], items: list[Any]) -> None:
    target.clear()
    target.extend(items)


def _fill_attributes(target: Any, items: list[Any]) -> None:
    _fill_dict(vars(target), items)


def _pairs(value: Any) -> list[Any]:
    return [*value.keys(), *value.values()]


def _attributes(value: Any) -> list[Any]:
    return _pairs(vars(value))


def _made(new: Callable[[Any], Any], fill: Callable[[Any, list[Any]], None]) -> Any:
    def make(items: list[Any], more: Any) -> Any:
        target = new(more)
        fill(target, items)
        return target

    return make


def _default_of(value: defaultdict[Any, Any]) -> Any:
    """Return how the factory of a dictionary is sent: None, module and name, or `OTHER`."""
    factory: Any = value.default_factory
    if factory is None:
        return None
    return [factory.__module__, factory.__qualname__] if is_referred(factory) else OTHER


def _default(written: Any) -> Any:
    """Return the factory that was written. Raises `UsageError` for one that is not known here."""
    if written is None:
        return None
    found = looked_up(*written) if isinstance(written, list) else None
    if found is None or not is_referred(found):
        name = written[1] if isinstance(written, list) else "a function without a name"
        raise UsageError(f"a defaultdict in the state makes its values by {name}, unknown here")
    return found


def has_nameless_factory(value: Any) -> bool:
    """Return whether only a worker that has made the same dictionary itself can receive it."""
    return type(value) is defaultdict and _default_of(value) == OTHER


def _dict_kind(new: Callable[[Any], Any], more: Callable[[Any], Any] = lambda _: None) -> Kind:
    return Kind(_pairs, _fill_dict, _made(new, _fill_dict), more)


kinds: dict[type, Kind] = {
    list: Kind(list, _fill_list, lambda items, _: list(items)),
    tuple: Kind(list, None, lambda items, _: tuple(items)),
    torch.Size: Kind(list, None, lambda items, _: torch.Size(items)),
    dict: _dict_kind(lambda _: {}),
    OrderedDict: _dict_kind(lambda _: OrderedDict()),
    Counter: Kind(_pairs, _fill_counter, _made(lambda _: Counter(), _fill_counter)),
    defaultdict: _dict_kind(lambda name: defaultdict(_default(name)), _default_of),
    set: Kind(list, _fill_set, lambda items, _: set(items)),
    frozenset: Kind(list, None, lambda items, _: frozenset(items)),
    deque: Kind(list, _fill_deque, deque, lambda value: value.maxlen),
    types.SimpleNamespace: Kind(
        _attributes, _fill_attributes, _made(lambda _: types.SimpleNamespace(), _fill_attributes)
    ),
    Namespace: Kind(_attributes, _fill_attributes, _made(lambda _: Namespace(), _fill_attributes)),
}
kind_names = {kind.__name__: kind for kind in kinds}


def _fields_of(value: Any) -> list[Any]:
    found = {
        f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)
    }
    own = getattr(value, "__dict__", found)
    if not own.keys() <= found.keys():  # the object has attributes beside its fields
        found |= {n: each for n, each in own.items() if n not in found and n[:2] != "__"}
    return _pairs(found)


def _own_names(value: Any) -> list[str]:
    """Return the attributes that an object has itself, not by its class."""
    slots = [
        f.name
        for f in dataclasses.fields(value)
        if isinstance(getattr(type(value), f.name, None), types.MemberDescriptorType)
    ]
    own = [name for name in getattr(value, "__dict__", {}) if not name.startswith("__")]
    return [*own, *(name for name in slots if hasattr(value, name))]


def _fill_fields(target: Any, items: list[Any]) -> None:
    content = _table(items)
    for name in content:
        if not isinstance(name, str) or name.startswith("__"):
            raise ValueError(f"an attribute cannot be named {name!r}")
    for name in [name for name in _own_names(target) if name not in content]:
        object.__delattr__(target, name)
    for name, value in content.items():
        object.__setattr__(target, name, value)  # also where the class is frozen


def _dataclass_kind(kind: type) -> Kind:
    def make(items: list[Any], _: Any) -> Any:
        target: Any = object.__new__(kind)
        _fill_fields(target, items)
        return target

    frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    problem = _problem_of(kind)
    inherited = [each for each in kind.__mro__[1:-1] if not each.__flags__ & _OF_PYTHON]
    if inherited:  # only the fields would be kept
        problem = (
            f"it is a dataclass that is a {inherited[0].__name__}, too",
            f"keep the {inherited[0].__name__} in a field",
        )
    return Kind(_fields_of, None if frozen else _fill_fields, make, problem=problem)


def _named_tuple_kind(kind: Any) -> Kind:
    def make(items: list[Any], _: Any) -> Any:
        if len(items) != len(kind._fields):
            raise ValueError(f"{kind.__qualname__} has {len(kind._fields)} fields here")
        return tuple.__new__(kind, items)

    return Kind(list, None, make, problem=_problem_of(kind))


def _problem_of(kind: type) -> tuple[str, str] | None:
    if is_known(kind):
        return None
    problem, hint = no_name(kind.__module__, kind.__qualname__)
    return f"its class {problem}", hint


def kind_of(kind: type) -> Kind | None:
    """Return how containers of this type are handled; None where it is no container."""
    found = kinds.get(kind)
    if found is not None or kind in _no_containers:
        return found
    if issubclass(kind, enum.Enum) or has_part(kind):
        pass
    elif dataclasses.is_dataclass(kind):
        found = kinds[kind] = _dataclass_kind(kind)
    elif found is None and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        found = kinds[kind] = _named_tuple_kind(kind)
    if found is None:
        _no_containers.add(kind)
    return found


_no_containers: set[type] = set()


def child_names(value: Any, items: Sequence[Any]) -> list[str]:
    """Return how each child of a container is written behind its path."""
    kind = type(value)
    has_names = dataclasses.is_dataclass(kind) or kind in (types.SimpleNamespace, Namespace)
    if has_names or isinstance(value, dict):
        keys = items[: len(items) // 2]
        return [f".{key}" for key in keys] * 2
    return [f".{index}" for index in range(len(items))]


# ---- kinds of single values ----------------------------------------------------------------


def _moment(value: Any) -> list[Any]:
    """Return a time, with or without a date, as text; its fold; and its time zone."""
    return [value.replace(tzinfo=None).isoformat(), value.fold, _zone(value.tzinfo)]


def _zone(zone: Any) -> Any:
    """Return a time zone as seconds or by name. Raises `ValueError` for one of another kind."""
    if type(zone) is timezone:
        return zone.utcoffset(None).total_seconds()
    if type(zone) is ZoneInfo and zone.key is not None:
        return zone.key
    if zone is not None:
        raise ValueError(f"its time zone is of the class {type(zone).__qualname__}")
    return None


def _from_zone(written: Any) -> Any:
    if written is None:
        return None
    return ZoneInfo(written) if isinstance(written, str) else timezone(timedelta(seconds=written))


atoms: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    complex: (lambda v: [v.real, v.imag], lambda d: complex(*d)),
    range: (
        lambda v: [str(v.start), str(v.stop), str(v.step)],
        lambda d: range(*map(int, d)),
    ),
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (str, fractions.Fraction),
    uuid.UUID: (str, uuid.UUID),
    datetime: (
        _moment,
        lambda d: datetime.fromisoformat(d[0]).replace(fold=d[1], tzinfo=_from_zone(d[2])),
    ),
    date: (lambda v: v.isoformat(), date.fromisoformat),
    time: (
        _moment,
        lambda d: time.fromisoformat(d[0]).replace(fold=d[1], tzinfo=_from_zone(d[2])),
    ),
    timedelta: (lambda v: [v.days, v.seconds, v.microseconds], lambda d: timedelta(*d)),
    timezone: (_zone, _from_zone),
    ZoneInfo: (_zone, _from_zone),
    torch.device: (str, torch.device),
    torch.dtype: (lambda v: str(v).removeprefix("torch."), torch_dtype),
    type(...): (lambda _: None, lambda _: ...),
}
for _path in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath):
    atoms[_path] = (str, _path)
atom_names = {kind.__name__: kind for kind in atoms}


def is_referred(value: Any) -> bool:
    """Return whether a value is a class or function that has a name in its module."""
    if not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return False
    return is_known(value)


_ZONED = frozenset({datetime, time, ZoneInfo})  # atoms of which not all can be kept


def is_single(value: Any) -> bool:
    """Return whether a value is one that never changes and holds no others."""
    kind = type(value)
    if kind in SIMPLE or (kind in atoms and kind not in _ZONED):
        return True
    if kind is slice:
        return all(is_single(each) for each in (value.start, value.stop, value.step))
    if kind in (datetime, time):
        return value.tzinfo is None or is_single(value.tzinfo)
    if kind is ZoneInfo:
        return value.key is not None
    if isinstance(value, enum.Enum):
        is_member = isinstance(value, enum.Flag) or kind.__members__.get(value.name) is value
        return is_member and is_known(kind)
    return is_scalar(value) or is_referred(value)


def has_part(value: Any) -> bool:
    """Return whether an object, or one of a class, is kept by a part of its own.

    It has a state that it can load.
    """
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or its type where there is no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# ---- names that other workers know -----------------------------------------------------

MAIN = "__main__"


class _Script:
    """What the script had loaded and defined when its training functions began.

    A worker that joins is there when the function is called: it has not loaded what comes inside.
    Names of modules, and `__main__:NAME` for what the script itself has defined.
    """

    trains = False
    loaded: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()

    @classmethod
    def knew(cls, module: Any, name: str) -> bool:
        own = f"{MAIN}:{name.partition('.')[0]}" if module == MAIN else module
        return own not in cls.late and (not cls.trains or own in cls.loaded)


def _loaded_now() -> frozenset[str]:
    own = vars(sys.modules[MAIN]) if MAIN in sys.modules else {}
    return frozenset(sys.modules) | {f"{MAIN}:{name}" for name in list(own)}


def training_begins() -> None:
    """Note what a worker that joins has loaded when it is given the state."""
    _Script.trains = True
    _Script.loaded = _loaded_now() - _Script.late


def training_ends() -> None:
    """Note what the training function has loaded, which a worker that skips it has not."""
    if _Script.trains:
        _Script.late |= _loaded_now() - _Script.loaded
        _Script.trains = False


def is_known(value: Any) -> bool:
    """Return whether a class or function is found by its name on other workers, too."""
    module, name = value.__module__, value.__qualname__
    return looked_up(module, name) is value and _Script.knew(module, name)


def looked_up(module: Any, name: str) -> Any:
    """Return what a name means in a module that is loaded; None where there is nothing."""
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def no_name(module: Any, name: str) -> tuple[str, str]:
    """Return why a class or function is not known to other workers, and what to do."""
    if looked_up(module, name) is not None and not _Script.knew(module, name):
        if module == MAIN:
            return (
                f"{name} was defined in the script after training had begun",
                "define it at the top of the script, so that a worker that joins knows it, too",
            )
        return (
            f"{name} is of the module {module}, which was imported after training had begun",
            "import it at the top of the script, so that a worker that joins knows it, too",
        )
    problem = f"{name} has no name that other workers know"
    return problem, "define it at the top of a module, and keep its name"


# ---- values of NumPy -------------------------------------------------------------------

LARGEST_BYTES = 2**32 - 1  # of an array, that msgpack carries


def _numpy() -> Any:
    return sys.modules.get("numpy")


def is_array(value: Any) -> bool:
    """Return whether a value is a NumPy array without objects."""
    numpy = _numpy()
    return numpy is not None and type(value) is numpy.ndarray and _travels(value)


def is_scalar(value: Any) -> bool:
    """Return whether a value is a NumPy scalar."""
    numpy = _numpy()
    return numpy is not None and isinstance(value, numpy.generic) and _travels(value)


def is_of_numpy(value: Any) -> bool:
    """Return whether a value is an array of NumPy, or a scalar of another kind than `is_scalar`."""
    numpy = _numpy()
    return numpy is not None and (
        type(value) is numpy.ndarray or (isinstance(value, numpy.generic) and not is_scalar(value))
    )


def _travels(value: Any) -> bool:
    """Return whether a NumPy value is one of plain data: its dtype can be written and read."""
    dtype = value.dtype
    found = _dtypes.get(dtype)
    if found is None:
        found = _dtypes[dtype] = not dtype.hasobject and _is_written_whole(dtype)
    return found and value.nbytes <= LARGEST_BYTES


_dtypes: dict[Any, bool] = {}


def written_dtype(dtype: Any) -> Any:
    """Return a dtype of NumPy as its file format writes it; what people add to it is left out."""
    import numpy  # noqa: PLC0415 - only where a script uses it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what is left out
        return numpy.lib.format.dtype_to_descr(dtype)


def _is_written_whole(dtype: Any) -> bool:
    import numpy  # noqa: PLC0415 - only where a script uses it

    try:
        return bool(numpy.lib.format.descr_to_dtype(written_dtype(dtype)) == dtype)
    except (TypeError, ValueError):  # its fields overlap, or are of a kind of its own
        return False
