"""A job in one line, and in some lines when it is over."""

from __future__ import annotations

import time
from typing import Any

from elastic_driver.features.goodput.story import Story
from elastic_driver.runtime.driver import JobNow
from elastic_driver.runtime.reporter import Change
from elastic_driver.words.log_lines import line_of
from elastic_driver.words.progress import Measured
from launcher.launch.status_line import status_line, summary

NOON = time.mktime((2026, 1, 2, 12, 0, 0, 0, 0, -1))
TRAINING = Measured(
    step=1204,
    total=5000,
    steps_per_s=6.7,
    samples_per_s=1234.4,
    numbers={"loss": 0.31249, "accuracy": 0.91},
)
NOW = JobNow(2, 3, TRAINING, Change(NOON, "worker a.0.1 lost"))


def test_the_line_says_the_most_important_things_first() -> None:
    assert status_line(NOW, 200) == (
        "2 of 3 workers | step 1,204 of 5,000 | about 9 min left | 1,234 samples/s | loss 0.3125 "
        "| accuracy 0.91 | 12:00:00 worker a.0.1 lost"
    )
    assert status_line(NOW, 80) == (
        "2 of 3 workers | step 1,204 of 5,000 | about 9 min left | 1,234 samples/s"
    )
    assert status_line(NOW, 20) == "2 of 3 workers"


def test_what_is_not_known_is_left_out() -> None:
    assert status_line(None, 80) == ""
    assert status_line(JobNow(0, 3, Measured(), None), 80) == "no world yet, 3 workers wanted"
    after = Measured(step=7)
    started = JobNow(0, 3, Measured(), None, processes=3)
    assert status_line(started, 80) == "3 workers started"
    assert status_line(JobNow(0, 1, after, None), 80) == "no world now, 1 worker wanted"
    assert status_line(JobNow(1, 1, Measured(), None), 80) == "1 worker"
    known = Measured(step=7, total=9, steps_per_s=0.0)
    assert status_line(JobNow(1, 1, known, None), 80) == "1 worker | step 7 of 9 | 0.00 steps/s"


def test_no_line_is_wider_than_the_terminal() -> None:
    for now in (NOW, NOW._replace(change=Change(NOON, "x" * 500))):
        for columns in range(20, 201):
            line = status_line(now, columns)
            assert 0 < len(line) <= columns


def test_text_of_a_script_controls_no_terminal_and_has_the_width_it_seems_to_have() -> None:
    hostile = Measured(numbers={"\x1b[2J損失": 1.0})
    line = status_line(JobNow(1, 1, hostile, Change(NOON, "host \x07é")), 80)
    assert line == "1 worker | ?[2J?? 1 | 12:00:00 host ??"


# ---- the end of a job ----------------------------------------------------------------------


def story(*events: tuple[float, str, dict[str, Any]]) -> Story:
    told = Story()
    for t, event, facts in events:
        line = line_of(event, t, facts)
        assert line is not None
        told.feed(line)
    return told


def run(seconds: float, end: str, *, lost: bool = False, step: int = 0) -> Story:
    """A job of two workers, the second of which may be lost half way."""
    events: list[tuple[float, str, dict[str, Any]]] = [
        (0.0, "job_started", {"min_np": 1, "max_np": 2}),
        (0.0, "host_discovered", {"host": "a", "slots": 2}),
    ]
    for slot in (0, 1):
        worker = {"host": "a", "slot": slot, "worker": f"a.{slot}.1"}
        events += [(0.0, "worker_started", worker), (0.0, "worker_ready", worker)]
    events.append((0.0, "round_completed", {"size": 2}))
    events.append((0.0, "state_synced", {"first_step": 1}))
    if lost:
        gone, other = ({"host": "a", "slot": n, "worker": f"a.{n}.1"} for n in (1, 0))
        events += [
            (seconds / 2, "worker_exited", {**gone, "exit_code": -9}),
            (seconds / 2, "worker_ready", other),
            (seconds / 2, "round_closed", {"step": step}),
            (seconds / 2, "round_completed", {"size": 1}),
            (seconds / 2, "state_synced", {"first_step": step - 1}),
            (seconds / 2, "steps_redone", {}),
        ]
    return story(*events, (seconds, end, {"step": step, "exit_code": int(end != "job_succeeded")}))


def test_a_long_job_is_summed_up() -> None:
    lines = summary(run(120.0, "job_succeeded", lost=True, step=1500), 120.0, "elasticctl report")
    assert lines[0] == "ran 2 min, 1,500 steps, goodput 75.0%"
    assert lines[1] == f"workers, 0 to 2: {'█' * 20}{'▄' * 20}"
    assert lines[2:] == [
        "survived 1 worker failure, 2 steps trained again",
        "more: elasticctl report",
    ]


def test_a_failed_job_has_survived_nothing_in_the_end() -> None:
    lines = summary(run(120.0, "job_failed", lost=True, step=10), 120.0, "x")
    assert lines[2] == "1 worker failure, 2 steps trained again"


def test_a_short_job_without_a_step_to_lose_says_nothing() -> None:
    assert summary(run(2.0, "job_succeeded", step=10), 2.0, "x") == []
    worker = {"host": "a", "slot": 0, "worker": "a.0.1"}
    typo = story(
        (0.0, "job_started", {}),
        (0.5, "worker_started", worker),
        (0.5, "round_completed", {"size": 1}),
        (1.0, "worker_exited", {**worker, "exit_code": 1}),
        (1.0, "job_failed", {"exit_code": 1}),
    )
    assert summary(typo, 1.0, "x") == []
    assert summary(run(2.0, "job_succeeded", lost=True, step=10), 2.0, "x") != []
    assert summary(Story(), 100.0, "x") == [], "it never had a world"
