"""Documents that are nearly what a type says: valid ones, and what becomes of them by accident.

A document of a msgspec type is made from the type itself, bounds and patterns included. Then a
value in it is exchanged for something else, or its bytes are cut, repeated or overwritten.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

MOST = 4  # items of a list that has no smaller bound

# Numbers at which something changes: of bytes, words, floats, and of digits that int() takes.
NUMBERS = st.one_of(
    st.sampled_from((-1, 0, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40)),
    st.integers(),
    st.floats(),
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(("", "\0", "\ud800", "../../etc/passwd", "a" * 5000, "٣", "²", "%s", "\r\n")),
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
# Deeper than Python lets anything nest.
DEEP = st.sampled_from((b"[" * 2000, b'{"a":' * 2000, b'{"more":' + b"[" * 2000))
DEEP_PACKED = st.sampled_from((b"\x91" * 2000, b"\x81\xa1a" * 2000))


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Plain values (dicts, lists, numbers …) that convert into this type."""
    return _of(inspect.type_info(kind))


def nearly(
    kind: Any,
    *,
    pack: Callable[[Any], bytes] | None = None,
    deep: st.SearchStrategy[bytes] = DEEP,
) -> st.SearchStrategy[bytes]:
    """The bytes of documents of this type, most of them damaged; JSON unless `pack` is given."""
    whole = of_type(kind)
    encode = pack or as_json
    return st.one_of(
        whole.map(encode),
        whole.flatmap(_exchanged).map(encode),
        whole.map(encode).flatmap(damaged),
        ANYTHING.map(encode),
        st.binary(max_size=64),
        deep,
    )


def nearly_packed(kind: Any) -> st.SearchStrategy[bytes]:
    """The same in msgpack."""
    return nearly(kind, pack=as_msgpack, deep=DEEP_PACKED)


def as_json(value: Any) -> bytes:
    """JSON of anything: numbers of any size, NaN, halves of surrogate pairs, bytes as base64."""
    return json.dumps(value, default=_base64).encode()


def as_msgpack(value: Any) -> bytes:
    """msgpack of anything that it can hold; numbers that are too large become floats."""
    return msgspec.msgpack.encode(_fitting(value))


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """These bytes with a part cut out, repeated, or overwritten."""
    at, end = sorted((draw(st.integers(0, len(whole))), draw(st.integers(0, len(whole)))))
    middle = draw(st.one_of(st.just(b""), st.just(whole[at:end] * 2), st.binary(max_size=8)))
    return whole[:at] + middle + whole[end:]


@st.composite
def _exchanged(draw: st.DrawFn, whole: Any) -> Any:
    """This value with one part of it exchanged for anything, left out, or added."""
    if isinstance(whole, dict) and whole and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(whole, key=str)))
        rest = {k: v for k, v in whole.items() if k != key}
        return draw(
            st.one_of(
                st.just(rest),
                st.just({**whole, "more": 1}),
                _exchanged(whole[key]).map(lambda new: {**rest, key: new}),
            )
        )
    if isinstance(whole, list | tuple) and whole and draw(st.booleans()):
        at = draw(st.integers(0, len(whole) - 1))
        return [*whole[:at], draw(_exchanged(whole[at])), *whole[at + 1 :]]
    return draw(ANYTHING)


def _of(info: inspect.Type) -> st.SearchStrategy[Any]:
    make = _MAKERS.get(type(info))
    assert make is not None, f"no documents of {info}"
    return make(info)


def _integers(info: inspect.IntType) -> st.SearchStrategy[Any]:
    least = info.ge if info.ge is not None else None if info.gt is None else info.gt + 1
    most = info.le if info.le is not None else None if info.lt is None else info.lt - 1
    return st.integers(least, most)


def _floats(info: inspect.FloatType) -> st.SearchStrategy[Any]:
    least, most = (info.gt, info.le) if info.ge is None else (info.ge, info.le)
    excluded = info.ge is None and info.gt is not None
    return st.floats(least, most, allow_nan=False, allow_infinity=False, exclude_min=excluded)


def _strings(info: inspect.StrType) -> st.SearchStrategy[Any]:
    if info.pattern is not None:
        text = st.from_regex(info.pattern)
        return text.filter(lambda t: (info.min_length or 0) <= len(t) <= (info.max_length or 999))
    most = 40 if info.max_length is None else min(40, info.max_length)
    return st.text(min_size=info.min_length or 0, max_size=most)


def _lists(info: Any) -> st.SearchStrategy[Any]:
    least, most = info.min_length or 0, info.max_length
    most = max(least, MOST) if most is None else min(most, max(least, MOST))
    return st.lists(_of(info.item_type), min_size=least, max_size=most)


def _dicts(info: inspect.DictType) -> st.SearchStrategy[Any]:
    least = info.min_length or 0
    keys, values = _of(info.key_type), _of(info.value_type)
    return st.dictionaries(keys, values, min_size=least, max_size=max(least, MOST))


def _structs(info: Any) -> st.SearchStrategy[Any]:
    needed = {f.encode_name: _of(f.type) for f in info.fields if f.required}
    others = {f.encode_name: _of(f.type) for f in info.fields if not f.required}
    tag = {} if getattr(info, "tag", None) is None else {info.tag_field: info.tag}
    if getattr(info, "array_like", False):
        parts = st.tuples(*needed.values(), *others.values())
        return parts.map(lambda found: [*tag.values(), *found])
    return st.fixed_dictionaries(needed, optional=others).map(lambda found: {**tag, **found})


_MAKERS: dict[type, Callable[[Any], st.SearchStrategy[Any]]] = {
    inspect.AnyType: lambda _: ANYTHING,
    inspect.NoneType: lambda _: st.none(),
    inspect.BoolType: lambda _: st.booleans(),
    inspect.IntType: _integers,
    inspect.FloatType: _floats,
    inspect.StrType: _strings,
    inspect.BytesType: lambda _: st.binary(max_size=30),
    inspect.LiteralType: lambda info: st.sampled_from(info.values),
    inspect.EnumType: lambda info: st.sampled_from([each.value for each in info.cls]),
    inspect.ListType: _lists,
    inspect.VarTupleType: _lists,
    inspect.SetType: _lists,
    inspect.TupleType: lambda info: st.tuples(*map(_of, info.item_types)).map(list),
    inspect.DictType: _dicts,
    inspect.UnionType: lambda info: st.one_of(*map(_of, info.types)),
    inspect.StructType: _structs,
    inspect.DataclassType: _structs,
}


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _fitting(value: Any) -> Any:
    match value:
        case dict():
            return {_fitting(k): _fitting(v) for k, v in value.items()}
        case list() | tuple():
            return [_fitting(each) for each in value]
        case bool():
            return value
        case int() if not -(2**63) <= value < 2**64:
            return float("inf")
        case str():
            return value.encode("utf-8", "replace").decode()
    return value
