"""A shuffle without memory is still a shuffle."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.arithmetic import Permutation, mix


@given(st.integers(0, 600), st.integers(0, 2**64 - 1))
def test_every_index_comes_exactly_once(size: int, key: int) -> None:
    order = Permutation(size, key)
    assert sorted(order[position] for position in range(size)) == list(range(size))


@given(st.integers(1, 10**18), st.integers(0, 2**64 - 1), st.data())
def test_huge_orders_stay_in_range_and_do_not_repeat(
    size: int, key: int, data: st.DataObject
) -> None:
    positions = data.draw(st.sets(st.integers(0, size - 1), max_size=20))
    order = Permutation(size, key)
    found = {order[position] for position in positions}
    assert len(found) == len(positions)
    assert all(0 <= index < size for index in found)


@given(st.integers(1, 10**18), st.integers(0, 2**64 - 1), st.data())
def test_the_position_of_each_number_is_found(size: int, key: int, data: st.DataObject) -> None:
    order = Permutation(size, key)
    for position in data.draw(st.sets(st.integers(0, size - 1), max_size=20)):
        assert order.position(order[position]) == position


def test_seeds_give_all_orders_equally_often() -> None:
    rounds = 6000
    seen = Counter(tuple(Permutation(4, mix(seed))) for seed in range(rounds))
    expected = rounds / 24
    assert len(seen) == 24
    chi_squared = sum((count - expected) ** 2 / expected for count in seen.values())
    assert chi_squared < 49.7  # 23 degrees of freedom, p = 0.001
