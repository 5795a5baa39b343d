"""The kernel: who takes an event in, what is written before anything acts, who acts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from msgspec import Struct

from elastic_driver.kernel.kernel import Catalog, Kernel, Machines
from elastic_driver.kernel.machine import CausedDecision, Declaration, Machine, Reply
from elastic_driver.kernel.tables import Snapshots, Tables
from elastic_driver.runtime.machines import MACHINES


class Rang(Struct, frozen=True):
    machine: ClassVar[str] = "door"

    floor: int


class Rangs(Struct, frozen=True):
    machine: ClassVar[str] = "door"

    floors: tuple[int, ...]


class Closed(Struct, frozen=True):
    machine: ClassVar[str] = "door"


class Open(CausedDecision, frozen=True):
    floor: int


class Light(CausedDecision, frozen=True):
    on: bool


class Door(Snapshots):
    """Opens where somebody has rung."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, float]] = []

    def handle(self, event: Rang | Rangs | Closed, now: float) -> list[Open | Reply]:
        self.heard.append((event, now))
        match event:
            case Rangs(floors):
                return [Open(floor) for floor in floors]
            case Rang(floor):
                return [Open(floor), Reply(floor, None)]
        return []

    def deadline(self) -> float | None:
        return None if not self.heard else self.heard[-1][1] + 5.0

    def check(self) -> list[str]:
        return ["it is open everywhere"] if len(self.heard) > 3 else []

    def tables(self) -> Tables:
        return {}

    @classmethod
    def from_tables(cls, found: Tables) -> Door:
        return cls()


class Lamp:
    """Is on once somebody has rung."""

    def handle(self, event: Rang, now: float) -> list[Light]:
        return [Light(on=True)]

    def deadline(self) -> float | None:
        return None

    def check(self) -> list[str]:
        return []


DOOR = Declaration(
    name="door",
    kind=Door,
    events=Rang | Rangs | Closed,
    decisions=Open | Reply,
    together=(Rang,),
    batch=lambda those: Rangs(tuple(each.floor for each in those)) if len(those) > 1 else those[0],
)
LAMP = Declaration(name="lamp", events=Rang, decisions=Light, hears={"door": (Rang,)})


class House:
    """A kernel with a door and a lamp; `story`: what has happened, in order."""

    def __init__(self, *, journal: bool = False) -> None:
        self.story: list[object] = []
        self.now, self.writes = 0.0, True
        self.waiting: list[Callable[[], None]] = []
        self.kernel = Kernel(
            Catalog((DOOR, LAMP)),
            {Open: self.story.append, Light: self.story.append},
            clock=lambda: self.now,
            answer=lambda replies: self.story.append([each.ticket for each in replies]),
            followers={Closed: self.story.append},
        )
        machines: dict[str, Machine[Any, Any]] = {"door": Door(), "lamp": Lamp()}
        for name, machine in machines.items():
            self.kernel.begin(name, machine)
        if journal:
            self.kernel.record = self

    def note(self, n: int, at: float, machine: str, event: object) -> None:
        self.story.append(("noted", n, at, machine, event))

    def is_written(self) -> bool:
        self.story.append("written")
        return self.writes

    def once_written(self, act: Callable[[], None]) -> None:
        self.waiting.append(act)


def test_an_event_goes_to_those_that_hear_it_and_then_to_its_own_machine() -> None:
    house = House()
    house.kernel.hand_over([Rang(2)])
    assert house.story == [Light(on=True, cause=1), Open(2, cause=2), [2]]


def test_events_that_are_declared_so_are_handled_together() -> None:
    house = House()
    house.kernel.hand_over([Rang(1), Rang(2)])
    lights = [Light(on=True, cause=1), Light(on=True, cause=2)]
    assert house.story == [*lights, Open(1, cause=3), Open(2, cause=3)]


@pytest.mark.parametrize("first", ["rang", "closed"])
def test_only_neighbours_that_are_declared_so_are_handled_together(first: str) -> None:
    house = House()
    closed = Closed()
    events = [Rang(1), Rang(2), closed] if first == "rang" else [closed, Rang(1), Rang(2)]
    house.kernel.hand_over(events)
    door = house.kernel.machines["door"]
    heard = [event for event, _ in door.heard]  # type: ignore[attr-defined]
    assert heard == ([Rangs((1, 2)), closed] if first == "rang" else [closed, Rangs((1, 2))])


