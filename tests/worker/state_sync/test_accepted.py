"""Whatever a commit accepts, a process that was just started can be given."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from elastic_driver.worker.state import TorchState
from elastic_driver.worker.state_sync.contents import UnkeptError
from elastic_driver.worker.state_sync.message import ComparingWriter, Reader
from elastic_driver.worker.state_sync.taking import Taker, copied
from elastic_driver.worker.state_sync.values import _Script, kinds, training_begins, training_ends
from tests.worker.state_sync.accepted import ODD, Other, told
from tests.worker.state_sync.values import values

# What no process could make again, or what would be another thing there.
REFUSED = {
    *("local dataclass", "local enum", "local named tuple", "local class", "local function"),
    *("local factory", "local factory inside", "slice of odd", "own zone", "system random"),
    *("dataclass that is a dict", "unknown member", "objects", "overlapping", "quantized"),
    *("meta", "own tensor", "lazy", "on a graph", "sparse", "deeper", "method", "struct"),
    *("ellipsis", "slice of tensors"),
}


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    process = Other()
    yield process
    process.end()


def accepted(value: Any) -> bool:
    """Whether a commit takes a value, as an attribute of a state that is new."""
    try:
        Taker(frozenset()).take(value, "value")
    except UnkeptError as error:
        said = str(error)
    else:
        return True
    assert said.startswith("the attribute 'value")
    assert "\n" not in said
    return False


@pytest.mark.parametrize("name", ODD)
def test_what_a_commit_accepts_arrives_in_a_process_that_was_just_started(
    name: str, other: Other
) -> None:
    value = ODD[name]()
    assert accepted(value) == (name not in REFUSED)
    if name not in REFUSED:
        assert other.read(value) == told(value)
        assert accepted([{"a": (value,)}])


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.lists(st.one_of(values(), st.sampled_from(sorted(ODD)).map(lambda n: ODD[n]()))))
def test_any_value_that_a_commit_accepts_arrives(value: Any, other: Other) -> None:
    if accepted(value):
        assert other.read(value) == told(value)


@pytest.mark.parametrize("name", ODD)
def test_a_state_dict_is_accepted_only_if_it_arrives(name: str, other: Other) -> None:
    value = {"state": [ODD[name]()]}
    try:
        copy = copied(value)
    except UnkeptError:
        return
    assert other.read(copy) == told(copy)


# ---- what only workers have that have made it themselves ------------------------------------


def test_a_dictionary_with_a_nameless_factory_is_kept_if_it_was_made_with_the_state() -> None:
    state = TorchState(table=defaultdict(lambda: [7]), more={})
    state.save()
    state.table["a"].append(1)
    state.save()
    state.more["in"] = [defaultdict(lambda: 0)]
    with pytest.raises(UnkeptError, match=r"'more\.in\.0' cannot be sent.*without a name"):
        state.save()
    state.more = defaultdict(list)
    state.save()


def test_a_factory_of_the_receiver_serves_wherever_it_stands_for_one_without_a_name() -> None:
    live = [defaultdict(lambda: 7), defaultdict(lambda: 7)]
    live[1] = live[0]  # one object here, two there
    written = ["defaultdict", "?", []]
    found = Reader([]).read(["list", None, [written, written]], live)
    assert [each["new"] for each in found] == [7, 7]


def test_objects_inside_of_an_optimizers_settings_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.param_groups[0]["of"] = model
    with pytest.raises(UnkeptError, match=r"group 0 of 'optimizer'\.of"):
        TorchState(model=model, optimizer=optimizer).save()


LATE = """
import dataclasses, enum

class Colour(enum.Enum):
    RED = 1

def three():
    return 3

@dataclasses.dataclass
class Point:
    x: int = 0
"""


@pytest.fixture(autouse=True)
def nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test is a script of its own."""
    monkeypatch.setattr(_Script, "late", frozenset())


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module that the training function has imported."""
    (tmp_path / "late_module.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    training_begins()
    yield importlib.import_module("late_module")
    training_ends()
    sys.modules.pop("late_module")


def test_what_a_training_function_has_imported_is_refused(late: types.ModuleType) -> None:
    for value in (late.Colour.RED, late.three, late.Point(), late.Point, defaultdict(late.three)):
        with pytest.raises(UnkeptError, match="value") as caught:
            Taker(frozenset()).take(value, "value")
        if type(value) is not defaultdict:
            assert "imported after training had begun; import it at the top" in str(caught.value)
    training_ends()
    with pytest.raises(UnkeptError, match="imported after training had begun"):
        Taker().take(late.three, "value")  # the next function: a newcomer skips this one
    training_begins()
    with pytest.raises(UnkeptError, match="imported after training had begun"):
        Taker().take(late.three, "value")


def test_what_is_imported_between_two_training_functions_is_known(late: types.ModuleType) -> None:
    del sys.modules["late_module"]
    training_ends()
    sys.modules["late_module"] = late
    training_begins()
    assert accepted(late.three)


def test_a_class_that_the_script_defines_while_it_trains_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = types.ModuleType("__main__")
    early, late = (type(name, (), {"__module__": "__main__"}) for name in ("Early", "Late"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.Early = early
    training_begins()
    main.Late = late
    point = dataclasses.make_dataclass("Point", ["x"])
    point.__module__ = "__main__"
    main.Point = point
    try:
        assert accepted(early)
        with pytest.raises(UnkeptError, match="Late was defined in the script after training"):
            Taker().take(late, "value")
        with pytest.raises(UnkeptError, match="Point was defined in the script after training"):
            Taker().take(point(1), "value")
    finally:
        kinds.pop(point, None)
        training_ends()


def test_keys_that_the_receiver_has_and_nobody_can_send_are_no_obstacle() -> None:
    assert Reader([]).read(["dict", None, ["a", 1]], {object(): 2, nn.Linear(1, 1): 3}) == {"a": 1}


def test_what_lies_between_the_fields_of_an_array_is_not_compared() -> None:
    kind = np.dtype([("a", "i1"), ("b", "i8")], align=True)
    one, other = (np.frombuffer(bytes([fill]) * 32, kind).copy() for fill in (0, 255))
    for array in (one, other):
        array["a"], array["b"] = 1, 2
    assert ComparingWriter().write(one, "v") == ComparingWriter().write(other, "v")
