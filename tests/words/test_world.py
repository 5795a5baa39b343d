"""The short form in which the members of a round travel.

Which state wins, and who receives it: one rule for the driver and for the workers.
"""

from __future__ import annotations

import pytest

from elastic_driver.job.ranks import Seat, assign
from elastic_driver.words.orders import World, decode_world, encode_world
from elastic_driver.words.world import (
    Member,
    Members,
    Roster,
    SlotRun,
    Standings,
    StateVersion,
    receivers_of,
    roster_of,
    source_of,
)


def members_on(hosts: list[tuple[str, list[tuple[int, int]]]]) -> list[Member]:
    """Members in (slot, incarnation) of each host, the first being the oldest."""
    seats = [
        Seat(f"{host}.{slot}.{incarnation}", host, slot, (False, 0))
        for host, workers in hosts
        for slot, incarnation in workers
    ]
    aged = [seat._replace(age=(False, age)) for age, seat in enumerate(seats)]
    return [Member(name, place) for name, place in assign(aged)]


def test_a_world_arrives_as_it_was_sent() -> None:
    members = members_on(
        [("a", [(0, 1), (1, 1), (3, 1), (2, 7)]), ("b.example.org", [(5, 2)]), ("c", [(1, 1)])]
    )
    members[1] = Member(members[1].worker, members[1].place, 12, False)
    world = World(7, tuple(members), "membership changed")
    arrived = decode_world(encode_world(world))
    assert arrived == world
    assert list(arrived.members) == members
    assert [arrived.members[rank] for rank in range(arrived.size)] == members
    assert [arrived.members[-1]] == members[-1:]
    assert arrived.members[1:3] == tuple(members[1:3])
    assert [arrived.member(member.worker) for member in members] == members


def test_whoever_is_not_in_it_has_no_entry() -> None:
    world = World(1, members_on([("a", [(0, 1), (1, 2)])]), "test")
    arrived = decode_world(encode_world(world))
    for stranger in ("a.0.2", "a.2.1", "a.1.1", "b.0.1", "a.x.1", "a", ""):
        assert arrived.member(stranger) is None
    with pytest.raises(IndexError):
        arrived.members[2]


def test_a_thousand_members_take_a_kilobyte_and_ten_thousand_ten() -> None:
    for hosts, most in ((125, 1500), (1250, 15_000)):
        members = members_on([(f"h{n}", [(s, 1) for s in range(8)]) for n in range(hosts)])
        assert len(encode_world(World(1, members, "every worker is ready"))) < most


def test_an_empty_world_has_nobody() -> None:
    assert list(Members(Roster((), ()))) == []


def test_a_member_whose_name_is_not_that_of_its_slot_is_refused() -> None:
    (member,) = members_on([("a", [(0, 1)])])
    with pytest.raises(ValueError, match=r"b\.0\.1 is no worker in slot 0 of a"):
        roster_of([Member("b.0.1", member.place)])


@pytest.mark.parametrize(
    "text",
    [
        '{"round":1,"reason":"","roster":[[[["a"],[[0,2,1]]]],[[1,-1,true]]]}',  # one has no state
        '{"round":1,"reason":"","roster":[[[["a"],[[0,0,1]]]],[]]}',
        '{"round":1,"reason":"","roster":[[[["a"],[]]],[]]}',
        '{"round":1,"reason":"","roster":[[[["a"],[[0,2000000,1]]]],[[2000000,-1,true]]]}',
        "[]",
    ],
)
def test_a_roster_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_world(text.encode())


def test_hosts_in_the_same_state_share_their_runs() -> None:
    roster = roster_of(members_on([("a", [(0, 1), (1, 1)]), ("b", [(0, 1), (1, 1)])]))
    assert [group.hosts for group in roster.groups] == [("a", "b")]
    assert roster.groups[0].runs == (SlotRun(0, 2, 1),)
    assert roster.standings == (Standings(4, -1, True),)


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
