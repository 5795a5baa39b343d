"""Buffers that ranks have alike are told from those that each rank has for itself."""

from __future__ import annotations

import random

from elastic_driver.features.stragglers.states import ALIKE, LASTING, BufferWatch
from elastic_driver.words.progress import BUFFERS_DIGEST_CHARS


def row(*values: int) -> str:
    return "".join(f"{value:0{BUFFERS_DIGEST_CHARS}x}" for value in values)


def alike(watch: BufferWatch, steps: int, begin: int = 0) -> None:
    for step in range(begin, begin + steps):
        assert watch.judge([row(step)] * 3) == []


def test_what_moves_alike_and_then_differs_for_some_steps_is_told() -> None:
    watch = BufferWatch()
    alike(watch, ALIKE + 1)
    found = [watch.judge([row(90 + n), row(90 + n), row(50 + n)]) for n in range(LASTING)]
    assert found == [[]] * (LASTING - 1) + [[0]]


def test_a_difference_that_a_broadcast_ends_is_none() -> None:
    watch = BufferWatch()
    alike(watch, ALIKE + 1)
    for n in range(50):
        assert watch.judge([row(2 * n), row(2 * n), row(1000 + n)]) == []
        alike(watch, 1, begin=10_000 + n)


def test_running_statistics_are_never_told_whenever_they_begin_to_move() -> None:
    watch = BufferWatch()
    for _ in range(100):  # frozen
        assert watch.judge([row(7, 1), row(7, 1)]) == []
    for n in range(100):
        assert watch.judge([row(2 * n, n), row(2 * n + 1, n)]) == []
    for n in range(100):  # frozen again, as rank 0 had them
        assert watch.judge([row(7, n), row(7, n)]) == []
    for n in range(100):
        assert watch.judge([row(2 * n, n), row(2 * n + 1, n)]) == []


def test_what_moves_on_one_rank_first_is_its_own() -> None:
    """A part of a model that only some batches reach."""
    watch = BufferWatch()
    draw = random.Random(1)
    held = [0, 0, 0]
    for n in range(200):
        held[draw.randrange(3)] = n
        assert watch.judge([row(each) for each in held]) == []


def test_marks_of_other_buffers_are_not_compared_and_learned_anew() -> None:
    watch = BufferWatch()
    alike(watch, ALIKE + 1)
    assert watch.judge([row(1), row(1), row(1, 2)]) == []
    assert watch.judge([row(1, 1)] * 3) == []
    for n in range(LASTING + 2):
        assert watch.judge([row(n, n), row(n, n), row(90 + n, n)]) == []
    assert BufferWatch().judge(["", ""]) == []
