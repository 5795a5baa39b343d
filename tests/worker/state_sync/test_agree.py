"""The state that wins follows from the world alone, and is the same on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.core.documents import World
from elastic_driver.core.members import Member
from elastic_driver.worker.state_sync.sharing import StateLostError, agree
from elastic_driver.worker.world.membership import ALONE


def world(*standings: tuple[int, bool]) -> World:
    """A world whose ranks have these (version, clean)."""
    members = []
    for rank, (version, clean) in enumerate(standings):
        place = ALONE
        members.append(
            Member(
                worker=f"h.{rank}.1",
                place=type(place)(**{**_fields(place), "rank": rank, "size": len(standings)}),
                version=version,
                clean=clean,
            )
        )
    return World(round=2, members=tuple(members), reason="test")


def _fields(place: object) -> dict[str, object]:
    return {name: getattr(place, name) for name in type(place).__struct_fields__}  # type: ignore[attr-defined]


def test_at_the_start_rank_0_is_what_everybody_starts_with() -> None:
    found = agree(world((-1, True), (-1, True), (-1, True)))
    assert (found.source, found.receivers, found.version, found.fresh) == (0, {1, 2}, 0, True)


def test_nobody_receives_where_all_have_the_same() -> None:
    found = agree(world((7, True), (7, True)))
    assert found.receivers == frozenset()
    assert (found.version, found.exact) == (7, True)


def test_the_furthest_clean_rank_is_the_source_and_others_receive() -> None:
    found = agree(world((6, True), (7, True), (7, True), (6, True)))
    assert (found.source, found.receivers, found.version) == (1, {0, 3}, 7)


def test_a_dirty_rank_gives_way_to_a_clean_one_though_it_is_further() -> None:
    found = agree(world((9, False), (7, True)))
    assert (found.source, found.receivers, found.version, found.exact) == (1, {0}, 7, True)


def test_a_newcomer_never_is_the_source_though_it_is_rank_0() -> None:
    found = agree(world((-1, True), (3, False)))
    assert (found.source, found.receivers, found.version, found.exact) == (1, {0}, 3, False)


def test_where_all_are_dirty_the_furthest_is_taken_as_it_is() -> None:
    found = agree(world((4, False), (6, False), (6, False)))
    assert (found.source, found.receivers, found.exact) == (1, {0, 2}, False)


def test_a_half_received_state_is_never_what_others_get() -> None:
    assert agree(world((-1, False), (-1, True))).source == 1
    with pytest.raises(
        StateLostError, match="the last worker with the whole state died while sending it"
    ):
        agree(world((-1, False), (-1, False)))


def test_a_second_state_starts_from_the_lowest_rank_and_goes_on_counting() -> None:
    found = agree(world((7, True), (7, True)), afresh=7)
    assert (found.source, found.receivers, found.version, found.fresh) == (0, {1}, 7, True)


@given(st.lists(st.tuples(st.integers(-1, 5), st.booleans()), min_size=1, max_size=8))
def test_the_source_is_at_least_as_good_as_every_rank_that_keeps_its_own(
    standings: list[tuple[int, bool]],
) -> None:
    if all(version < 0 and not clean for version, clean in standings):
        return
    found = agree(world(*standings))
    assert found.source not in found.receivers
    best = standings[found.source]
    for rank, standing in enumerate(standings):
        if rank not in found.receivers:
            assert standing == best
        if best[0] >= 0 and best[1]:
            assert standing[0] <= best[0] or not standing[1]
