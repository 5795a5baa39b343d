"""Snapshots of machines: tables with a version, from which a later version makes the machine again.

A machine is made of parts. A part is a dataclass; the fields that it makes with `saved` are its
state, and its table is `{name: value}` of these. The name belongs to the table, not to the code: a
field that is renamed keeps it. A field that a table lacks has its default, and one that is unknown
is left out, so a snapshot of another version can be read as long as the meaning of no name has
changed. If it has, the machine's `VERSION` grows, and `UPGRADES` says how to come from the version
before.

Values are what msgspec reads and writes by their types: plain values, dataclasses, structs, named
tuples, enums, and lists, dictionaries, tuples and sets of them. An object that several fields have
is saved once: an `index` keeps only the order of the names. Nothing is evaluated or imported. Pure.

The form is msgpack: `[FORMAT, machine, version, {part: table}]`.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from elastic_driver.errors import UsageError

FORMAT = 2
Tables = dict[str, Any]  # part → table
Restored = TypeVar("Restored", bound="Snapshots")
Part = TypeVar("Part")
# What reading wrong bytes can raise; the last two by huge numbers and by deep nesting.
_DAMAGE = (
    *(msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError),
    *(OverflowError, RecursionError),
)
_encode = msgspec.msgpack.Encoder().encode
_Table = tuple[int, str, int, Tables]
_decode = msgspec.msgpack.Decoder(_Table).decode


class SnapshotError(UsageError):
    """Bytes that are no snapshot for this version."""


def saved(
    default: Any = MISSING, *, name: str = "", factory: Callable[[], Any] | None = None
) -> Any:
    """Make a field of a part that belongs to its state.

    `name`: in the table; a private field needs one, a public one has its own.
    """
    return _field(default, factory, {"saved": name})


def index(of: str, *, name: str = "", factory: Callable[[], Any] = dict) -> Any:
    """Make a field with records of the fields `of` (separated by spaces), by their names there.

    It is a dictionary of records, or a dictionary of such dictionaries.
    """
    return _field(MISSING, factory, {"saved": name, "of": tuple(of.split())})


def _field(default: Any, factory: Callable[[], Any] | None, metadata: dict[str, Any]) -> Any:
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


class _Column(NamedTuple):
    """A field of a part, as its table has it."""

    attribute: str
    name: str
    kind: Any  # the type of the value in the table
    save: Callable[[Any], Any] | None = None  # from the field to the table; None: as it is
    load: Callable[..., Any] | None = None  # and back; of an index: with the records
    of: tuple[str, ...] = ()  # the fields that have the records of an index


@cache
def columns(part: Any) -> tuple[_Column, ...]:
    """Return the columns of a part's table; raises TypeError for a private one without a name."""
    hints, found = get_type_hints(part), []
    for each in fields(part):
        if "saved" in each.metadata:
            name = each.metadata["saved"] or each.name
            if name.startswith("_"):
                raise TypeError(f"{part.__name__}.{each.name} needs a name in the table")
            of = each.metadata.get("of", ())
            form = _of_index(hints[each.name]) if of else _of_value(hints[each.name])
            found.append(_Column(each.name, name, *form, of))
    return tuple(found)


_Form = tuple[Any, Callable[[Any], Any] | None, Callable[..., Any] | None]


def _of_index(kind: Any) -> _Form:
    """Return how an index is saved: the names of its records, in their order."""
    key, value = get_args(kind)
    if get_origin(value) is dict:
        return dict[key, list[str]], _names_by_key, _records_by_key  # type: ignore[valid-type]
    return list[str], list, _records


def _of_value(kind: Any) -> _Form:
    """Return how a value of this type is saved."""
    args = get_args(kind)
    if get_origin(kind) is deque:
        return list[args[0]], list, deque  # type: ignore[valid-type]
    if get_origin(kind) is Counter:
        return dict[args[0], int], dict, Counter  # type: ignore[valid-type]
    if get_origin(kind) is dict and _is_struct(args[0]):
        return list[tuple[args[0], args[1]]], _pairs, dict  # type: ignore[valid-type]
    return kind, _in_order if "set[" in str(kind) else None, None


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _names_by_key(found: dict[Any, dict[str, Any]]) -> dict[Any, list[str]]:
    return {key: list(records) for key, records in found.items()}


def _records(names: list[str], known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: known[name] for name in names}


def _records_by_key(found: dict[Any, list[str]], known: Mapping[str, Any]) -> dict[Any, Any]:
    return {key: _records(names, known) for key, names in found.items()}


