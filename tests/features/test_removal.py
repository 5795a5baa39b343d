"""Without its folder a feature is not there; the rest is imported, trains and passes its tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("elastic_driver", "launcher", "rendezvous")
IMPORT_ALL = """
import importlib, pathlib, sys
left_out = {"__main__", "sitecustomize"}  # they run when they are imported
for package in sys.argv[1:]:
    for file in sorted(pathlib.Path(package).rglob("*.py")):
        module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        if file.stem not in left_out and not file.stem.startswith("_elastic"):
            found = importlib.import_module(module)
            assert pathlib.Path(found.__file__).is_relative_to(pathlib.Path.cwd()), found
            print(module)
"""
TRAIN = "from launcher.cli import main; main()"
REST = ("tests/kernel", "tests/job")


def run(copy: Path, *argv: str) -> str:
    """Run Python in the copy of the tree, and return what it prints; it has to succeed."""
    env = {**os.environ, "PYTHONPATH": str(copy), "STEPS": "20"}
    env["STEP_RECORDS"] = str(copy / "records")
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=copy,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def without(feature: str, tmp_path: Path) -> None:
    """Make a copy of the tree without a feature; all its modules are imported, and a job trains."""
    for name in (*PACKAGES, "tests", "examples", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg"):
        shutil.copy(ROOT / name, tmp_path / name)
    folder = Path("elastic_driver", "features", feature)
    shutil.rmtree(tmp_path / folder)
    shutil.rmtree(tmp_path / "tests" / "features" / feature)

    imported = run(tmp_path, "-c", IMPORT_ALL, *PACKAGES).split()
    assert len(imported) > 100
    assert not [module for module in imported if f"features.{feature}" in module]
    (tmp_path / "records").mkdir()
    options = ("-np", "2", "--state-dir", str(tmp_path / "state"))
    script = str(tmp_path / "tests" / "e2e" / "jobs" / "train.py")
    run(tmp_path, "-c", TRAIN, *options, script)


@pytest.mark.parametrize("feature", ["page", "statistics", "stragglers", "telemetry"])
def test_without_its_folder_the_rest_is_imported_and_trains(feature: str, tmp_path: Path) -> None:
    without(feature, tmp_path)


@pytest.mark.parametrize("feature", ["checks", "shards", "tensorflow"])
def test_without_a_machine_the_tests_of_the_others_pass_too(feature: str, tmp_path: Path) -> None:
    without(feature, tmp_path)
    named = f"features.{feature}"
    tests = [file for part in REST for file in sorted(tmp_path.glob(f"{part}/test_*.py"))]
    rest = [str(file) for file in tests if named not in file.read_text()]
    assert len(rest) > 20
    run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not night", *rest)
