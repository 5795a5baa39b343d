"""`docs/states.md` says what the code does."""

from __future__ import annotations

from pathlib import Path

from tests.job.states_page import render

PAGE = Path(__file__).parents[2] / "docs" / "states.md"


def test_the_page_of_states_is_the_one_the_code_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "run: python -m tests.job.states_page > docs/states.md"
    )
