"""The six numbers, and what is said before there are any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_driver.core.members import SlotInfo
from elastic_driver.worker import current


@pytest.fixture(autouse=True)
def nowhere() -> Iterator[None]:
    current.forget()
    yield
    current.forget()


def test_before_a_world_a_question_says_what_to_call() -> None:
    assert not current.is_initialized()
    for ask in (current.rank, current.size, current.slot, current.round_id):
        with pytest.raises(current.NotInitializedError, match=r"elastic\.init\(\)"):
            ask()


def test_in_a_world_each_number_is_its_own() -> None:
    current.enter(SlotInfo("h", 7, 1, 2, 3, 4, 5, 6, 0, 1), 9)
    assert current.is_initialized()
    assert (current.rank(), current.local_rank(), current.cross_rank()) == (1, 2, 3)
    assert (current.size(), current.local_size(), current.cross_size()) == (4, 5, 6)
    assert (current.slot(), current.round_id()) == (7, 9)
