"""Plain values as a message: equal on the other side, in its own objects, or refused by name."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import fractions
import pathlib
import random
import types
import uuid
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.message import Reader, Writer, places
from elastic_driver.worker.state_sync.values import TensorSpec


class Colour(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Progress:
    step: int
    losses: list[float]


@dataclasses.dataclass(frozen=True)
class Fixed:
    name: str
    inner: list[int]


def carried(value: Any, live: Any = None) -> Any:
    """A value after its way through bytes, read into `live`."""
    writer = Writer()
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(writer.write(value, "v")))
    tensors = [tensor for _, tensor in writer.tensors]
    found = places(data, [TensorSpec.of(tensor) for tensor in tensors], live)
    with torch.no_grad():
        for target, content in zip(found, tensors, strict=True):
            target.copy_(content)
    return Reader(found, what="v").read(data, live)


KEPT: list[Any] = [
    (None, True, -7, 2.5, "text", b"", b"\x00\xff", 2**63, -(2**63) - 1, 10**40, 1 + 2j, ...),
    [range(1, 9, 2), slice(1, None, 2), decimal.Decimal("1.10"), fractions.Fraction(1, 3)],
    [uuid.UUID(int=5), pathlib.Path("a/b"), pathlib.PurePosixPath("c"), Colour.RED],
    [datetime(2024, 1, 2, 3, 4, 5, 6, timezone.utc), date(2024, 1, 2), time(3, 4), timedelta(1)],
    [timezone(timedelta(hours=2)), torch.float16, torch.device("cpu"), torch.Size([2, 3])],
    {"a": {1: (2, [3])}, (1, "t"): set(), b"k": frozenset({1, "x", (2, 3)}), 2**70: None},
    [OrderedDict(b=1, a=2), Counter("aab"), defaultdict(list, x=[1]), deque([1, 2], maxlen=3)],
    [Pair(1, [2]), Progress(3, [0.5]), Fixed("f", [1]), Namespace(lr=0.1)],
    [types.SimpleNamespace(a=[1]), bytearray(b"xy"), dict, pathlib.Path, len],
    [np.float32(1.5), np.int64(3), np.bool_(True), np.datetime64("2024-01-02")],
]


@pytest.mark.parametrize("value", KEPT, ids=range(len(KEPT)))
def test_a_value_of_each_kept_kind_arrives_equal_and_of_the_same_type(value: Any) -> None:
    found = carried(value)
    assert found == value
    assert type(found) is type(value)
    if isinstance(value, list | tuple):
        assert list(map(type, found)) == list(map(type, value))


def test_the_details_of_containers_arrive() -> None:
    ordered, default, line = carried([OrderedDict(b=1, a=2), defaultdict(list), deque([1], 3)])
    assert list(ordered) == ["b", "a"]
    assert default["new"] == []
    assert line.maxlen == 3


def test_tensors_and_arrays_arrive_with_their_dtype_shape_and_flags() -> None:
    value = [
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.tensor(7),
        torch.empty(0),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        np.arange(6, dtype="int16").reshape(2, 3).T,
        np.empty((0, 2)),
    ]
    found = carried(value)
    for mine, theirs in zip(found, value, strict=True):
        assert type(mine) is type(theirs)
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert (mine == theirs).all()
        assert getattr(mine, "requires_grad", 0) == getattr(theirs, "requires_grad", 0)


def test_a_value_arrives_in_the_live_objects_of_the_receiver() -> None:
    def make(number: int) -> dict[str, Any]:
        return {
            "list": [number, {"deep": [number]}],
            "set": {number},
            "deque": deque([number]),
            "bytes": bytearray([number]),
            "progress": Progress(number, [number]),
            "fixed": Fixed("f", [number]),
            "space": Namespace(n=number, own=[number]),
            "tensor": torch.full((3,), number),
            "array": np.full(3, number),
        }

    live = make(1)
    inner = [live, live["list"][1]["deep"], live["progress"].losses, live["fixed"].inner]
    before = {k: v for k, v in live.items() if k != "fixed"}
    found = carried(make(2), live)
    assert found is live
    assert all(live[key] is old for key, old in before.items())
    again = [live, live["list"][1]["deep"], live["progress"].losses, live["fixed"].inner]
    assert all(mine is old for mine, old in zip(again, inner, strict=True))
    assert repr(live) == repr(make(2))


def test_the_generators_of_the_receiver_go_on_as_those_of_the_sender() -> None:
    def make(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        return [random.Random(seed), np.random.default_rng(seed), generator]

    sent, live = make(1), make(2)
    found = carried(sent, live)
    assert all(mine is old for mine, old in zip(found, live, strict=True))
    assert live[0].random() == sent[0].random()
    assert live[1].random() == sent[1].random()
    assert torch.rand(1, generator=live[2]) == torch.rand(1, generator=sent[2])
    with pytest.raises(UsageError, match="v is a random generator, Random, there"):
        carried(random.Random(1))


def test_what_is_shared_stays_shared_and_a_cycle_stays_a_cycle() -> None:
    shared, tensor, array = [1], torch.ones(2), np.ones(2)
    cycle: list[Any] = []
    cycle.append({"back": cycle})
    value = [shared, {"s": shared}, tensor, (tensor,), array, array, cycle]
    found = carried(value)
    assert found[0] is found[1]["s"]
    assert found[2] is found[3][0]
    assert found[4] is found[5]
    assert found[6][0]["back"] is found[6]


def test_a_tuple_that_holds_itself_is_refused_and_never_becomes_another_value() -> None:
    inner: list[Any] = []
    inner.append((inner,))
    assert carried(inner)[0][0][0][0] is not None
    with pytest.raises(UsageError, match="holds itself"):
        carried(inner[0])


def test_members_of_a_set_are_not_mixed_up_with_each_other() -> None:
    members = [(number, -number) for number in range(20)]
    assert carried([set(members), *members]) == [set(members), *members]


def test_objects_that_were_one_here_but_are_two_there_become_two() -> None:
    same = [0]
    live = [same, same]
    assert carried([[1], [2]], live) == [[1], [2]]


def test_a_class_that_the_reader_has_not_loaded_is_named() -> None:
    data = ["class", ["nowhere", "Config"], [[], []]]
    for each in (data, ["enum", ["nowhere", "Config"], "A"], ["name", ["nowhere", "Config"]]):
        with pytest.raises(UsageError, match="Config of nowhere, which this process has not"):
            Reader([], what="the state").read(each)


GARBAGE: list[Any] = [
    [],
    [[]],
    ["list"],
    ["dict", None, [1]],
    ["set", None, [["list", None, []]]],
    ["strange", 1],
    ["same", 3],
    ["part", 0],
    ["tensor", 0, False, False],
    ["bytes", 10**15],
    ["Decimal", "x"],
    ["Fraction", "1/0"],
    ["timedelta", [1e300, 0, 0]],
    ["device", "nothing"],
    ["dtype", "Tensor"],
    ["enum", ["os", "environ"], "PATH"],
    ["name", ["os", "environ"]],
    ["class", ["os", "system"], ["true"]],
    ["class", ["subprocess", "Popen"], ["true"]],
    ["array", "O", [1], b"12345678"],
    ["scalar", "<f8", b""],
    ["random", "Random", 1],
]


@pytest.mark.parametrize("data", GARBAGE, ids=repr)
def test_data_that_no_writer_wrote_is_a_usage_error(data: Any) -> None:
    with pytest.raises(UsageError):
        Reader([]).read(["list", None, [data]])


_scalars = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**80), 2**80) | st.binary()
) | (st.floats(allow_nan=False) | st.text())
_values = st.recursive(
    _scalars | st.sets(_scalars) | st.frozensets(_scalars),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(_scalars | st.tuples(_scalars), inner)
    ),
    max_leaves=15,
)


@given(_values, _values)
def test_any_plain_value_arrives_equal_whatever_the_receiver_had(value: Any, live: Any) -> None:
    wanted = repr(carried(value))
    assert carried(value) == value
    found = carried(value, live)
    assert found == value
    assert repr(found) == wanted, "also of the same types"
