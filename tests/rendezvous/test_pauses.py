"""How long a client waits between two attempts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from rendezvous.client import FIRST_PAUSE_S, LONGEST_PAUSE_S, longest_pause


def pauses(*, is_busy: bool) -> Iterator[float]:
    longest = 0.0
    while True:
        longest = longest_pause(longest, is_busy=is_busy)
        yield longest


def test_a_server_that_comes_back_is_found_within_a_quarter_of_its_absence() -> None:
    absence = 0.0
    for pause in islice(pauses(is_busy=False), 30):
        assert pause <= 0.25 * absence + FIRST_PAUSE_S + 1e-9
        absence += pause
    assert pause == LONGEST_PAUSE_S


def test_a_busy_server_is_asked_seven_times_in_the_first_two_seconds_at_most() -> None:
    asked_after = list(islice(pauses(is_busy=True), 7))
    assert sum(asked_after) > 2.0
    assert max(asked_after) == LONGEST_PAUSE_S
