from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.agent.processes import ProcessSpec
from launcher.agent.warm.warm_plan import (
    NotWarmable,
    PythonCommand,
    WarmPlan,
    first_path,
    imported_modules,
    make_warm_plan,
    only_standard_library,
    parse_command,
)

ENV = {"PATH": os.pathsep.join([os.path.dirname(sys.executable), "/usr/bin", "/bin"])}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train.py", "-m", "x"], PythonCommand("script", "train.py")),
        (["-u", "-O", "a/train.py"], PythonCommand("script", "a/train.py")),
        (["-m", "pkg.train", "--lr"], PythonCommand("module", "pkg.train")),
        (["-mpkg"], PythonCommand("module", "pkg")),
        (["-uBm", "pkg"], PythonCommand("module", "pkg")),
        (["-W", "error", "-Xdev", "-X", "utf8", "t.py"], PythonCommand("script", "t.py")),
        (["-uWerror", "t.py"], PythonCommand("script", "t.py")),
        (["-c", "pass", "-m"], PythonCommand("code", "pass")),
    ],
)
def test_a_python_command_is_taken_apart_as_python_does(
    arguments: list[str], expected: PythonCommand
) -> None:
    assert parse_command([sys.executable, *arguments], ENV) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            [],
            ["-"],
            ["-i", "t.py"],
            ["-I", "t.py"],
            ["-E", "t.py"],
            ["-uS", "t.py"],
            ["-v", "t.py"],
        ),
        *(["--version"], ["-m"], ["-X", "importtime", "t.py"], ["-Ximporttime", "t.py"], ["-W"]),
    ],
)
def test_flags_that_need_an_interpreter_of_their_own_are_named(arguments: Sequence[str]) -> None:
    with pytest.raises(NotWarmable, match="python"):
        parse_command([sys.executable, *arguments], ENV)


def test_python_is_looked_up_as_the_worker_would(tmp_path: Path) -> None:
    name = os.path.basename(sys.executable)
    assert parse_command([name, "t.py"], ENV).kind == "script"
    with pytest.raises(NotWarmable, match="not found"):
        parse_command([name, "t.py"], {"PATH": str(tmp_path)})
    (tmp_path / name).symlink_to(sys.executable)  # another environment, perhaps
    with pytest.raises(NotWarmable, match="not the Python that runs the agent"):
        parse_command([name, "t.py"], {"PATH": str(tmp_path)})


@pytest.mark.parametrize("program", ["sh", "true", "no-such-program"])
def test_other_programs_are_started_afresh(program: str) -> None:
    assert program == "no-such-program" or shutil.which(program)
    with pytest.raises(NotWarmable, match=program):
        parse_command([program, "x.py"], ENV)


def test_the_first_place_for_modules_is_the_folder_of_the_real_script(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/t.py").touch()
    (tmp_path / "t.py").symlink_to("src/t.py")
    where = str(tmp_path)
    assert first_path(PythonCommand("script", "t.py"), where) == f"{where}/src"
    assert first_path(PythonCommand("script", "src"), where) == f"{where}/src"
    assert first_path(PythonCommand("module", "t"), where) == where
    assert first_path(PythonCommand("code", "pass"), where) is None


# ---- what a program imports --------------------------------------------------------------


def found(folder: Path, target: str = "t.py", kind: str = "script") -> frozenset[str] | None:
    return imported_modules(PythonCommand(kind, target), str(folder))


def test_imports_are_followed_through_files_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import os.path, mine\ndef f():\n    from json import x\n")
    (tmp_path / "mine.py").write_text("from package.part import f\nimport t\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("from . import part\n")
    (tmp_path / "package/part.py").write_text("import torch.nn as nn\n")
    names = {"os", "mine", "json", "package", "t", "torch"}
    assert found(tmp_path) == names
    assert found(tmp_path, "t", "module") == names
    assert not only_standard_library(found(tmp_path))


@pytest.mark.parametrize(
    "source", ["__import__('torch')", "exec(open('x').read())", "x = = 1", "\0", "import importlib"]
)
def test_what_cannot_be_told_is_not_taken_for_the_standard_library(
    tmp_path: Path, source: str
) -> None:
    (tmp_path / "t.py").write_text(source)
    assert not only_standard_library(found(tmp_path))


def test_a_program_that_is_not_found_tells_nothing(tmp_path: Path) -> None:
    assert found(tmp_path) is None
    assert found(tmp_path, "installed.package", "module") is None
    assert found(tmp_path, "import os", "code") is None


def test_a_plain_script_uses_the_standard_library_only(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import os, sys\nfrom time import sleep\n")
    assert only_standard_library(found(tmp_path))


# ---- the plan ----------------------------------------------------------------------------


def planned(folder: Path, **options: object) -> WarmPlan:
    command = (sys.executable, "t.py")
    return make_warm_plan(command, {**ENV, "RANK": "0", "A": "1"}, str(folder), **options)  # type: ignore[arg-type]


def test_nothing_is_kept_warm_for_a_script_that_gains_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import os\n")
    with pytest.raises(NotWarmable, match="standard library"):
        planned(tmp_path)
    assert planned(tmp_path, warm=2).spares == 2
    assert planned(tmp_path, preload=("sqlite3",)).preload == ("sqlite3",)
    with pytest.raises(NotWarmable, match="--warm 0"):
        planned(tmp_path, warm=0)


def test_our_own_modules_are_warm_only_for_programs_that_use_them(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import torch\n")
    assert planned(tmp_path).preload == ("torch",)
    (tmp_path / "t.py").write_text("import torch, elastic_driver as elastic\n")
    assert "elastic_driver.worker.state" in planned(tmp_path).preload
    (tmp_path / "rendezvous.py").write_text("")
    assert planned(tmp_path).preload == ("torch",)


@pytest.mark.parametrize(
    "change",
    [
        {"argv": ("python", "t.py", "-x")},
        {"env": {"A": "2"}},
        {"cwd": "/elsewhere"},
        {"preload": ("torch", "numpy")},
        {"path0": None},
        {"spares": 3},
        {"rehearse": False},
    ],
    ids=lambda change: str(*change),
)
def test_plans_have_equal_digests_if_they_are_equal(
    tmp_path: Path, change: dict[str, object]
) -> None:
    (tmp_path / "t.py").write_text("import torch\n")
    wanted = planned(tmp_path)
    assert wanted.digest() == planned(tmp_path).digest()
    assert wanted.digest() != replace(wanted, **change).digest()  # type: ignore[arg-type]


def test_workers_may_differ_in_what_is_read_late_and_in_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import torch\n")
    wanted = planned(tmp_path)
    assert "RANK" not in wanted.env

    def check(**variables: str) -> None:
        env = {**ENV, "A": "1", **variables}
        wanted.check(ProcessSpec((sys.executable, "t.py"), env, str(tmp_path), 1, 2), 4)

    check(RANK="1", MASTER_PORT="1", ELASTIC_ROUND="3", OMP_NUM_THREADS="1", NCCL_DEBUG="INFO")
    check(TORCHELASTIC_RUN_ID="x", GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="1")
    for name in "PYTHONHASHSEED", "PYTHONPATH", "OMP_PROC_BIND", "LD_PRELOAD", "A":
        with pytest.raises(NotWarmable, match=name):
            check(**{name: "2"})
    check(OMP_NUM_THREADS="4")
    for number in "0", "5", "4,1":
        with pytest.raises(NotWarmable, match="OMP_NUM_THREADS differs"):
            check(OMP_NUM_THREADS=number)
