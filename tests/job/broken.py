"""Rules of the job, each broken on purpose: an invariant has to catch every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from msgspec.structs import replace

from elastic_driver.job import rounds
from elastic_driver.job.capacity import Capacity
from elastic_driver.job.fleet import Effects
from elastic_driver.job.hosts import Hindrance
from elastic_driver.job.placement import Placement
from elastic_driver.job.ranks import Seat, assign
from elastic_driver.job.workers import Worker
from elastic_driver.words.world import SlotInfo

Break = Callable[[pytest.MonkeyPatch], None]


def ranks_with_a_gap(patch: pytest.MonkeyPatch) -> None:
    def from_one(seats: Iterable[Seat]) -> list[tuple[str, SlotInfo]]:
        return [(name, replace(place, rank=place.rank + 1)) for name, place in assign(seats)]

    patch.setattr(rounds, "assign", from_one)


def the_youngest_first(patch: pytest.MonkeyPatch) -> None:
    def backwards(seats: Iterable[Seat]) -> list[tuple[str, SlotInfo]]:
        return assign(seat._replace(age=(not seat.age[0], -seat.age[1])) for seat in seats)

    patch.setattr(rounds, "assign", backwards)


def too_few_are_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Capacity, "least", property(lambda _self: 1))


def no_number_is_too_many(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Capacity, "wanted", property(lambda _self: None))


def a_cool_down_does_not_matter(patch: pytest.MonkeyPatch) -> None:
    def there(self: Placement, host: str) -> bool:
        there = host in self.hosts.known
        return there and self.hosts.hindrance(host) in (None, Hindrance.COOL_DOWN)

    patch.setattr(Placement, "_eligible", there)


def orders_without_a_reason(patch: pytest.MonkeyPatch) -> None:
    stop = Effects.stop

    def unexplained(self: Effects, worker: Worker, _reason: str) -> None:
        stop(self, worker, "")

    patch.setattr(Effects, "stop", unexplained)


BROKEN: dict[Break, str] = {
    ranks_with_a_gap: r"the ranks of round \d+ are \[1",
    the_youngest_first: r"the oldest member of round \d+, .*, is rank [1-9]",
    too_few_are_enough: r"round \d+ has \d+ members, at least \d+ are required",
    no_number_is_too_many: r"at most \d+ are allowed",
    a_cool_down_does_not_matter: r"gets a worker or an agent though it is in cool-down",
    orders_without_a_reason: "has no reason",
}
"""Each with what is said of it."""
