"""Errors that a script swallows, commits that do not come, loops with nothing left, and costs."""

from __future__ import annotations

import contextlib
import re
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_driver as elastic
from elastic_driver.errors import HostsUpdatedInterrupt, SwallowedError, WorldBrokenError
from elastic_driver.worker.heartbeat.training_progress import AT_ONCE, NEVER, TrainingProgress
from elastic_driver.worker.mistakes import watch
from elastic_driver.worker.mistakes.script_objects import PAGE
from elastic_driver.worker.mistakes.watch import Mistakes, hint
from elastic_driver.worker.world.gloo import CollectiveWaits
from tests.support.job import ROOT
from tests.worker.mistakes.conftest import Told, a_step, state_of, use

LOSS = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"


@pytest.fixture
def state(lines: Told) -> Iterator[Any]:
    state = state_of()
    state.sync()
    state.commit()
    yield state
    CollectiveWaits.use(None)


# ---- errors that are swallowed -------------------------------------------------------------


def lose_a_peer() -> CollectiveWaits:
    waits = CollectiveWaits()
    waits.note(RuntimeError(LOSS))
    CollectiveWaits.use(waits)
    return waits


def test_nothing_is_committed_once_a_collective_has_lost_a_peer(state: Any, lines: Told) -> None:
    lose_a_peer()
    version = state.version
    a_step(state)
    with pytest.raises(WorldBrokenError, match="has lost a peer, and the script has gone on"):
        state.commit()
    for _ in range(2):
        with contextlib.suppress(Exception), pytest.raises(SwallowedError):
            state.commit()
    assert state.version == version
    (line,) = lines()
    assert line.startswith("rank 0 goes on at test_watch.py:")
    assert "though a peer is lost, so what it trains is not committed: an `except`" in line


def test_a_commit_on_the_way_of_the_error_is_refused_and_nothing_is_told(
    state: Any, lines: Told
) -> None:
    def step() -> None:
        try:
            raise RuntimeError(LOSS)
        finally:
            state.commit()

    lose_a_peer()
    with pytest.raises(WorldBrokenError):
        step()
    assert lines() == []


@pytest.mark.parametrize("error", [ValueError("boom"), RuntimeError("op.preamble gloo/transport/")])
def test_other_errors_in_a_collective_are_the_scripts_own(state: Any, error: Exception) -> None:
    waits = CollectiveWaits()
    waits.note(error)
    CollectiveWaits.use(waits)
    state.commit()


def test_waits_on_other_threads_do_not_end_a_script(state: Any) -> None:
    waits = lose_a_peer()
    found: list[Exception] = []

    def wait() -> None:
        try:
            waits.check()
        except Exception as error:  # none: the waits were not given up
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert found == []


def test_a_change_that_is_swallowed_comes_again_so_that_nothing_catches_it(
    state: Any, lines: Told
) -> None:
    progress = state._progress
    progress.leave_reason, progress.leave_after = "b.0.1 is ready to join", AT_ONCE
    a_step(state)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    a_step(state)
    version = state.version
    with contextlib.suppress(Exception), pytest.raises(SwallowedError) as caught:
        state.commit()
    assert state.version == version + 1, "all ranks have made this step"
    assert isinstance(caught.value.__cause__, HostsUpdatedInterrupt)
    progress.leave_after = NEVER
    watch.tell_swallowed(caught.value)
    (line,) = lines()
    assert "though the workers change, and the others may wait for it" in line


def test_a_broken_accelerator_that_is_swallowed_comes_again_so_that_nothing_catches_it(
    state: Any,
) -> None:
    def settle() -> None:
        raise WorldBrokenError("what was to be exchanged will never come")

    state._counter.settle = settle
    with pytest.raises(WorldBrokenError):
        state.commit()
    with contextlib.suppress(Exception), pytest.raises(SwallowedError) as caught:
        state.commit()
    assert isinstance(caught.value.__cause__, WorldBrokenError)


# ---- commits that do not come ------------------------------------------------------------


def test_a_minute_of_steps_without_a_commit_is_told_once(state: Any, lines: Told) -> None:
    state._progress.committed_at = time.monotonic() - 61
    for _ in range(watch.LEAST_STEPS - 1):
        a_step(state)
    assert lines() == []
    for _ in range(2 * watch.LEAST_STEPS):
        a_step(state)
    (line,) = lines()
    assert line.startswith("optimizers have made 32 steps in 61 s without a commit")


