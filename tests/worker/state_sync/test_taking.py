"""Plain values at a commit: put back in the script's own objects, as often as needed."""

from __future__ import annotations

import dataclasses
import random
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elastic_driver.worker.state_sync.taking import Taker, copied, put_back


@dataclasses.dataclass
class Progress:
    step: int
    losses: list[float]


@dataclasses.dataclass(frozen=True)
class Fixed:
    inner: list[int]


def _spoil_dict(value: dict[str, Any]) -> None:
    value["b"].append(9)
    value["new"] = value.pop("a")


def _spoil_progress(value: Progress) -> None:
    value.losses.append(1.0)
    value.step, value.losses = 9, []
    value.late = 1  # type: ignore[attr-defined]


def _spoil_namespace(value: Namespace) -> None:
    value.own.clear()
    value.n, value.late = 9, 1


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, [2]], lambda v: (v.pop().append(9), v.insert(0, 8))),
    "dict": (lambda: {"a": 1, "b": [2]}, _spoil_dict),
    "set": (lambda: {1, (2, 3)}, lambda v: (v.clear(), v.add(9))),
    "deque": (lambda: deque([[1], 2], maxlen=2), lambda v: (v[0].append(9), v.append(3))),
    "bytearray": (lambda: bytearray(b"abc"), lambda v: v.extend(b"d")),
    "tuple": (lambda: ([1], torch.ones(1)), lambda v: (v[0].append(2), v[1].zero_())),
    "dataclass": (lambda: Progress(1, [0.5]), _spoil_progress),
    "frozen dataclass": (lambda: Fixed([1]), lambda v: v.inner.append(2)),
    "namespace": (lambda: Namespace(n=1, own=[1]), _spoil_namespace),
    "array": (lambda: np.arange(3), lambda v: v.fill(9)),
    "tensor": (lambda: torch.arange(3.0), lambda v: v.fill_(9)),
    "resized tensor": (lambda: torch.arange(3.0), lambda v: v.resize_(5).fill_(9)),
    "replaced data": (lambda: torch.arange(3.0), lambda v: setattr(v, "data", torch.ones(2, 2))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_value_is_put_back_in_its_own_object_twice(case: str) -> None:
    make, spoil = CASES[case]
    value = make()
    kept = Taker().take(value, "v")
    for _ in range(2):
        spoil(value)
        assert repr(value) != repr(make())
        assert put_back(kept) is value
        assert repr(value) == repr(make())


@pytest.mark.parametrize(
    "generator",
    [random.Random(1), np.random.RandomState(1)],
    ids=["python", "numpy"],
)
def test_a_generator_draws_the_same_again_after_each_roll_back(generator: Any) -> None:
    kept = Taker().take([generator], "v")
    drawn = [generator.uniform(0, 1) for _ in range(3)]
    for _ in range(2):
        assert put_back(kept)[0] is generator
        assert [generator.uniform(0, 1) for _ in range(3)] == drawn


def test_other_generators_draw_the_same_again_too() -> None:
    ours, theirs = np.random.default_rng(1), torch.Generator().manual_seed(1)
    kept = Taker().take({"n": ours, "t": theirs}, "v")
    drawn = ours.random(), torch.rand(1, generator=theirs)
    for _ in range(2):
        put_back(kept)
        assert (ours.random(), torch.rand(1, generator=theirs)) == drawn


def test_aliases_and_cycles_are_aliases_after_a_roll_back() -> None:
    shared, tensor = [1], torch.ones(2)
    value: dict[str, Any] = {"a": shared, "b": (shared, tensor), "t": tensor}
    value["self"] = value
    kept = Taker().take(value, "v")
    for _ in range(2):
        value["a"] = [7]
        value["t"] = None
        value["self"] = None
        shared.append(2)
        assert put_back(kept) is value
        assert value["a"] is value["b"][0] is shared
        assert value["t"] is value["b"][1] is tensor
        assert value["self"] is value
        assert shared == [1]


def test_an_attribute_shared_by_two_names_is_taken_once() -> None:
    taker, shared = Taker(), torch.ones(2)
    one, other = taker.take([shared], "one"), taker.take({"k": shared}, "other")
    assert [path for path, _ in taker.tensors] == ["one.0", "other.k"][:1]
    done: dict[int, Any] = {}
    assert put_back(one, done)[0] is put_back(other, done)["k"] is shared


def test_objects_with_a_state_of_their_own_are_left_to_their_parts() -> None:
    taker, model = Taker(), torch.nn.Linear(1, 1)
    kept = taker.take({"models": [model]}, "v")
    assert taker.parts == {"v.models.0": model}
    assert put_back(kept)["models"][0] is model


def test_a_copy_shares_nothing_that_can_change() -> None:
    value = {"a": [torch.ones(1), np.ones(1), bytearray(b"x")], "b": Progress(1, [2.0])}
    found = copied(value)
    value["a"][0].zero_()
    value["a"][1][:] = 0
    value["a"][2][:] = b"y"
    value["b"].losses.clear()
    assert repr(found["a"]) == "[tensor([1.]), array([1.]), bytearray(b'x')]"
    assert found["b"] == Progress(1, [2.0])
