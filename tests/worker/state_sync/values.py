"""Random plain values, and whether two are the same in type, content and shape."""

from __future__ import annotations

import enum
import math
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from hypothesis import strategies as st

from elastic_driver.worker.state_sync.contents import TensorSpec
from elastic_driver.worker.state_sync.message import Reader, Writer, places


class Colour(enum.Enum):
    RED = "r"
    GREEN = 2


class Level(enum.IntEnum):
    LOW = 1


class Flags(enum.Flag):
    A = 1
    B = 2


@dataclass
class Point:
    x: Any
    y: Any = 0
    tags: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Fixed:
    a: Any
    b: Any = None


@dataclass
class Slotted:
    __slots__ = ("one", "two")
    one: Any
    two: Any


class Pair(NamedTuple):
    left: Any
    right: Any


TENSORS = (
    torch.arange(6.0).reshape(2, 3),
    torch.arange(6.0).reshape(2, 3).t(),
    torch.tensor(3),
    torch.empty(0, 4),
    torch.tensor([True, False]),
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([1 + 2j]),
    torch.ones(1).expand(4),
    torch.nn.Parameter(torch.tensor([1.0, -2.0])),
)
ARRAYS = (
    np.arange(6).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(3.5),
    np.empty((0, 2), dtype=np.int8),
    np.array(["a", "bcd"]),
    np.array(["2026-11-26"], dtype="M8[D]"),
    np.zeros(2, dtype=[("x", "f4"), ("y", "i8")]),
)
SCALARS = (
    np.float64(2.5),
    np.int8(-3),
    np.bool_(True),
    np.str_("été"),
    np.str_(""),
    np.float32("nan"),
)
SINGLE = (
    *(Colour.RED, Colour.GREEN, Level.LOW, Flags.A, Flags.A | Flags.B),
    *(Decimal("1.50"), Fraction(3, 7), PurePosixPath("/a/b"), range(3, 30, 4), slice(1, None, 2)),
    *(
        datetime(2026, 11, 26, 1, 2, 3, 4, timezone(timedelta(hours=-3))),
        datetime(2026, 1, 1, fold=1),
    ),
    *(date(2026, 1, 2), time(3, 4, 5, 6), timedelta(-1, 5, 7), timezone.utc),
    *(torch.float16, torch.device("cpu"), torch.Size([2, 3]), ..., complex(1, math.inf), int, dict),
    *(math.sqrt, torch.nn.Linear, b"", b"\x00\xff", 2**70, -(2**64), 2**63, -(2**63), "\ud800", ""),
)


def single() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=4),
        st.text(st.characters(), max_size=3),  # also halves of surrogate pairs
        st.binary(max_size=4),
        st.sampled_from(SINGLE),
        st.sampled_from(SCALARS),
        st.sampled_from(TENSORS).map(_copy_tensor),
        st.sampled_from(ARRAYS).map(lambda array: array.copy()),
        st.binary(max_size=3).map(bytearray),
    )


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.detach().clone())
    return tensor.clone()


def keys() -> st.SearchStrategy[Any]:
    simple = st.one_of(st.text(max_size=3), st.integers(), st.none(), st.binary(max_size=2))
    return st.one_of(
        simple, st.tuples(simple, simple), st.sampled_from((Colour.RED, date(2026, 1, 2)))
    )


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=4)
    tables = st.dictionaries(keys(), inner, max_size=4)
    names = st.dictionaries(st.sampled_from(("a", "b", "c")), inner, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(lambda items: deque(items, 5)),
        tables,
        tables.map(OrderedDict),
        tables.map(lambda table: defaultdict(list, table)),
        st.dictionaries(keys(), st.integers(), max_size=3).map(Counter),
        st.sets(keys(), max_size=4),
        st.frozensets(keys(), max_size=4),
        names.map(lambda table: SimpleNamespace(**table)),
        names.map(lambda table: Namespace(**table)),
        st.builds(Point, inner, inner, lists),
        st.builds(Fixed, inner, inner),
        st.builds(Slotted, inner, inner),
        st.builds(Pair, inner, inner),
        inner.map(lambda value: [value, value]),  # one object, twice
    )


def values() -> st.SearchStrategy[Any]:
    return st.recursive(single(), _containers, max_leaves=12)


def same(a: Any, b: Any) -> bool:
    """Equal in type and content, also inside, and with the same objects twice."""
    return _same(a, b, {})


def _same(a: Any, b: Any, seen: dict[int, int]) -> bool:
    if type(a) is not type(b):
        return False
    if type(a) in (list, dict, deque, Point, Namespace, SimpleNamespace):
        if id(a) in seen:
            return seen[id(a)] == id(b)
        seen[id(a)] = id(b)
    if isinstance(a, torch.Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype and a.requires_grad == b.requires_grad
        return alike and torch.equal(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key], seen) for key in a)
    if isinstance(a, set | frozenset):
        return bool(a == b)
    if isinstance(a, list | tuple | deque):
        if isinstance(a, deque) and a.maxlen != b.maxlen:
            return False
        return len(a) == len(b) and all(_same(x, y, seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, Slotted):
        return _same((a.one, a.two), (b.one, b.two), seen)
    if isinstance(a, Point | Fixed | Namespace | SimpleNamespace):
        return _same(vars(a), vars(b), seen)
    return bool(a == b)


def sent(value: Any, live: Any = None) -> Any:
    """What a receiver gets that has `live` in its place."""
    writer = Writer()
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(writer.write(value, "value")))
    into = places(data, [TensorSpec.of(tensor) for _, tensor in writer.tensors], live)
    with torch.no_grad():
        for target, (_, tensor) in zip(into, writer.tensors, strict=True):
            target.copy_(tensor)
    return Reader(into, what="the value").read(data, live)
