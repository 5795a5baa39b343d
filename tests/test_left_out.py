"""A run says which tests it left out, and fails where all parts are required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.job import ROOT
from tests.support.left_out import VARIABLE

TESTS = """
import pytest

def test_runs(): pass

@pytest.mark.skipif(True, reason="no NVIDIA GPU is visible")
def test_of_a_gpu(): pass

@pytest.mark.xfail
def test_known_to_fail(): assert False
"""
MISSING = """
import pytest

def test_of_slurm(): pytest.skip("not installed: slurmctld")
"""
WHOLE_FILE = "import pytest\npytest.importorskip('no_such_module')\n"


def run(
    folder: Path, require: str = "", *options: str, **files: str
) -> subprocess.CompletedProcess[str]:
    """Run pytest with the plugin on files of these contents."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    dropped = ("PYTEST", VARIABLE)
    env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.left_out", *options]
    return subprocess.run(
        [*argv, str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={**env, "PYTHONPATH": str(ROOT), **({VARIABLE: require} if require else {})},
    )


def test_without_the_variable_a_run_passes_and_lists_what_it_left_out(tmp_path: Path) -> None:
    done = run(tmp_path, some=TESTS, missing=MISSING, whole=WHOLE_FILE)
    assert done.returncode == 0, done.stdout
    assert "tests that were left out" in done.stdout
    assert "   1  no NVIDIA GPU is visible" in done.stdout
    assert "   1  not installed: slurmctld" in done.stdout
    assert "   1  could not import 'no_such_module'" in done.stdout
    assert "tests/install-parts.sh, run as root, installs what is missing." in done.stdout


def test_nothing_is_said_where_nothing_was_left_out(tmp_path: Path) -> None:
    done = run(tmp_path, "all", some="def test_runs(): pass\n")
    assert done.returncode == 0, done.stdout
    assert "left out" not in done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "2", "--dist", "loadfile")], ids=["one", "xdist"])
@pytest.mark.parametrize("text", [MISSING, WHOLE_FILE], ids=["test", "file"])
def test_a_missing_part_fails_the_run_where_all_are_required(
    tmp_path: Path, text: str, options: tuple[str, ...]
) -> None:
    done = run(tmp_path, "all", *options, some=TESTS, missing=text)
    assert done.returncode == 1, done.stdout
    assert f"missing, although {VARIABLE}=all" in done.stdout
    named = done.stdout.partition("missing, although")[2]
    assert "test_missing.py" in named
    assert "NVIDIA" not in named


def test_what_is_on_the_list_may_be_skipped_where_all_parts_are_required(tmp_path: Path) -> None:
    done = run(tmp_path, "all", some=TESTS)
    assert done.returncode == 0, done.stdout
    assert "1 xfailed" in done.stdout


def test_another_failure_keeps_its_exit_status(tmp_path: Path) -> None:
    done = run(tmp_path, "all", missing=MISSING, broken="import no_such_module\n")
    assert done.returncode == 2, done.stdout


def test_an_unknown_wish_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "slurm", some=TESTS)
    assert done.returncode == 4
    assert "ELASTIC_TEST_REQUIRE is 'slurm'; it is 'all' or not set" in done.stderr
