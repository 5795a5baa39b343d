"""The quick shuffle is the pure one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_driver.batch.permutation import Permutation
from elastic_driver.worker.batching.order import shuffled


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 2**40), st.integers(0, 2**64 - 1), st.data())
def test_many_positions_at_once_give_what_each_gives_alone(
    size: int, key: int, data: st.DataObject
) -> None:
    order = Permutation(size, key)
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    assert shuffled(order, positions) == [order[position] for position in positions]


def test_a_whole_order_has_everything_once() -> None:
    assert sorted(shuffled(Permutation(1000, 3), range(1000))) == list(range(1000))


def test_no_position_gives_nothing() -> None:
    assert shuffled(Permutation(10, 1), []) == []