def test_a_long_evaluation_and_few_long_steps_are_not_told(state: Any, lines: Told) -> None:
    for _ in range(3 * watch.LEAST_STEPS):
        state._progress.committed_at = time.monotonic() - 3600
        a_step(state)
        state._progress.committed_at = time.monotonic()
        state.commit()
    assert lines() == []


# ---- nothing left ------------------------------------------------------------------------


def fail(kind: str) -> BaseException:
    try:
        if kind == "local":
            exec("def f():\n for x in (): loss = 1\n return loss\nf()", {})  # noqa: S102
        elif kind == "division":
            _ = 1 / len([])
        else:
            raise KeyError("loss")
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("kind", "said"),
    [("local", "'loss' was never set"), ("division", "divided by a count of 0"), ("other", None)],
)
def test_an_error_of_a_loop_with_nothing_left_is_explained(
    lines: Told, kind: str, said: str | None
) -> None:
    progress = TrainingProgress()
    progress.enter(2, version=40)
    hint(fail(kind), progress)
    told = lines()
    assert len(told) == bool(said)
    assert said is None or said in told[0]


def test_the_same_error_after_a_commit_or_at_the_beginning_is_not_explained(lines: Told) -> None:
    progress = TrainingProgress()
    progress.enter(1, version=0)
    hint(fail("local"), progress)
    progress.enter(2, version=40)
    progress.record_commit(41)
    hint(fail("local"), progress)
    assert lines() == []


class Odd:
    """An object that nobody can look at."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise KeyError("a trap")


def test_objects_that_cannot_be_looked_at_do_not_end_a_training(
    lines: Told, capfd: pytest.CaptureFixture[str]
) -> None:
    state, odd = state_of(), Odd()

    @elastic.run
    def run(state: Any) -> None:
        while state.step < 6:
            a_step(state)
            state.commit()
        use(odd)

    run(state)
    assert (
        "cannot be looked through for mistakes, training goes on: KeyError"
        in capfd.readouterr().err
    )


def test_each_mistake_has_its_section_on_the_page() -> None:
    sources = [path.read_text() for path in Path(watch.__file__).parent.glob("*.py")]
    kinds = {kind for text in sources for kind in re.findall(r'tell\(\s*"([a-z-]+)"', text)}
    page = (ROOT / PAGE).read_text()
    headings = {
        line[3:].lower().replace(" ", "-") for line in page.splitlines() if line[:3] == "## "
    }
    assert len(kinds) == 9
    assert kinds <= headings


# ---- costs -------------------------------------------------------------------------------


def test_a_look_leaves_nothing_of_the_script_alive(lines: Told) -> None:
    state = state_of()
    alive: list[Callable[[], Any]] = []
    freed: list[bool] = []

    @elastic.run
    def run(state: Any) -> None:
        while state.step < 12:
            activations = torch.zeros(100)
            weights = {name: p.detach().clone() for name, p in state.model.named_parameters()}
            alive.append(weakref.ref(activations))
            a_step(state)
            state.commit()
            del activations
            use(weights)
            freed.append(alive[-1]() is None)

    run(state)
    assert all(freed)
    assert lines() == []


def test_commits_pay_for_the_looks_at_the_beginning_only(
    lines: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs: list[float] = []
    original = Mistakes.look_at_commit

    def timed(self: Mistakes, *, leads: bool) -> None:
        began = time.thread_time()
        original(self, leads=leads)
        costs.append(time.thread_time() - began)

    monkeypatch.setattr(Mistakes, "look_at_commit", timed)
    state = state_of()
    shadow = {name: p.detach().clone() for name, p in state.model.named_parameters()}

    @elastic.run
    def run(state: Any) -> None:
        while state.step < 100:
            a_step(state)
            state.commit()
        use(shadow)

    run(state)
    first, later = costs[: watch.LOOKED_AT], costs[watch.LOOKED_AT :]
    assert statistics.median(first) < 0.005, first
    assert statistics.median(later) < 0.0001, later


def test_that_ranks_differ_is_told_when_the_driver_asks_and_not_at_the_end(
    state: Any, lines: Told
) -> None:
    progress = TrainingProgress()
    state._marks.enter(progress, 2)
    state._mistakes.enter(progress, 2)
    state._mistakes._averages = False
    progress.leaves(1)  # as at the end of each script
    assert lines() == []
    progress.on_difference()
    (line,) = lines()
    assert line.startswith("the ranks hold different states, and nothing was found that averages")
