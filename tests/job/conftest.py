"""Every scenario's invariants are checked after each event, and once more at teardown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.job.scenario import MakeScenario, Scenario


@pytest.fixture
def scenario() -> Iterator[MakeScenario]:
    made: list[Scenario] = []

    def make(**settings: object) -> Scenario:
        made.append(Scenario(**settings))
        return made[-1]

    yield make
    for one in made:
        assert one.job.check() == []
