"""Which state wins, and who receives it: one rule for the driver and for the workers."""

from __future__ import annotations

import pytest

from elastic_driver.words.world import StateVersion, receivers_of, source_of


@pytest.mark.parametrize(
    ("states", "source", "receivers"),
    [
        ([(-1, True), (-1, True)], 0, {1}),  # nobody has trained: rank 0's first values
        ([(-1, False), (-1, True)], 1, {0}),  # rank 0 received only half of them
        ([(-1, False), (-1, False)], None, set()),
        ([(7, True), (7, True)], 0, set()),
        ([(6, True), (7, True), (7, True)], 1, {0}),
        ([(9, False), (7, True)], 1, {0}),  # a clean state beats one that is further
        ([(4, False), (6, False), (6, False)], None, set()),  # between two commits: nobody's
        ([(-1, True), (3, False)], None, set()),
    ],
)
def test_the_furthest_clean_state_wins(
    states: list[tuple[int, bool]], source: int | None, receivers: set[int]
) -> None:
    versions = [StateVersion(*state) for state in states]
    assert source_of(versions) == source
    if source is not None:
        assert receivers_of(versions, source) == receivers
