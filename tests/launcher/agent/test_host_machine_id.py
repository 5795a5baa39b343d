"""What tells one machine from another, and what does not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.agent import host as module
from launcher.agent.host import machine_id
from tests.support.job import ROOT

SAY = "from launcher.agent.host import machine_id; print(machine_id('a'))"


def test_all_names_of_a_machine_say_the_same() -> None:
    first = machine_id("node1")
    assert len(first) == 32
    assert {machine_id(name) for name in ("NODE1", "10.0.0.1", "localhost", "127.0.0.1")} == {first}


def test_further_loopback_addresses_are_hosts_on_purpose() -> None:
    assert machine_id("127.0.0.2") == ""


@pytest.mark.parametrize("fact", ["_BOOT_ID", "_MACHINE_ID"])
def test_another_boot_or_another_installation_is_another_machine(
    fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = machine_id("a")
    (tmp_path / "id").write_text("another\n")
    monkeypatch.setattr(module, fact, tmp_path / "id")
    assert machine_id("a") not in ("", before)


def test_another_address_or_name_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine_id("a")
    monkeypatch.setattr(module, "default_address", lambda: "192.0.2.7")
    other = machine_id("a")
    monkeypatch.setattr(module.socket, "gethostname", lambda: "copy")
    assert len({before, other, machine_id("a")}) == 3


def test_a_machine_without_a_boot_id_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "nothing")
    assert machine_id("a") == ""


@pytest.mark.parametrize("space", ["--net", "--uts", "--pid"])
def test_containers_on_one_machine_are_machines_of_their_own(space: str) -> None:
    unshare = ["unshare", space, *(["--mount-proc"] if space == "--pid" else []), "--fork"]
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    if subprocess.run([*unshare, "true"], check=False).returncode != 0:
        pytest.skip("this machine lets us make no namespaces")
    say = [sys.executable, "-c", SAY]
    done = subprocess.run([*unshare, *say], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() not in ("", machine_id("a"))
