"""The story of a job: its worlds over time, and their picture."""

from __future__ import annotations

from typing import Any

from elastic_driver.features.goodput.story import MOST_WORLDS, Story, World, picture
from elastic_driver.words.log_lines import line_of


def test_the_picture_shows_the_mean_of_each_part_and_leaves_empty_only_what_had_no_worker() -> None:
    worlds = [World(10.0, 4), World(20.0, 1), World(25.0, 0), World(30.0, 4)]
    assert picture(worlds, 0.0, 40.0, width=8) == "  ██▂ ██"
    assert picture([World(0.0, 100), World(1.0, 1)], 0.0, 4.0, width=4) == "█▁▁▁"
    assert picture([], 0.0, 40.0) == ""


def test_a_short_plain_job_had_all_its_workers() -> None:
    story = Story()
    both = [{"host": "a", "slot": n, "worker": f"a.{n}.1"} for n in range(2)]
    events: list[tuple[float, str, dict[str, Any]]] = [
        (0.0, "job_started", {}),
        *((2.0, "worker_started", where) for where in both),
        (2.0, "processes_started", {"size": 2, "round": 1}),
        (6.0, "worker_exited", {**both[1], "exit_code": 0}),
        (6.0, "round_completed", {"size": 2, "round": 1}),
        (7.0, "worker_exited", {**both[0], "exit_code": 0}),
        (8.0, "job_succeeded", {}),
    ]
    for t, name, facts in events:
        line = line_of(name, t, facts)
        assert line is not None
        story.feed(line)
    assert story.worlds == [World(2.0, 2), World(6.0, 1), World(7.0, 0)]
    assert story.rounds == 1
    assert picture(story.worlds, 0.0, 8.0, width=8) == "  ████▄ "


def test_the_worlds_of_a_job_that_changes_for_weeks_are_bounded() -> None:
    story = Story()
    started: dict[str, Any] = {"host": "a", "slot": 0, "worker": "a.0.1"}
    events: list[tuple[str, dict[str, Any]]] = [
        ("worker_ready", started),
        ("round_completed", {"size": 1}),
        ("worker_exited", started),
    ]
    for n in range(2 * MOST_WORLDS):
        name, facts = events[n % 3]
        line = line_of(name, float(n), facts)
        assert line is not None
        story.feed(line)
    assert 1000 < len(story.worlds) <= MOST_WORLDS
    assert story.worlds[0].t == 1.0
    assert story.worlds == sorted(story.worlds)
