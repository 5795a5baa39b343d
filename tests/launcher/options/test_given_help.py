"""The text of --help says everything the table knows."""

from __future__ import annotations

from elastic_driver.options import Heading
from launcher.options.given import render_help
from launcher.options.table import OPTIONS


def test_every_option_every_alias_and_every_group_is_there() -> None:
    text = render_help()
    for option in OPTIONS:
        assert all(f"{name}" in text for name in (option.long, *option.aliases))
        assert option.help.split()[0] in text
    headings = [text.index(f"\n{heading.value}\n") for heading in Heading]
    assert headings == sorted(headings)
    assert text.index("Examples") > headings[-1]


def test_no_line_is_wider_than_asked_for() -> None:
    assert max(map(len, render_help(100).splitlines())) <= 100


def test_defaults_come_from_the_settings() -> None:
    assert "[0.02]" in render_help()
    assert "[10 600]" in render_help()