def test_nothing_acts_before_the_journal_has_the_event() -> None:
    house = House(journal=True)
    house.now = 7.0
    house.kernel.decide("door", Rang(3))
    assert house.story == [("noted", 1, 7.0, "door", Rang(3)), "written", Open(3, cause=1)]
    (answer,) = house.waiting
    answer()
    assert house.story[-1] == [3], "the client gets its answer then"


def test_handlers_followers_and_replies_of_one_event_all_wait_for_the_journal() -> None:
    house = House(journal=True)
    house.kernel._followers = {Rang: lambda event: house.story.append(("follows", event))}
    house.writes = False
    house.kernel.hand_over([Rang(3)])
    assert house.story[-2:] == [("noted", 2, 0.0, "door", Rang(3)), "written"]
    assert house.waiting == []
    house.writes = True
    house.kernel.hand_over([Rang(4)])
    assert house.story[-3:] == ["written", ("follows", Rang(4)), Open(4, cause=4)]
    assert len(house.waiting) == 1, "its reply waits until the journal is written"


def test_machines_alone_decide_with_the_same_numbers_and_nothing_acts() -> None:
    house = House(journal=True)
    for event in (Rang(2), Closed()):
        house.kernel.hand_over([event])
    replayed = Machines()
    replayed.begin("door", Door())
    noted = [each for each in house.story if isinstance(each, tuple)]
    decided = [replayed.handle(*rest) for _, *rest in noted]
    assert decided == [[Open(2, cause=2), Reply(2, None, cause=2)], []]
    assert [n for _, n, *_ in noted] == [2, 3], "the lamp has handled event 1"
    assert (replayed.events, replayed.deadlines["door"]) == (3, 5.0)
    with pytest.raises(LookupError, match="the machine 'lamp' has not begun at event 4"):
        replayed.handle(4, 1.0, "lamp", Rang(1))


def test_what_cannot_be_written_has_no_consequences() -> None:
    house = House(journal=True)
    house.writes = False
    house.kernel.decide("door", Rang(3))
    house.kernel.hand_over([Closed()])
    assert [each for each in house.story if isinstance(each, CausedDecision | Closed)] == []
    assert house.waiting == []


def test_a_machine_that_is_not_journalled_waits_for_no_journal() -> None:
    house = House(journal=True)
    house.kernel.decide("lamp", Rang(1))
    assert house.story == [Light(on=True, cause=1)]


def test_what_follows_from_an_event_alone_waits_for_the_journal_and_needs_no_machine() -> None:
    house = House(journal=True)
    house.kernel.hand_over([Closed()])
    assert house.story[1:] == ["written", Closed()]
    house.kernel.end("door")
    house.story.clear()
    house.kernel.hand_over([Closed()])
    assert house.story == [Closed()]


def test_deadlines_are_those_of_the_machines_that_run() -> None:
    house = House()
    assert house.kernel.due(100.0) == []
    house.now = 3.0
    house.kernel.decide("door", Closed())
    assert (house.kernel.due(7.9), house.kernel.due(8.0)) == ([], ["door"])
    house.kernel.end("door")
    assert house.kernel.due(8.0) == []


def test_a_violated_invariant_ends_a_run_that_looks_for_it() -> None:
    house = House()
    house.kernel.checks_invariants = True
    for _ in range(3):
        house.kernel.decide("door", Closed())
    with pytest.raises(AssertionError, match=r"after Closed\(\): it is open everywhere"):
        house.kernel.decide("door", Closed())


@pytest.mark.parametrize(
    ("handlers", "problem"),
    [({}, "nobody carries out Light"), ({Light: print, Open: print}, "no machine decides Open")],
)
def test_a_kernel_is_not_built_with_a_decision_or_a_handler_too_many(
    handlers: Any, problem: str
) -> None:
    with pytest.raises(TypeError, match=problem):
        Kernel(Catalog((LAMP,)), handlers, clock=lambda: 0.0)


def test_the_machines_of_a_driver_take_in_all_that_they_hear() -> None:
    for declared in MACHINES:
        for name, kinds in declared.hears.items():
            assert set(kinds) <= set(declared.event_types())
            assert set(kinds) <= set(MACHINES[name].event_types())
        assert set(declared.together) <= set(declared.event_types())
