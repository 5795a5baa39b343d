"""What a driver that goes on must do, each broken on purpose: the simulation has to find out."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.job.adoption import Adoption
from elastic_driver.job.fleet import Effects
from elastic_driver.job.rounds import Rounds
from elastic_driver.words.orders import Order
from tests.job.broken import Break
from tests.sim.agents import SimAgent
from tests.sim.driver import Journal


def no_order_is_given_again(patch: pytest.MonkeyPatch) -> None:
    give = Effects.give

    def once(
        self: Effects, host: str, order: Order, reason: str, *, repeated: bool = False
    ) -> None:
        if not repeated:
            give(self, host, order, reason)

    patch.setattr(Effects, "give", once)


def agents_obey_every_driver(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimAgent, "heeds_terms", False)


def worlds_are_published_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rounds, "resume", lambda _self, _now: None)


def agents_that_return_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adoption, "_compare", lambda _self, _event, _now: None)


def an_event_is_acted_upon_before_it_is_journalled(patch: pytest.MonkeyPatch) -> None:
    note = Journal.note

    def late(self: Journal, n: int, at: float, machine: str, event: Any) -> None:
        if self.driver.dies is None:
            note(self, n, at, machine, event)

    patch.setattr(Journal, "note", late)


def agents_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adoption, "advance", lambda _self, _now: ())


STUCK = "quiet, but|quiet and complete, but nobody finishes a step"
BROKEN_RESUMES: dict[Break, str] = {
    no_order_is_given_again: f"{STUCK}|the job after a crash is",
    agents_obey_every_driver: r"obeys the driver of term \d",
    worlds_are_published_once: STUCK,
    agents_are_not_awaited: "are awaited without a deadline",
    agents_that_return_are_not_compared: STUCK,
    an_event_is_acted_upon_before_it_is_journalled: (
        "the journal does not|is published after|everybody should have finished"
    ),
}
"""Each with what is said of it."""
