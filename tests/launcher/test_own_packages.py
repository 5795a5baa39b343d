"""elasticrun starts beside files that carry our packages' names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.edge import ROOT

MAIN = "import launcher.cli, sys; sys.exit(launcher.cli.main(sys.argv[1:]))"


@pytest.mark.parametrize("name", ["rendezvous.py", "elastic_driver.py"])
def test_a_file_in_the_current_folder_does_not_keep_elasticrun_from_saying_so(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("raise SystemExit('the wrong one was imported')\n")
    (tmp_path / "train.py").touch()
    # As with `python -m` and the current folder on PYTHONPATH: it comes before ours.
    bootstrap = f"import sys; sys.path.insert(1, {str(ROOT)!r}); {MAIN}"
    ran = subprocess.run(
        [sys.executable, "-c", bootstrap, "--dry-run", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 64, ran.stderr
    assert ran.stderr.startswith(f"elasticrun: {tmp_path / name} would be imported")
    assert len(ran.stderr.splitlines()) == 1
