"""What docs/contributing.md says holds: its files and changes are made, and its tests pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contributing.md"
FILE = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)```\n", re.DOTALL)
CHANGE = re.compile(r"<!-- change: (\S+) -->\n```diff\n(.*?)```\n", re.DOTALL)
TITLE = re.compile(r"^## ", re.MULTILINE)


def section(title: str) -> str:
    (found,) = (each for each in TITLE.split(PAGE.read_text()) if each.startswith(f"{title}\n"))
    return found


def changed(text: str, diff: str) -> str:
    """The text after the hunks of a diff; what a hunk removes or keeps stands once in the text."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize(
    ("title", "files", "changes", "tests"),
    [
        ("A feature: a machine, its route and its line", 6, 0, "tests/features/rounds"),
        ("An event, and the decision that follows from it", 1, 2, "tests/job/test_marks.py"),
        ("A field of the heartbeat", 1, 3, "tests/worker/heartbeat/test_warnings.py"),
    ],
)
def test_the_files_and_changes_of_the_page_are_all_that_is_needed(
    title: str, files: int, changes: int, tests: str, tmp_path: Path
) -> None:
    text = section(title)
    written, made = dict(FILE.findall(text)), dict(CHANGE.findall(text))
    assert (len(written), len(made)) == (files, changes)
    for name in ("elastic_driver", "launcher", "rendezvous", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, content in written.items():
        assert not (ROOT / name).exists()
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        if name.startswith("tests/"):
            path.with_name("__init__.py").touch()
    for name, diff in made.items():
        path = tmp_path / name
        path.write_text(changed(path.read_text(), diff))
    touched = [*written, *made]
    lint = [sys.executable, "-m", "ruff", "check", "--no-cache", *touched]
    format_ = [sys.executable, "-m", "ruff", "format", "--no-cache", "--check", *touched]
    types = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, *map(str, made)]
    passes = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    for argv in (lint, format_, *([types] if made else []), passes):
        done = subprocess.run(
            argv,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_the_page_s_feature_is_one_folder_and_its_test() -> None:
    files = dict(FILE.findall(section("A feature: a machine, its route and its line")))
    assert {Path(name).parent.name for name in files} == {"rounds"}
