"""Scripts that hypothesis writes: whatever they hold and in whatever order they do it, a failure
changes no bit.

Each program is played twice by two real ranks: without a failure, and with some. After every commit
and every meeting both ranks hold what they held after that commit without a failure, or the program
is refused, by name, also without one. `ELASTIC_PROGRAMS=2000` plays so many (`make nightly`).
"""

from __future__ import annotations

import collections
import os
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.support.ranks import Ranks
from tests.support.state_scripts import (
    FOLLOWERS,
    LAYERS,
    OPTIMIZERS,
    RARE,
    SCHEDULES,
    USUAL,
    Program,
)
from tests.support.state_trial import Fault, Outcome, play

PROGRAMS = int(os.environ.get("ELASTIC_PROGRAMS", "50"))
LEARNED = 4  # steps of one kind, after which a state knows what changes in them and when

scalars = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.booleans(),
    st.none(),
    st.builds(range, st.integers(0, 5)),
    st.builds(np.float64, st.floats()),
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(tuple, st.lists(inner, max_size=2)),
        st.builds(lambda items: collections.deque(items, 4), st.lists(inner, max_size=2)),
        st.builds(lambda v: types.SimpleNamespace(v=v), inner),
        st.builds(lambda: {1, 2}),
        st.builds(lambda: np.arange(3)),
        st.builds(lambda: torch.arange(4.0)),
        st.builds(lambda items: collections.OrderedDict(enumerate(items)), st.lists(inner)),
    ),
    max_leaves=6,
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    layers = ["linear", *draw(st.lists(st.sampled_from(sorted(LAYERS)), max_size=3)), "linear"]
    optimizers = draw(st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=1, max_size=2))
    accumulate = draw(st.sampled_from([1, 1, 1, 2])) if "lbfgs" not in optimizers else 1
    core = [f"step:{n}" for n in draw(st.permutations(range(len(optimizers))))]
    core = ["zero", "pass", *core] if accumulate == 1 else ["pass", *core, "zero"]
    usual = _with(draw, core, draw(st.lists(st.sampled_from(USUAL), max_size=4, unique=True)))
    length = draw(st.integers(4, 12))
    rare = draw(st.dictionaries(st.integers(0, length - 1), st.sampled_from(RARE), max_size=2))
    steps = []
    for number in range(length):
        step = list(usual)
        if number % accumulate < accumulate - 1:
            step = [each for each in step if each.partition(":")[0] not in ("step", "zero")]
        steps.append(tuple(_with(draw, step, [rare[number]] if number in rare else [])))
    return Program(
        layers=tuple(layers),
        optimizers=tuple(optimizers),
        schedule=draw(st.sampled_from(["", *sorted(SCHEDULES)])),
        follower=draw(st.sampled_from(FOLLOWERS)),
        values={"all": draw(trees), "list": [0], "set": {1}},
        steps=tuple(steps),
        accumulate=accumulate,
    )


def _with(draw: st.DrawFn, operations: list[str], more: list[str]) -> list[str]:
    found = list(operations)
    for each in more:
        found.insert(draw(st.integers(0, len(found))), each)
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Program, tuple[Fault, ...]]:
    program = draw(programs())
    faults, at = [], 0
    for _ in range(draw(st.integers(1, 3))):
        if at > len(program.steps):
            break
        at = draw(st.integers(at, len(program.steps)))
        if at < len(program.steps) and any("by_data" in each for each in program.steps[at]):
            at += 1  # nothing shows the first change of `tensor.data` before the next commit
        operation = draw(st.integers(0, len(program.steps[0])))
        kind = draw(st.sampled_from(["kill", "kill", "link", "planned"]))
        faults.append(
            Fault(kind, at, operation, draw(st.sampled_from([0, 0, 0, 1])), draw(st.integers(0, 1)))
        )
        at += 1
    return program, tuple(faults)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes that play programs."""
    both = Ranks(2, play, tmp_path_factory.mktemp("ranks"))
    yield both
    both.close()


@settings(
    max_examples=PROGRAMS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    report_multiple_bugs=False,
)
@given(case=cases())
def test_no_failure_changes_what_a_script_holds_after_a_commit(
    ranks: Ranks, case: tuple[Program, tuple[Fault, ...]]
) -> None:
    program, faults = case
    calm = ranks.ask((program, ()))
    assert {each.lost for each in calm} == {""}
    refused = [each.refused for each in calm]
    assert refused[0] == refused[1], "a rank alone is refused"
    expected = {step: told for _, step, told in calm[0].held}
    for rank, outcome in enumerate(calm):
        compare(expected, outcome, f"without a failure, rank {rank}")
    if refused[0]:
        event(f"refused: {refused[0][:60]}")
        return
    rough = ranks.ask((program, faults))
    for rank, outcome in enumerate(rough):
        compare(expected, outcome, f"with failures, rank {rank}")
        assert outcome.refused == "", outcome.refused
        if outcome.lost:
            assert not knew(program, outcome.step), f"lost at step {outcome.step}: {outcome.lost}"
            event("named as lost")
        else:
            assert outcome.step == len(program.steps)
            event(f"went on after {len(outcome.held) - len(calm[0].held)} more")


def knew(program: Program, step: int) -> bool:
    """Whether the state had seen steps of the kind in which a failure came often enough."""
    last = program.steps[max(0, step - LEARNED) : step + 1]
    return len(last) > LEARNED and len(set(last)) == 1


def compare(expected: dict[int, dict[str, str]], outcome: Outcome, who: str) -> None:
    """Every leaf is what it was after the same commit without a failure."""
    for when, step, told in outcome.held:
        wanted = expected[step]
        names = [n for n in {**wanted, **told} if wanted.get(n) != told.get(n)]
        shown: Any = [(n, wanted.get(n), told.get(n)) for n in names[:4]]
        assert not names, f"{who}, {when}, step {step}: {len(names)} leaves differ: {shown}"
