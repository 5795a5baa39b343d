"""The recording of the demonstration: what `benchmarks.record` draws, and the picture itself."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

from benchmarks.record import COLUMNS, draw, run
from tests.support.job import ROOT

DEMO = ROOT / "docs" / "demo.svg"


def texts(svg: str) -> list[str]:
    """Return the texts of a picture that we have made, without the ends of lines."""
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")  # noqa: S314
    return [text for each in found if (text := (each.text or "").replace("\xa0", " ").strip())]


def test_each_line_appears_when_it_was_written_and_no_pause_is_long() -> None:
    svg = draw([(0.5, "one"), (0.7, "a < b & c"), (60.0, "x" * (COLUMNS + 1))], "title")
    assert texts(svg) == ["title", "one", "a < b & c", "x" * COLUMNS, "x"]
    delays = re.findall(r"animation-delay:([\d.]+)s", svg)
    assert sorted(set(delays)) == ["0.50", "0.70", "1.70"]


def test_a_command_runs_on_a_terminal() -> None:
    script = "import os, sys; print(sys.stdout.isatty(), os.get_terminal_size()[0]); sys.exit(3)"
    lines, status = run([sys.executable, "-c", script])
    assert ([text for _, text in lines], status) == ([f"True {COLUMNS}"], 3)


def test_the_picture_shows_a_kill_that_cost_no_step_and_loads_nothing() -> None:
    svg = DEMO.read_text()
    assert len(svg) < 100_000
    assert re.findall(r"https?://[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
    shown = texts(svg)
    assert "workers  3 -> 2 -> 3" in shown
    assert any(re.fullmatch(r"steps lost  0 of \d+; done twice: 0", line) for line in shown)
