"""Plain values survive the wire, in the receiver's own objects, and nothing else comes through."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.contents import TensorSpec, UnkeptError
from elastic_driver.worker.state_sync.message import Reader, Writer, places
from tests.worker.state_sync.values import (
    ARRAYS,
    SCALARS,
    SINGLE,
    TENSORS,
    Fixed,
    Pair,
    Point,
    same,
    sent,
    values,
)


@pytest.mark.parametrize("value", [*SINGLE, *SCALARS, *ARRAYS, *TENSORS], ids=repr)
def test_each_kind_of_value_arrives_as_it_was(value: Any) -> None:
    assert same(sent(value), value)


@settings(max_examples=300)
@given(values())
def test_any_nested_value_arrives_as_it_was(value: Any) -> None:
    assert same(sent(value), value)


@settings(max_examples=300)
@given(values(), values())
def test_any_value_arrives_in_the_place_of_any_other(value: Any, live: Any) -> None:
    found = sent(value, live)
    assert same(found, value)
    fillable = type(live) in (list, dict, set, deque, OrderedDict, Point, bytearray)
    if type(live) is type(value) and fillable and not isinstance(live, deque):
        assert found is live, "the receiver's own object"


@settings(max_examples=200)
@given(values())
def test_a_value_that_is_there_already_is_filled_at_every_level(value: Any) -> None:
    live = sent(value)
    before = list(_objects(live))
    found = sent(value, live)
    assert same(found, value)
    assert [id(each) for each in _objects(found)] == [id(each) for each in before]


def _objects(value: Any) -> Any:
    """The lists, dictionaries and tensors of a value that are reached through such alone."""
    if isinstance(value, torch.Tensor):
        if 0 not in value.stride():  # one that shares its memory with itself is made anew
            yield value
    elif type(value) is list:
        yield value
        for each in value:
            yield from _objects(each)
    elif type(value) is dict:
        yield value
        for key, each in value.items():
            if type(key) in (str, int):
                yield from _objects(each)


def test_one_object_in_two_places_stays_one() -> None:
    shared: list[Any] = [1]
    found = sent({"a": shared, "b": [shared], "t": (shared,)})
    assert found["a"] is found["b"][0] is found["t"][0]


def test_objects_that_hold_themselves_arrive() -> None:
    value: dict[str, Any] = {"list": []}
    value["list"].append(value)
    value["me"] = value
    point = Point(1)
    point.y = point
    value["point"] = point
    found = sent(value)
    assert found["me"] is found
    assert found["list"][0] is found
    assert found["point"].y is found["point"]


def test_a_tuple_that_holds_itself_is_refused_by_name() -> None:
    inner: list[Any] = []
    value = (1, inner)
    inner.append(value)
    with pytest.raises(UnkeptError, match=r"'state\.knot\.1\.0' cannot be sent.*holds itself"):
        Writer().write(value, "state.knot")


def test_a_value_that_is_nested_too_deep_is_refused_by_name() -> None:
    value: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        value = [value]
    with pytest.raises(UnkeptError, match=r"'deep' cannot be sent.*nested too deep"):
        Writer().write(value, "deep")


def test_dictionaries_keep_their_order_and_ordered_ones_their_own() -> None:
    table = OrderedDict(a=1, b=2, c=3)
    table.move_to_end("a")
    assert list(sent(table)) == ["b", "c", "a"]
    live = OrderedDict(c=0, a=0, b=0)
    assert list(sent(table, live)) == ["b", "c", "a"]
    assert list(sent({"b": 1, "a": 2}, {"a": 0, "b": 0})) == ["b", "a"]


def test_sets_are_written_alike_whatever_their_order() -> None:
    one = {"alpha", "beta", "gamma", 3, (1, 2)}
    other = set()
    for each in sorted(one, key=repr, reverse=True):
        other.add(each)
    assert Writer().write(one, "s") == Writer().write(other, "s")


def test_what_stands_in_a_set_and_elsewhere_stays_one_object() -> None:
    tuples = [(name,) for name in ("epsilon", "delta", "gamma", "beta", "alpha")]
    found = sent([set(tuples), *tuples])
    assert found[1:] == tuples
    assert all(any(each is inside for inside in found[0]) for each in found[1:])


def test_a_queue_of_another_length_is_made_anew() -> None:
    live = deque([0], 2)
    found = sent(deque([1, 2, 3], 5), live)
    assert found == deque([1, 2, 3], 5)
    assert found.maxlen == 5


def test_a_default_dictionary_keeps_the_factory_of_the_receiver() -> None:
    live = defaultdict(lambda: [7])
    found = sent(defaultdict(lambda: [7], {"a": 1}), live)
    assert found is live
    assert found["new"] == [7]
    assert sent(defaultdict(int, {"a": 1}))["new"] == 0


def test_a_default_dictionary_whose_factory_has_no_name_is_not_made_without_it() -> None:
    with pytest.raises(UsageError, match=r"a defaultdict in the state.*without a name"):
        sent({"table": defaultdict(lambda: [7])}, {})


def test_a_frozen_object_with_a_tensor_keeps_the_receivers_tensor() -> None:
    mine = torch.zeros(2)
    found = sent(Fixed(torch.tensor([1.0, 2.0])), Fixed(mine))
    assert found.a is mine
    assert mine.tolist() == [1.0, 2.0]


def test_a_tensor_that_the_receiver_has_in_two_places_is_filled_once() -> None:
    mine = torch.zeros(2)
    found = sent([torch.ones(2), torch.full((2,), 2.0)], [mine, mine])
    assert found[0] is mine
    assert found[1] is not mine
    assert [each.tolist() for each in found] == [[1, 1], [2, 2]]


def test_a_parameter_of_the_receiver_stays_the_one_that_its_optimizer_trains() -> None:
    mine = torch.nn.Parameter(torch.zeros(2))
    found = sent({"alpha": torch.nn.Parameter(torch.ones(2))}, {"alpha": mine})
    assert found["alpha"] is mine
    assert mine.requires_grad


def test_random_generators_go_on_where_the_senders_are() -> None:
    theirs = {"python": random.Random(1), "torch": torch.Generator().manual_seed(2)}
    theirs |= {"numpy": np.random.default_rng(3), "old": np.random.RandomState(4)}
    for draw in (theirs["python"].random, theirs["numpy"].random, theirs["old"].standard_normal):
        draw()
    mine = {"python": random.Random(), "torch": torch.Generator()}
    mine |= {"numpy": np.random.default_rng(), "old": np.random.RandomState()}
    before = dict(mine)
    found = sent(theirs, mine)
    assert all(found[name] is before[name] for name in before)
    assert mine["python"].random() == theirs["python"].random()
    assert mine["numpy"].random() == theirs["numpy"].random()
    assert mine["old"].standard_normal() == theirs["old"].standard_normal()
    draws = [torch.rand(3, generator=each["torch"]) for each in (mine, theirs)]
    assert torch.equal(*draws)


@pytest.mark.parametrize(
    "theirs",
    [
        random.Random(1),
        np.random.default_rng(3),
        np.random.Generator(np.random.MT19937(3)),
        np.random.RandomState(4),
        torch.Generator().manual_seed(2),
    ],
)
def test_a_random_generator_that_the_receiver_lacks_is_made(theirs: Any) -> None:
    for live in (None, [], [random.Random(9)], [np.random.default_rng(9)]):
        (found,) = sent([theirs], live)
        assert type(found) is type(theirs)
        assert Writer().write(found, "v")[:2] == Writer().write(theirs, "v")[:2]
        if not isinstance(theirs, torch.Generator):
            draw = "normal" if hasattr(theirs, "normal") else "random"
            again = copy.deepcopy(theirs)
            assert getattr(found, draw)() == getattr(again, draw)()
        else:
            assert torch.equal(found.get_state(), theirs.get_state())


def test_a_class_of_a_function_is_refused_where_it_is_kept() -> None:
    @dataclass
    class Local:
        x: int

    with pytest.raises(UnkeptError, match=r"'v\.0' cannot be sent.*Local.*top of a module"):
        Writer().write([Local(1)], "v")


# ---- hostile data -------------------------------------------------------------------------

_TAGS = ("list", "tuple", "dict", "set", "frozenset", "deque", "Size", "OrderedDict", "Counter",
         "defaultdict", "Namespace", "SimpleNamespace", "same", "class", "tensor", "part", "int",
         "bytes", "str", "slice", "enum", "name", "bytearray", "scalar", "array", "random", "range",
         "complex", "Decimal", "Fraction", "UUID", "datetime", "date", "time", "timedelta",
         "timezone", "device", "dtype", "PosixPath", "ellipsis", "nothing")  # fmt: skip
_NAMES = ("os", "environ", "system", "builtins", "eval", "tests.worker.state_sync.values", "Point",
          "Fixed", "Pair", "Colour", "RED", "Random", "Generator", "<f8", "|O", "|V8", "float32",
          "a", "1/0", "2026-01-01", "NaN", "", "cuda:9", "x.y", "__class__")  # fmt: skip


def _hostile() -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.sampled_from((2**62, -(2**62), 10**12)),
        st.floats(),
        st.sampled_from(_NAMES),
        st.binary(max_size=9),
    )
    tags = st.sampled_from(_TAGS)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.builds(lambda tag, rest: [tag, *rest], tags, st.lists(inner, max_size=3)),
            st.builds(
                lambda module, name, rest: ["class", [module, name], rest],
                st.sampled_from(_NAMES),
                st.sampled_from(_NAMES),
                st.lists(inner, max_size=4),
            ),
        ),
        max_leaves=12,
    )


@settings(max_examples=1500)
@given(_hostile(), values())
def test_data_that_no_writer_writes_is_read_or_refused_and_runs_nothing(
    data: Any, live: Any
) -> None:
    environment = dict(os.environ)
    specs = [TensorSpec("float32", (2,), "cpu")]
    for given_live in (None, live):
        problem = ""
        try:
            into = places(data, specs, given_live)
            Reader(into, [object()], what="the value").read(data, given_live)
        except UsageError as error:
            problem = str(error)
        assert "\n" not in problem
    assert dict(os.environ) == environment


@pytest.mark.parametrize(
    "data",
    [
        ["enum", ["os", "environ"], "PATH"],
        ["class", ["os", "environ"], []],
        ["class", ["builtins", "object"], []],
        ["class", ["subprocess", "Popen"], ["args", ["list", None, ["true"]]]],
        ["scalar", "|O", b"12345678"],
        ["array", "<f8", [2**40], b""],
        ["timedelta", [10**12, 0, 0]],
        ["Fraction", "1/0"],
        ["Decimal", "one"],
        ["device", "nowhere"],
        ["range", [0, 1, 0]],
        ["same", 5],
        ["same", -1],
        ["tensor", 7, False, False],
        ["tensor"],
        ["dict", None, [["list", None, []], 1]],
        ["dict", None, [1]],
        ["set", None, [["list", None, []]]],
        [],
        [[]],
        [None],
        ["random", "Random", ["tuple", None, [1]]],
        ["deque", -1, []],
        ["deque", "x", []],
    ],
    ids=repr,
)
def test_wrong_data_is_refused_with_one_line(data: Any) -> None:
    specs = [TensorSpec("float32", (2,), "cpu")]
    with pytest.raises(UsageError) as caught:
        Reader(places(data, specs, None), what="the value").read(data, random.Random())
    assert "\n" not in str(caught.value)


def test_data_that_is_nested_too_deep_is_refused() -> None:
    data: Any = ["list", None, []]
    for _ in range(2 * sys.getrecursionlimit()):
        data = ["list", None, [data]]
    for read in (lambda: Reader([], what="the value").read(data), lambda: places(data, [], None)):
        with pytest.raises(UsageError, match="nested too deep"):
            read()


def test_named_tuples_and_frozen_objects_stay_what_they_are() -> None:
    value = Pair([1], Fixed({"a": 2}))
    found = sent(value, Pair([], None))
    assert same(found, value)
    assert msgspec.msgpack.encode(Writer().write(value, "v"))
