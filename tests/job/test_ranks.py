"""Ranks, local ranks and cross ranks."""

from __future__ import annotations

from elastic_driver.job.ranks import Seat, assign
from elastic_driver.words.world import SlotInfo


def seats(*where: tuple[str, int]) -> list[Seat]:
    """Seats on (host, slot), the first being the oldest."""
    return [Seat(f"{h}.{s}", h, s, (False, age)) for age, (h, s) in enumerate(where)]


def numbers(place: SlotInfo) -> tuple[int, ...]:
    return (
        place.rank,
        place.size,
        place.local_rank,
        place.local_size,
        place.cross_rank,
        place.cross_size,
    )


def test_two_even_hosts_get_horovods_numbers() -> None:
    places = assign(seats(("a", 0), ("a", 1), ("b", 0), ("b", 1)))
    assert [numbers(place) for _, place in places] == [
        (0, 4, 0, 2, 0, 2),
        (1, 4, 1, 2, 0, 2),
        (2, 4, 0, 2, 1, 2),
        (3, 4, 1, 2, 1, 2),
    ]


def test_cross_sizes_count_only_the_hosts_that_have_the_local_rank() -> None:
    places = assign(seats(("a", 0), ("b", 0), ("b", 1), ("b", 2), ("c", 0), ("c", 1)))
    assert [numbers(place) for _, place in places] == [
        (0, 6, 0, 1, 0, 3),
        (1, 6, 0, 3, 1, 3),
        (2, 6, 1, 3, 0, 2),
        (3, 6, 2, 3, 0, 1),
        (4, 6, 0, 2, 2, 3),
        (5, 6, 1, 2, 1, 2),
    ]


def test_hosts_come_in_the_order_of_their_oldest_member() -> None:
    places = assign(seats(("b", 1), ("a", 0), ("b", 0)))
    assert [worker for worker, _ in places] == ["b.1", "b.0", "a.0"]
    assert [(p.node_rank, p.node_count) for _, p in places] == [(0, 2), (0, 2), (1, 2)]


def test_a_gap_in_the_slots_leaves_no_gap_in_the_local_ranks() -> None:
    places = assign(seats(("a", 0), ("a", 3)))
    assert [(p.slot, p.local_rank) for _, p in places] == [(0, 0), (3, 1)]


def test_nobody_gets_no_ranks() -> None:
    assert assign([]) == []
