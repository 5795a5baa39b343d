"""Backends by name: ours, and one of a package that is installed beside us."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from elastic_driver.runtime.backend import BackendJob
from launcher import cli
from launcher.backends import base as registry
from tests.support.job import elasticrun

_BACKEND = """
import shlex, subprocess, sys
from elastic_driver.runtime.backend import Backend
from launcher.backends.base import AgentPlan
from launcher.backends.local import LocalBackend

class Inside(LocalBackend):
    def plan(self, host, incarnation):
        plan = super().plan("localhost", incarnation)
        argv = [host if word == "localhost" else word for word in plan.argv]
        return AgentPlan(host, incarnation, tuple(argv), plan.env)

class Boxes(Backend):
    '''Runs the agent of every "box" on this machine, as the local backend does.'''
    def __init__(self, job):
        self.inner = Inside(job.endpoint, job.token_file)
    def start(self, host, incarnation, on_lost):
        print(f"boxes: opening {host}", file=sys.stderr, flush=True)
        self.inner.start(host, incarnation, on_lost)
    def kill(self, host, incarnation):
        self.inner.kill(host, incarnation)
    def close(self, grace):
        self.inner.close(grace)
    def describe(self, host):
        return f"box open {host}"

class Silent(Boxes):
    describe = Backend.describe

class Broken:
    def __new__(cls, job):
        raise RuntimeError("no boxes")
"""
_ENTRY_POINTS = """[elastic_driver.backends]
boxes = my_boxes:Boxes
silent = my_boxes:Silent
gone = no_such_module:Backend
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with an installed package of the user's own."""
    folder = tmp_path / "site"
    (folder / "my_boxes-1.0.dist-info").mkdir(parents=True)
    (folder / "my_boxes.py").write_text(_BACKEND)
    (folder / "my_boxes-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: my-boxes\nVersion: 1.0\n"
    )
    (folder / "my_boxes-1.0.dist-info" / "entry_points.txt").write_text(_ENTRY_POINTS)
    return folder


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(package))
    yield
    sys.modules.pop("my_boxes", None)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = cli.main(argv)
    out, err = capsys.readouterr()
    return status, out, err


def test_ours_are_registered_like_any_other() -> None:
    assert {"auto", "local", "ssh", "slurm", "mpi"} <= set(registry.entry_points(registry.BACKENDS))
    for name in ("auto", "local", "ssh", "slurm", "mpi"):
        registry.make_backend(name, BackendJob(allocation="17"))


def test_a_checkout_needs_no_metadata_and_an_installation_no_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    point = registry.metadata.EntryPoint("ssh", "launcher.backends.shells:make_ssh", "x")
    known = registry.entry_points(registry.BACKENDS)

    def not_installed(_name: str) -> None:
        raise registry.metadata.PackageNotFoundError

    monkeypatch.setattr(registry.metadata, "entry_points", lambda **_: ())
    monkeypatch.setattr(registry.metadata, "distribution", not_installed)
    assert known["ssh"].value == point.value
    registry.make_backend("ssh", BackendJob())
    monkeypatch.setattr(registry, "PACKAGE_ROOT", tmp_path)
    with pytest.raises(UsageError, match="--backend ssh: "):
        registry.make_backend("ssh", BackendJob())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("slrum", "--backend slrum: did you mean slurm?"),
        ("kubernetes", "--backend kubernetes: there are auto, "),
        ("ray", "--backend ray: it does not exist yet; use ssh"),
        ("gone", "--backend gone: no_such_module:Backend cannot be imported"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_name_that_nothing_is_registered_under_is_one_line(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "--backend", name, "--dry-run", "true")
    assert (status, out, len(err.splitlines())) == (64, "", 1)
    assert said in err


@pytest.mark.usefixtures("installed")
def test_a_dry_run_shows_what_a_backend_of_ones_own_would_do_on_every_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hosts = ("-H", "red:2,blue:1")
    status, out, err = run(capsys, "--backend", "boxes", "--dry-run", *hosts, "true")
    assert (status, err) == (0, "")
    assert "backend     boxes" in out
    assert "agent       on red: box open red\nagent       on blue: box open blue\n" in out
    _, out, _ = run(capsys, "--backend", "silent", "--dry-run", *hosts, "true")
    assert "agent       on red: an agent for red, started by Silent\n" in out


def test_a_dry_run_shows_what_ours_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--dry-run", "-H", "localhost:1,far.invalid:1", "true")
    assert status == 0
    lines = [line for line in out.splitlines() if line.startswith("agent ")]
    assert "on localhost: " in lines[0]
    assert " -m launcher.agent --endpoint http://ADDRESS:PORT --host localhost " in lines[0]
    assert "on far.invalid: ssh -T " in lines[1]
    assert "-- far.invalid " in lines[1]


def test_a_job_runs_on_a_backend_of_ones_own(package: Path) -> None:
    argv = ("--backend", "boxes", "-H", "red:1,blue:1", "sh", "-c", "echo $ELASTIC_HOSTNAME")
    with elasticrun(*argv, env={"PYTHONPATH": str(package)}) as job:
        assert job.wait(90) == 0, job.describe()
        assert {"red", "blue"} <= set(job.stdout.replace("\n", ":").split(":")), job.describe()
        assert "boxes: opening red" in job.stderr


def test_check_build_names_every_backend(package: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "--check-build"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(package)},
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "[X] boxes\n" in ran.stdout
    assert "[ ] gone (--backend gone: " in ran.stdout
