"""A growing file of JSON lines is read line by line, as it stands at each look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.json_lines import JsonLines


def step(line: dict[str, Any]) -> int:
    return int(line["step"])


def test_each_line_is_parsed_once_and_half_a_line_is_waited_for(tmp_path: Path) -> None:
    path, parsed = tmp_path / "steps.jsonl", []
    lines = JsonLines(path, lambda line: (parsed.append(line), step(line))[1])
    assert lines.read() == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert lines.read() == [1, 2]
    assert lines.read() == [1, 2]
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert lines.read() == [1, 2, 3]
    assert len(parsed) == 3


def test_a_replaced_truncated_or_removed_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = JsonLines(path, step)
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert lines.read() == [1, 2]
    path.rename(tmp_path / "steps.jsonl.1")
    path.write_text('{"step": 3}\n{"step": 4}\n{"step": 5}\n')
    assert lines.read() == [3, 4, 5]
    path.write_text('{"step": 6}\n')
    assert lines.read() == [6]
    path.unlink()
    assert lines.read() == []


def test_a_list_that_was_returned_does_not_change_later(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = JsonLines(path, step)
    path.write_text('{"step": 1}\n')
    before = lines.read()
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert before == [1]
    assert lines.read() == [1, 2]
