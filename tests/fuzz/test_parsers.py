"""No parser falls over hostile input; CI tries the same examples each time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.parsers import PARSERS, Parser

EXAMPLES = 60
QUICK = settings(
    max_examples=EXAMPLES,
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def named(parser: Parser) -> str:
    return parser.name


@pytest.mark.parametrize("parser", PARSERS, ids=named)
def test_it_accepts_or_refuses_and_never_fails(parser: Parser) -> None:
    @QUICK
    @given(parser.inputs)
    def attempt(found: Any) -> None:
        parser.attempt(found)

    for example in parser.examples:
        parser.attempt(example)
    attempt()
