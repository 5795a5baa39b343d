"""What docs/contributing.md says of a feature is true: its files are written, its test passes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contributing.md"
FILE = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)```\n", re.DOTALL)


def test_a_feature_is_a_folder_that_nothing_else_names(tmp_path: Path) -> None:
    files = dict(FILE.findall(PAGE.read_text()))
    test = "tests/features/rounds/test_rounds.py"
    assert len(files) == 6
    assert {Path(name).parent.name for name in files} == {"rounds"}
    for name in ("elastic_driver", "launcher", "rendezvous", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, text in files.items():
        assert not (ROOT / name).exists()
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / test).with_name("__init__.py").touch()
    lint = [sys.executable, "-m", "ruff", "check", "--no-cache", *files]
    format_ = [sys.executable, "-m", "ruff", "format", "--no-cache", "--check", *files]
    passes = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    for argv in (lint, format_, passes):
        done = subprocess.run(
            argv,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout
