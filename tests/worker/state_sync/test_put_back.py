"""What a commit has copied is put back in the script's own objects."""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastic_driver.worker.state_sync.contents import UnkeptError
from elastic_driver.worker.state_sync.taking import Taker, copied, put_back
from tests.worker.state_sync.values import (
    Colour,
    Fixed,
    Pair,
    Point,
    Slotted,
    same,
    sent,
    values,
)


def spoil(value: Any, done: set[int]) -> None:
    """Change everything in a value that can change."""
    if id(value) in done:
        return
    done.add(id(value))
    kind = type(value)
    if kind in (list, deque):
        for each in value:
            spoil(each, done)
        value.append("spoiled")
    elif isinstance(value, dict):
        for each in value.values():
            spoil(each, done)
        value.clear()
        value["spoiled"] = 1
    elif kind is set:
        value.clear()
    elif kind is tuple or kind is Pair:
        for each in value:
            spoil(each, done)
    elif kind in (Point, Fixed, Namespace) or kind.__name__ == "SimpleNamespace":
        for each in vars(value).values():
            spoil(each, done)
        if kind is not Fixed:
            vars(value).clear()
            value.spoiled = 1
    elif kind is Slotted:
        spoil(value.one, done)
        value.one = "spoiled"
    elif kind is bytearray:
        value[:] = b"spoiled"
    elif kind is np.ndarray and value.flags.writeable:
        value[...] = np.zeros_like(value)
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.data = torch.ones_like(value)


@settings(max_examples=400)
@given(values())
def test_any_value_is_put_back_at_every_level(value: Any) -> None:
    before = sent(value)
    kept = Taker().take(value, "value")
    for _ in range(2):  # the copy itself is not handed out
        spoil(value, set())
        assert put_back(kept) is value
        assert same(value, before)


@settings(max_examples=200)
@given(values())
def test_a_copy_shares_nothing_that_can_change(value: Any) -> None:
    before = copied(value)
    copy = copied(value)
    assert same(copy, before)
    spoil(value, set())
    assert same(copy, before)


def round_trip(value: Any, change: Any) -> Any:
    kept = Taker().take(value, "value")
    change(value)
    found = put_back(kept)
    assert found is value
    return found


def test_lists_tables_sets_and_queues_are_filled_again() -> None:
    assert round_trip([3, 1], list.sort) == [3, 1]
    assert round_trip({"a": 1}, lambda d: d.update(b=2)) == {"a": 1}
    assert round_trip({1, 2}, set.clear) == {1, 2}
    queue = round_trip(deque([1, 2, 3], 3), lambda q: q.append(4))
    assert (list(queue), queue.maxlen) == ([1, 2, 3], 3)
    assert round_trip(Counter("aab"), lambda c: c.subtract("aaaa")) == Counter("aab")
    assert round_trip(Counter(a=0, b=-1), Counter.clear) == {"a": 0, "b": -1}


def test_ordered_dictionaries_have_their_order_again() -> None:
    table = OrderedDict(a=1, b=2, c=3)
    table.move_to_end("a")
    assert list(round_trip(table, lambda t: t.move_to_end("b"))) == ["b", "c", "a"]


def test_a_default_dictionary_keeps_its_factory() -> None:
    table = round_trip(defaultdict(lambda: [7]), lambda t: t["x"].append(1))
    assert dict(table) == {}
    assert table["new"] == [7]


def test_attributes_that_were_added_go() -> None:
    for value in (Point(1), Namespace(a=1)):
        before = dict(vars(value))
        vars(round_trip(value, lambda v: setattr(v, "more", 1)))
        assert vars(value) == before


def test_a_slot_that_was_empty_is_empty_again() -> None:
    value = Slotted(1, 2)
    del value.two
    round_trip(value, lambda v: setattr(v, "two", 5))
    assert not hasattr(value, "two")


def test_what_is_inside_of_frozen_objects_and_tuples_is_put_back() -> None:
    frozen, pair, plain = Fixed([1]), Pair([1], 2), ([1],)
    for value, inner in ((frozen, frozen.a), (pair, pair.left), (plain, plain[0])):
        round_trip(value, lambda _, inner=inner: inner.append(2))
        assert inner == [1]


