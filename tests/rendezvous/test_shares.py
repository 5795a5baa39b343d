"""Shares of a bounded room: what one client gets, and what is left to people."""

from __future__ import annotations

import pytest

from elastic_driver import token_roles
from rendezvous.auth import DRIVER, Caller, Role
from rendezvous.fairness import Shares

READER, OPERATOR = Caller(Role.READER), Caller(Role.OPERATOR)
READERS_PAGE = Caller(Role.READER, "page 1")


def workers(count: int) -> list[Caller]:
    return [Caller(token_roles.WORKER, f"a.0.{n}") for n in range(count)]


def fill(shares: Shares, caller: Caller | None) -> int:
    taken = 0
    while shares.take(caller):
        taken += 1
    return taken


@pytest.mark.parametrize("caller", [READER, OPERATOR, READERS_PAGE, *workers(1), None])
def test_one_client_takes_a_quarter_and_gets_it_again(caller: Caller | None) -> None:
    shares = Shares(64)
    for _ in range(2):
        assert fill(shares, caller) == 16
        for _ in range(16):
            shares.give_back(caller)
    assert shares.taken == 0
    assert not shares._taken_by, "nothing is left of it"


def test_machines_leave_room_to_people_and_readers_to_operators() -> None:
    shares = Shares(64)
    assert sum(fill(shares, worker) for worker in (*workers(9), READER, None)) == 56
    assert fill(shares, READERS_PAGE) == 4
    assert fill(shares, Caller(Role.READER, "page 2")) == 0
    assert fill(shares, OPERATOR) == 4


def test_the_drivers_token_has_the_whole() -> None:
    assert fill(Shares(64), DRIVER) == 64


def test_a_small_room_is_open_to_all() -> None:
    assert fill(Shares(1), READER) == 1
    assert fill(Shares(3), READER) == 1


def test_an_amount_is_taken_whole_or_not() -> None:
    shares = Shares(1000)
    assert not shares.take(READER, 251)
    assert shares.take(READER, 250)
    assert not shares.take(READER)
    assert shares.taken == 250
