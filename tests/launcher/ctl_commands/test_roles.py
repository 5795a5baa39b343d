"""Which token each subcommand of `elasticctl` uses: the least that does."""

from __future__ import annotations

import pytest

from elastic_driver.runtime.api import ROUTES
from launcher.ctl_commands.running import ACTIONS, _role, make_parser
from rendezvous.auth import Role

WORDS = {
    "status": (),
    "top": (),
    "hosts": (),
    "events": ("-f",),
    "logs": ("-f",),
    "stacks": ("--last",),
    "open": (),
    "scale": ("3",),
    "apply": ("plan.yaml",),
    "drain": ("n1",),
    "stop": (),
}
READING = {"status", "top", "hosts", "events", "logs"}


def test_all_subcommands_are_here() -> None:
    assert WORDS.keys() == ACTIONS.keys()


@pytest.mark.parametrize("name", sorted(WORDS))
def test_a_reader_looks_and_an_operator_steers(name: str) -> None:
    given = make_parser(name).parse_args(WORDS[name])
    reads = name in READING or name == "stacks"
    assert _role(name, given) is (Role.READER if reads else Role.OPERATOR)


def test_collecting_stacks_is_steering() -> None:
    assert _role("stacks", make_parser("stacks").parse_args([])) is Role.OPERATOR
    (row,) = (row for row in ROUTES if (row.method, row.path) == ("POST", "/v1/stacks"))
    assert row.roles == {Role.OPERATOR}
