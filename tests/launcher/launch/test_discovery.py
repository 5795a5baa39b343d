"""Sources of hosts by name: ours, and one of a package that is installed beside us."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import cli
from tests.support.job import elasticrun

_DISCOVERY = """
from elastic_driver.errors import UsageError

class Rack:
    def __init__(self, argument, *, default_slots, timeout):
        if not argument:
            raise UsageError("name a rack: --host-discovery rack:NAME")
        self.argument, self.slots = argument, default_slots
    def find(self):
        return tuple((host, self.slots) for host in self.argument.split("+"))
    def cancel(self):
        pass

def broken(argument, **_):
    raise RuntimeError("no rack here")
"""
_ENTRY_POINTS = "[elastic_driver.discovery]\nrack = my_racks:Rack\nbroken = my_racks:broken\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with an installed package of the user's own."""
    folder = tmp_path / "site"
    info = folder / "my_racks-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "my_racks.py").write_text(_DISCOVERY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-racks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    return folder


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(package))
    yield
    sys.modules.pop("my_racks", None)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = cli.main(argv)
    out, err = capsys.readouterr()
    return status, out, err


def test_a_job_runs_on_the_hosts_of_a_discovery_of_ones_own(package: Path) -> None:
    argv = ("--host-discovery", "rack:localhost+127.0.0.2", "-np", "2", "--backend", "local")
    with elasticrun(*argv, "sh", "-c", "true", env={"PYTHONPATH": str(package)}) as job:
        assert job.wait(90) == 0, job.describe()
        found = [event["host"] for event in job.events("host_discovered")]
        assert found == ["localhost", "127.0.0.2"], job.describe()


@pytest.mark.usefixtures("installed")
def test_a_dry_run_names_it_and_asks_it_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--host-discovery", "rack:r7", "--dry-run", "true")
    assert (status, err) == (0, "")
    assert "hosts       found by rack:r7\n" in out
    assert "agent       on HOST: ssh " in out


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("rack", "name a rack: --host-discovery rack:NAME"),
        ("broken:x", "--host-discovery broken:x: RuntimeError: no rack here"),
        ("rick:x", "--host-discovery rick: did you mean rack?"),
        ("script:./none.sh", "the discovery script ./none.sh does not exist"),
        ("hostfile:none", "cannot read the hostfile none: No such file"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_discovery_that_cannot_work_is_one_line(
    source: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "--host-discovery", source, "--dry-run", "true")
    assert (status, out, len(err.splitlines())) == (64, "", 1)
    assert said in err


def test_ours_by_name_are_those_with_options_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts, script = tmp_path / "hosts", tmp_path / "find.sh"
    hosts.write_text("localhost slots=3\n")
    script.write_text("#!/bin/sh\necho localhost\n")
    script.chmod(0o755)
    for name, own, path in (
        ("hostfile", "--hostfile", hosts),
        ("script", "--host-discovery-script", script),
    ):
        same = ("--run-id", "r", "--dry-run", "true")
        named = run(capsys, "--host-discovery", f"{name}:{path}", *same)
        assert named == run(capsys, own, str(path), *same)
        assert named[0] == 0


def test_two_sources_of_hosts_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "--host-discovery", "script:x", "-H", "a:1", "true")
    assert status == 64
    assert "--host-discovery and --hosts both say where to run" in err