def _pairs(found: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the items of a dictionary whose keys are no keys in msgpack."""
    return list(found.items())


def _in_order(value: Any) -> Any:
    """Return a value with its sets as sorted lists, so that equal states have equal bytes."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {key: _in_order(each) for key, each in value.items()}
    return value


@cache
def _type_of(part: Any) -> type[msgspec.Struct]:
    """Return the type of a part's table: all of its fields may be missing."""
    types = [(c.name, c.kind | msgspec.UnsetType, msgspec.UNSET) for c in columns(part)]
    return msgspec.defstruct(f"{part.__name__}Table", types, kw_only=True)


def table(part: Any) -> Tables:
    """Return the state of a part."""
    found = {}
    kind: Any = type(part)
    for column in columns(kind):
        value = getattr(part, column.attribute)
        found[column.name] = value if column.save is None else column.save(value)
    return found


def values(part: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a part from its table; raises an error of msgspec, or KeyError."""
    read, known, indexes = msgspec.convert(found, _type_of(part)), dict[str, Any](), []
    for column in columns(part):
        value = getattr(read, column.name)
        if value is not msgspec.UNSET:
            known[column.attribute] = value
            if column.of:
                indexes.append(column)
            elif column.load is not None:
                known[column.attribute] = column.load(value)
    for column in indexes:
        records = {name: r for of in column.of for name, r in known.get(of, {}).items()}
        assert column.load is not None  # noqa: S101 - every index has one
        known[column.attribute] = column.load(known[column.attribute], records)
    return known


def make(part: type[Part], found: Mapping[str, Any]) -> Part:
    """Return the part of a table; its `__init__` is not called.

    What the table lacks, and what is no state, has its default. Raises KeyError if there is none.
    """
    known, made = values(part, found), part.__new__(part)
    set_defaults(made)
    for name, value in known.items():
        setattr(made, name, value)
    kind: Any = part
    lacking = [c.name for c in columns(kind) if not hasattr(made, c.attribute)]
    if lacking:
        raise KeyError(f"the table of {part.__name__} lacks {lacking[0]}")
    return made


def set_defaults(part: Any) -> None:
    """Give the fields of a new part their defaults; for an `__init__` of its own."""
    for each in fields(part):
        if each.default_factory is not MISSING:
            setattr(part, each.name, each.default_factory())
        elif each.default is not MISSING:
            setattr(part, each.name, each.default)


class Snapshots:
    """A machine that can be made again from a snapshot.

    A machine of one part is a dataclass itself; one of several overrides `tables` and
    `from_tables`.
    """

    VERSION: ClassVar[int] = 1
    # version → a change of the tables of that version into those of the next one, in place
    UPGRADES: ClassVar[Mapping[int, Callable[[Tables], None]]] = {}

    def tables(self) -> Tables:
        """Return the state by parts."""
        return {"": table(self)}

    @classmethod
    def from_tables(cls: type[Restored], found: Tables) -> Restored:
        """Return the machine of these tables."""
        return make(cls, found[""])

    def snapshot(self) -> bytes:
        """Return the state as bytes; equal states have equal bytes."""
        return _encode((FORMAT, type(self).__name__, self.VERSION, self.tables()))

    @classmethod
    def restored(cls: type[Restored], snapshot: bytes) -> Restored:
        """Return the machine of a snapshot; raises `SnapshotError` for one it cannot read."""
        found = _read(snapshot)
        if found[1] != cls.__name__:
            raise SnapshotError(
                f"this is a snapshot of a {found[1][:40]!r}, not of a {cls.__name__}"
            )
        _, _, version, tables = found
        if version > cls.VERSION:
            newest = f"only up to {cls.VERSION} can be read"
            raise SnapshotError(
                f"a snapshot of version {version} of the {cls.__name__}, {newest}; {_HINT}"
            )
        try:
            for each in range(version, cls.VERSION):
                cls.UPGRADES[each](tables)
            return cls.from_tables(tables)
        except _DAMAGE as error:
            raise SnapshotError(f"a snapshot cannot be read: {error}; {_HINT}") from error


_HINT = "use the version of elastic-driver that wrote it"


def _read(snapshot: bytes) -> _Table:
    try:
        form = msgspec.msgpack.decode(snapshot, type=list[Any])[0]
        if isinstance(form, int) and form != FORMAT:
            raise SnapshotError(f"a snapshot has format {form}, only {FORMAT} can be read; {_HINT}")
        found: _Table = _decode(snapshot)
    except _DAMAGE as error:
        raise SnapshotError(f"a snapshot is damaged: {error}") from None
    return found
