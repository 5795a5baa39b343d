"""What ranks compare: equal where a script has it equal, and never what it has apart."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from elastic_driver.worker.heartbeat.training_progress import TrainingProgress
from elastic_driver.worker.marks import Marks
from elastic_driver.worker.state import TorchState
from tests.worker.state_sync.values import sent, values


def leaves(local: tuple[str, ...] = (), **attributes: Any) -> dict[str, tuple[str, str]]:
    """Digest and text of each leaf of a rank's state."""
    state = TorchState(**attributes)
    state.local(*local)
    state._tree.keep()
    marks, progress = Marks(), TrainingProgress()
    marks.enter(progress, 2)
    marks._commits = 1
    marks.mark_if_due(2, lambda: [(state._tree, state._local)])
    found = marks.leaves(2)
    assert found is not None
    return {name: (digest, text) for name, digest, text in found}


def root(**attributes: Any) -> str:
    state = TorchState(**attributes)
    state._tree.keep()
    marks, progress = Marks(), TrainingProgress()
    marks.enter(progress, 2)
    marks._commits = 1
    marks.mark_if_due(2, lambda: [(state._tree, state._local)])
    return progress.marks[-1][1]


@settings(max_examples=150)
@given(values())
def test_equal_values_are_equal_on_ranks_that_have_made_or_received_them(value: Any) -> None:
    assert root(value=value) == root(value=sent(value))


def test_the_order_of_attributes_and_of_tables_does_not_matter() -> None:
    one = root(a=1, b={"x": 1, "y": {3: 4, 5: 6}}, c=Counter("ab"))
    other = root(b={"y": {5: 6, 3: 4}, "x": 1}, c=Counter("ba"), a=1)
    assert one == other
    tables = [OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)]
    assert root(t=tables[0]) != root(t=tables[1]), "the order of this one is its content"


def test_the_same_tuple_twice_is_two_equal_tuples() -> None:
    pair = (1, "a")
    assert root(seen=[pair, pair]) == root(seen=[(1, "a"), tuple(sent([1, "a"]))])


@pytest.mark.parametrize(
    "make",
    [
        random.Random,
        np.random.default_rng,
        lambda seed: torch.Generator().manual_seed(seed),
        lambda seed: {"augment": random.Random(seed), "more": [np.random.RandomState(seed)]},
    ],
)
def test_generators_are_each_ranks_own(make: Callable[[int], Any]) -> None:
    assert root(rng=make(1)) == root(rng=make(2))


def test_values_beside_modules_in_a_container_are_compared() -> None:
    def of(value: int) -> dict[str, tuple[str, str]]:
        torch.manual_seed(0)
        return leaves(nets=[nn.Linear(1, 1), value])

    one, other = of(1), of(2)
    assert [name for name in one if one[name] != other[name]] == ["state.nets"]
    assert one["state.nets"][1] == "['nets.0', 1]"


def test_running_statistics_and_their_counts_are_each_ranks_own() -> None:
    def of(passes: int) -> dict[str, tuple[str, str]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        for number in range(passes):
            model(torch.randn(3, 2, generator=torch.Generator().manual_seed(number)))
        return leaves(model=model)

    assert of(1) == of(3)


def test_entries_of_a_table_are_named_and_can_be_local() -> None:
    one = leaves(("stats.mine",), stats={"mine": 1, "loss": 0.5})
    assert set(one) == {"state.stats.loss"}
    assert leaves(("stats",), stats={"mine": 1, "loss": 0.5}) == {}
    assert set(leaves(stats={1: 2})) == {"state.stats"}


def test_a_part_that_is_local_is_left_out_with_its_flags_and_settings() -> None:
    model, probe = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    found = leaves(("probe", "optimizer"), model=model, probe=probe, optimizer=optimizer)
    assert not [name for name in found if "probe" in name or "optimizer" in name]
    assert "model.weight" in found


def test_large_values_are_compared_and_no_copy_of_them_is_kept() -> None:
    array = np.arange(100_000)
    names = {f"key {number}": number for number in range(5000)}
    one = leaves(array=array, names=names, text="x" * 10_000)
    assert max(len(text) for _, text in one.values()) < 200
    array[7] = 0
    names["key 7"] = 0
    other = leaves(array=array, names=names, text="x" * 10_000)
    assert sorted(n for n in one if one[n] != other[n]) == ["state.array", "state.names"]


def test_names_that_are_no_utf_8_and_all_kinds_of_values_have_a_text() -> None:
    found = leaves(file="a\udcffb", when=np.datetime64("2026-11-26"), days=np.array(["2026"], "M8"))
    assert found["state.file"][1].isascii()
    assert found["state.days"][1] == "an array"
