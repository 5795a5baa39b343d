"""A plan's file becomes a plan, or one line that says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from elastic_driver.words.wire_events import PlanApplied
from launcher.ctl_commands.orders import MAX_BYTES, parse_bytes, read_plan


def read(tmp_path: Path, text: str) -> PlanApplied:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return read_plan(path, newest=4)


def test_a_plan_is_the_next_one_unless_it_has_a_number(tmp_path: Path) -> None:
    assert read(tmp_path, "workers: 6") == PlanApplied(number=5, workers=6)
    assert read(tmp_path, "{number: 9, workers: 6}") == PlanApplied(number=9, workers=6)


def test_a_plan_may_say_everything(tmp_path: Path) -> None:
    text = "min: 2\nmax: 6\nslots-per-host: 2\ncpu_per_worker: 1.5\nmemory_per_worker: 8GiB\n"
    plan = read(tmp_path, text)
    assert plan == PlanApplied(
        number=5, min=2, max=6, slots_per_host=2, cpu_per_worker=1.5, memory_per_worker=8 * 2**30
    )
    assert str(read(tmp_path, "workers: 1000000")) == "plan 5: workers 1000000"
    assert str(plan) == (
        "plan 5: min 2, max 6, slots per host 2, CPUs per worker 1.5, MiB per worker 8192"
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("8G", 8 * 10**9), ("1.5 TiB", 3 * 2**39), ("64mb", 64 * 10**6), ("1ki", 1024)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it needs some of workers, min, max"),
        ("- 6", "it needs some of"),
        ("workers: many", "workers: expected `int | null`, got `str`"),
        ("workers: 0", "workers: expected `int` >= 1"),
        ("worker: 6", "'worker' is none of number, workers, min, max, slots_per_host, "),
        ("1: 6", "'1' is none of number, workers"),
        ("? [workers]\n: 1", "one of its names is a list or a mapping"),
        ("workers:", "it needs some of workers, min, max"),
        ("number: 7", "it needs some of workers, min, max"),
        ("workers: 3\nworkers: 4", "workers appears twice"),
        ("slots-per-host: 1\nslots_per_host: 2", "slots_per_host appears twice"),
        ("memory_per_worker: 8", "8 bytes for a worker are too few; add a unit, as 8GiB"),
        ("{workers: 4, min: 2}", "a plan has workers, or min and max, not both"),
        ("{min: 4, max: 2}", "min is 4, more than max, which is 2"),
        ("memory_per_worker: much", "a size is a number and a unit, as 8GiB, not 'much'"),
        ("cpu_per_worker: .nan", "cpu_per_worker"),
        ("workers: [", "while parsing a flow"),
        ("#" * MAX_BYTES + "##", "it is larger than"),
        ("[" * 20000, "is no plan"),
    ],
)
def test_what_is_no_plan_is_one_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError) as raised:
        read(tmp_path, text)
    assert problem in str(raised.value)
    assert "plan.yaml is no plan: " in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none: No such file"):
        read_plan(tmp_path / "none", 0)
