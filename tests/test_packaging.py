"""The wheel holds our three packages and nothing else, and works where it is installed."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("elastic_driver", "launcher", "rendezvous")
FILES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def call(*argv: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    ran = subprocess.run(
        [str(word) for word in argv],
        check=False,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder of the checkout gets in or is left behind."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel in it; dependencies are borrowed from this one."""
    home = tmp_path_factory.mktemp("venv")
    call(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    python = home / "bin" / "python"
    ours = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})["purelib"]
    borrowed = [*site.getsitepackages()]
    # Plain path lines: packages are found there, but no .pth file of that folder is run, so
    # the checkout does not come in by way of an editable installation.
    (Path(ours) / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python)
    call(
        *pip,
        "install",
        "--no-deps",
        "--no-index",
        "--force-reinstall",
        "--ignore-installed",
        "--quiet",
        wheel,
        cwd=home,
    )
    return home


def clean_environment() -> dict[str, str]:
    dropped = ("PYTHON", "ELASTIC", "PYTEST")
    return {k: v for k, v in os.environ.items() if not k.startswith(dropped)}


def test_the_wheel_holds_exactly_our_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {
        *SOURCES,
        "elastic_driver-0.1.0.dist-info",
    }
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]
    for package in SOURCES:
        assert f"{package}/py.typed" in names
        sources = {str(p.relative_to(ROOT)) for p in (ROOT / package).rglob("*.py")}
        assert sources <= set(names)
    page = {str(p.relative_to(ROOT)) for p in (ROOT / "elastic_driver" / "page").iterdir()}
    assert "elastic_driver/page/index.html" in page
    assert page <= set(names)


def test_the_metadata_says_licence_python_and_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        assert any(n.endswith("/licenses/LICENSE") for n in archive.namelist())
    assert metadata["Name"] == "elastic-driver"
    assert "Apache-2.0" in (metadata["License-Expression"] or metadata["License"])
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"torch", "dev", "examples", "mpi"} <= set(metadata.get_all("Provides-Extra") or [])


def test_elasticrun_works_where_it_is_installed_from_any_folder(
    installed: Path, tmp_path: Path
) -> None:
    command = installed / "bin" / "elasticrun"
    env = clean_environment()
    assert call(command, "--version", cwd=tmp_path, env=env) == "elasticrun 0.1.0\n"
    where = "import elastic_driver, launcher; print(elastic_driver.__file__, launcher.__file__)"
    found = call(installed / "bin" / "python", "-c", where, cwd=tmp_path, env=env)
    assert found.count(str(installed)) == 2, "the checkout is not what was tested"
    state = ("--warm", "0", "--state-dir", tmp_path / "state")
    script = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    python = installed / "bin" / "python"
    said = call(command, *state, "-np", "1", "--", python, "-c", script, cwd=tmp_path, env=env)
    assert "[0]<stdout>:rank 0 of 1" in said


def test_every_direct_dependency_is_pinned_and_explained() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    wanted = {requirement_name(line) for text in lists for line in text.split("\n") if line.strip()}
    pinned = {
        requirement_name(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    assert wanted == pinned
    explained = (ROOT / "docs" / "dependencies.md").read_text().lower()
    assert not [name for name in sorted(wanted) if f"`{name}`" not in explained]


def requirement_name(line: str) -> str:
    head = line.strip()
    for mark in "<>=;![ ":
        head = head.partition(mark)[0]
    return head.lower().replace("_", "-")


def test_the_lowest_python_is_the_same_everywhere() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["ruff"]["target-version"] == "py310"
    assert tools["mypy"]["python_version"] == "3.10"


def test_extras_bring_what_statistics_need() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    assert "sqlalchemy" in extras["brain"]
    assert "psycopg" in extras["postgres"]