def test_arrays_are_put_back_in_place_also_after_they_were_resized() -> None:
    array = np.arange(6.0)
    round_trip(array, lambda a: a.resize(2, refcheck=False))
    assert array.tolist() == [0, 1, 2, 3, 4, 5]
    view = np.arange(6.0)[::2]
    round_trip(view, lambda a: a.fill(9))
    assert view.tolist() == [0, 2, 4]
    constant = np.broadcast_to(np.arange(2), (3, 2))
    assert round_trip(constant, lambda _: None).shape == (3, 2)


def test_a_bytearray_has_its_length_again() -> None:
    assert round_trip(bytearray(b"abc"), lambda b: b.extend(b"def")) == b"abc"


def test_tensors_are_put_back_in_place_also_resized_rebound_shared_or_of_inference() -> None:
    tensor = torch.arange(4.0)
    assert round_trip(tensor, lambda t: t.resize_(2).fill_(9)).tolist() == [0, 1, 2, 3]
    assert round_trip(tensor, lambda t: t.set_(torch.ones(4))).tolist() == [0, 1, 2, 3]
    shared = torch.tensor([5.0]).expand(3)
    assert round_trip(shared, lambda t: t[:1].fill_(1)).tolist() == [5, 5, 5]
    with torch.inference_mode():
        best = torch.ones(2)

    def change(value: torch.Tensor) -> None:
        with torch.inference_mode():
            value.zero_()

    assert round_trip(best, change).tolist() == [1, 1]


def test_a_tensor_that_is_trained_is_so_again() -> None:
    parameter = nn.Parameter(torch.ones(2))
    round_trip(parameter, lambda p: p.requires_grad_(False))
    assert parameter.requires_grad


def test_random_generators_go_on_where_they_were() -> None:
    generators: list[tuple[Any, Any]] = [
        (random.Random(1), lambda g: g.random()),
        (np.random.default_rng(1), lambda g: g.random()),
        (np.random.RandomState(1), lambda g: g.standard_normal()),
        (torch.Generator().manual_seed(1), lambda g: torch.rand(1, generator=g).item()),
    ]
    for generator, draw in generators:
        kept = Taker().take(generator, "g")
        drawn = [draw(generator) for _ in range(3)]
        assert put_back(kept) is generator
        assert [draw(generator) for _ in range(3)] == drawn


def test_one_object_in_two_places_is_copied_and_put_back_once() -> None:
    shared = [1]
    value = {"a": shared, "b": (shared,)}
    round_trip(value, lambda v: v.update(a=[]) or shared.append(2))
    assert value["a"] is value["b"][0] is shared
    assert shared == [1]
    copy = copied(value)
    assert copy["a"] is copy["b"][0]


def test_objects_that_hold_themselves_are_put_back() -> None:
    value: list[Any] = [1]
    value.append(value)
    found = round_trip(value, list.clear)
    assert found == [1, found]


def test_a_tuple_that_holds_itself_is_refused_at_the_commit() -> None:
    inner: list[Any] = []
    inner.append((inner,))
    inner[0][0].append(inner[0])
    with pytest.raises(UnkeptError, match=r"a tuple that holds itself"):
        Taker().take(inner[0], "value")


def test_a_class_that_no_other_worker_finds_is_refused_at_the_commit() -> None:
    @dataclass
    class Local:
        x: int

    with pytest.raises(UnkeptError, match=r"'value\.here' cannot be sent.*Local has no name"):
        Taker().take({"here": Local(1)}, "value")


def test_two_parts_whose_paths_read_alike_are_both_found() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    taker = Taker()
    taker.take({1: one, "1": two}, "models")
    assert {id(each) for each in taker.parts.values()} == {id(one), id(two)}


def test_a_part_that_is_in_several_places_is_one_part() -> None:
    model = nn.Linear(1, 1)
    taker = Taker()
    taker.take([model, {"again": model}], "models")
    assert taker.parts == {"models.0": model}


@pytest.mark.parametrize("bad", [iter([1]), lambda: 0, object(), sys.stdout, (i for i in ())])
def test_what_cannot_be_kept_is_named_with_its_path(bad: object) -> None:
    with pytest.raises(UnkeptError, match=r"^the attribute 'v\.a\.0\.y' cannot be sent"):
        Taker().take({"a": [Point(1, bad)]}, "v")
    with pytest.raises(UnkeptError):
        copied({"a": [bad]})


@given(st.sampled_from((Colour.RED, 3, "x", None, 2.5, b"y")))
def test_single_values_are_not_wrapped(value: Any) -> None:
    assert Taker().take(value, "v") is value
