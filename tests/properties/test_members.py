"""The short form in which the members of a round travel."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.job.ranks import Seat, assign
from elastic_driver.words.orders import World, decode_world, encode_world
from elastic_driver.words.world import Member
from tests.words.test_world import members_on

SLOTS = st.sets(st.integers(0, 5), min_size=1).map(sorted)
WHERE = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 5)), unique=True, min_size=1, max_size=20
)


@given(WHERE, st.data())
def test_any_world_arrives_as_it_was_sent(
    where: list[tuple[str, int]], data: st.DataObject
) -> None:
    numbers = st.integers(1, 3)
    names = [(f"{h}.{s}.{data.draw(numbers)}", h, s) for h, s in where]
    places = assign(Seat(name, h, s, (False, age)) for age, (name, h, s) in enumerate(names))
    members = tuple(
        Member(name, place, data.draw(st.integers(-1, 1)), data.draw(st.booleans()))
        for name, place in places
    )
    arrived = decode_world(encode_world(World(3, members, "test")))
    assert tuple(arrived.members) == members
    assert [arrived.members[rank] for rank in range(len(members))] == list(members)
    assert [arrived.member(member.worker) for member in members] == list(members)


@given(st.lists(st.tuples(SLOTS, st.integers(1, 2)), min_size=1, max_size=8))
def test_hosts_of_all_shapes_arrive_as_they_were_sent(shapes: list[tuple[list[int], int]]) -> None:
    members = members_on(
        [
            (f"h{n}", [(slot, incarnation) for slot in slots])
            for n, (slots, incarnation) in enumerate(shapes)
        ]
    )
    arrived = decode_world(encode_world(World(1, members, "test")))
    assert list(arrived.members) == members
    assert [arrived.members[rank] for rank in range(arrived.size)] == members
    assert [arrived.member(member.worker) for member in members] == members
