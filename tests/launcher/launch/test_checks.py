"""What is found out before anything starts: commands, scripts, folders, names in our way."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from launcher.launch.checks import check_plan
from launcher.launch.host_source import Facts, MachineFacts
from launcher.launch.plan import make_plan
from launcher.options.given import resolve
from tests.support.permissions import where_permissions_apply

ENVIRON = {"PATH": os.environ.get("PATH", os.defpath)}


def check(folder: Path, *argv: str, create: bool = False, **environ: str) -> None:
    machine, here = MachineFacts(2, 0), str(folder)
    facts = Facts("run", here, here, sys.executable, machine, environ={**ENVIRON, **environ})
    check_plan(make_plan(resolve(argv, {}), facts), create=create)


def refused(folder: Path, *argv: str, create: bool = False, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        check(folder, *argv, create=create, **environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hi')\n")
    (tmp_path / "find.sh").write_text("#!/bin/sh\necho localhost\n")
    (tmp_path / "find.sh").chmod(0o755)
    return tmp_path


# ---- commands ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ("train.py",),
        ("-m", "json.tool"),
        ("-m", "train"),
        ("sh", "-c", "true"),
        (sys.executable, "train.py"),
        (sys.executable, "-c", "pass"),
        ("./find.sh",),
    ],
)
def test_a_command_that_can_run_is_let_through(folder: Path, command: tuple[str, ...]) -> None:
    check(folder, "--", *command)


def test_a_missing_script_is_named_with_the_folder(folder: Path) -> None:
    assert f"the script trian.py does not exist in {folder}" in refused(folder, "trian.py")
    assert "trian.py does not exist" in refused(folder, sys.executable, "trian.py")


def test_a_folder_is_no_script(folder: Path) -> None:
    (folder / "dir.py").mkdir()
    assert "dir.py is a folder" in refused(folder, "dir.py")


def test_a_missing_command_says_where_to_look(folder: Path) -> None:
    assert "the command nosuch was not found; check PATH" in refused(folder, "nosuch")
    assert "did you mean ./find.sh?" in refused(folder, "find.sh")
    assert "the command ./nosuch does not exist" in refused(folder, "./nosuch")
    assert "is a folder" in refused(folder, "./")


def test_a_command_is_looked_for_on_the_workers_path(folder: Path) -> None:
    check(folder, "--env", f"PATH={folder}", "find.sh")


def test_a_file_that_is_not_executable_says_what_to_do(folder: Path) -> None:
    (folder / "find.sh").chmod(0o644)
    assert "try chmod +x ./find.sh" in refused(folder, "./find.sh")


def test_a_module_that_is_nowhere_is_told_before_it_fails_on_every_rank(folder: Path) -> None:
    assert "there is no module nosuch" in refused(folder, "-m", "nosuch.train")


def test_a_module_on_pythonpath_is_found(folder: Path) -> None:
    (folder / "lib").mkdir()
    (folder / "lib" / "far.py").touch()
    check(folder, "-m", "far", PYTHONPATH="lib")


# ---- names in our way --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rendezvous.py", "elastic_driver.py"])
def test_a_file_beside_the_script_that_takes_our_place_is_refused(folder: Path, name: str) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "train.py").touch()
    (folder / "sub" / name).touch()
    said = refused(folder, "sub/train.py")
    assert str(folder / "sub" / name) in said
    assert f"rename it, for instance to my_{name}" in said


def test_a_package_in_the_current_folder_is_refused_for_a_module(folder: Path) -> None:
    (folder / "rendezvous").mkdir()
    (folder / "rendezvous" / "__init__.py").touch()
    assert str(folder / "rendezvous") in refused(folder, "-m", "train")


def test_a_launcher_beside_the_script_is_the_users_own_affair(folder: Path) -> None:
    (folder / "launcher.py").touch()
    check(folder, "train.py")


def test_a_folder_without_code_and_another_programs_folder_are_no_trouble(folder: Path) -> None:
    (folder / "rendezvous").mkdir()
    check(folder, "train.py")
    (folder / "rendezvous.py").touch()
    check(folder, "sh", "-c", "true")


def test_a_shadow_on_pythonpath_counts_unless_ours_comes_first(folder: Path) -> None:
    (folder / "lib").mkdir()
    (folder / "lib" / "rendezvous.py").touch()
    ours = Path(__file__).resolve().parents[3]
    assert "lib/rendezvous.py" in refused(folder, "train.py", PYTHONPATH="lib")
    check(folder, "train.py", PYTHONPATH=f"{ours}:lib")


# ---- files -------------------------------------------------------------------------------


def test_a_discovery_script_must_be_there_and_executable(folder: Path) -> None:
    argv = ("--host-discovery-script", "./find.sh", "train.py")
    check(folder, *argv)
    (folder / "find.sh").chmod(0o644)
    assert "is not executable; try chmod +x" in refused(folder, *argv)
    (folder / "find.sh").unlink()
    assert "does not exist" in refused(folder, *argv)
    (folder / "find.sh").mkdir()
    assert "is a folder" in refused(folder, *argv)


def test_the_log_folder_is_made_only_when_asked(folder: Path) -> None:
    check(folder, "--log-dir", "a/b", "train.py")
    assert not (folder / "a").exists()
    check(folder, "--log-dir", "a/b", "train.py", create=True)
    assert list((folder / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("create", [True, False])
def test_a_log_folder_below_a_file_is_refused(folder: Path, create: bool) -> None:
    said = refused(folder, "--log-dir", "train.py/logs", "train.py", create=create)
    assert "cannot write to the log folder" in said
    assert "choose another --log-dir" in said


@pytest.mark.parametrize("create", [True, False])
def test_a_read_only_log_folder_is_refused(folder: Path, create: bool) -> None:
    (folder / "logs").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    argv = ("--log-dir", "logs", "train.py")
    said = where_permissions_apply(lambda: refused(folder, *argv, create=create))
    assert "Permission denied" in said


def test_a_listed_host_that_is_another_machine_is_told_before_it_is_tried(folder: Path) -> None:
    check(folder, "--backend", "local", "-H", "localhost:1,127.0.0.2:1", "train.py")
    check(folder, "--backend", "local", "-H", "localhost:1,elsewhere.invalid:0", "train.py")
    said = refused(
        folder, "--backend", "local", "-H", "localhost:1,elsewhere.invalid:1", "train.py"
    )
    assert "elsewhere.invalid is not this machine" in said


# ---- this machine ------------------------------------------------------------------------


def test_an_unknown_interface_is_told_with_those_there_are(folder: Path) -> None:
    check(folder, "--network-interfaces", "lo", "train.py")
    said = refused(folder, "--network-interfaces", "lo,wat7", "train.py")
    assert "there is no network interface wat7 here; there are " in said
    assert "lo" in said.partition("there are")[2]
