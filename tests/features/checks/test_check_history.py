"""The file with what the checks of all runs have found."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from elastic_driver.features.checks import command as subject
from elastic_driver.features.checks.command import FILE, CheckHistoryFile
from elastic_driver.features.checks.evidence import Measurement, NodeVerdict, Verdict
from elastic_driver.features.checks.report import CheckReport


def report(*names: str) -> CheckReport:
    nodes = [NodeVerdict(n, Verdict.GOOD, "", 1.0, 0.0, (Measurement(n, 1.0, 0.0),)) for n in names]
    return CheckReport(rounds=1, seconds=1.0, nodes=tuple(nodes))


def test_checks_add_up_in_a_file_of_our_own(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(3):
        CheckHistoryFile(tmp_path / "state", said.append).add(report("a", "b"))
    kept = CheckHistoryFile(tmp_path / "state", said.append)
    assert {name: len(past) for name, past in kept.read().nodes.items()} == {"a": 3, "b": 3}
    assert kept.path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "state") == [FILE]
    assert said == []


@pytest.mark.parametrize("written", [b"", b"not json", b'{"nodes": {"a": 7}}', b"[]", b"\xff"])
def test_a_file_that_is_no_history_is_named_and_set_aside(tmp_path: Path, written: bytes) -> None:
    said: list[str] = []
    kept = CheckHistoryFile(tmp_path, said.append)
    kept.path.write_bytes(written)
    kept.add(report("a"))
    assert set(kept.read().nodes) == {"a"}
    (line,) = said
    assert f"{kept.path} is no history of checks" in line
    (aside,) = [name for name in os.listdir(tmp_path) if name != FILE]
    assert aside in line
    assert (tmp_path / aside).read_bytes() == written


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
@pytest.mark.parametrize("link", [False, True])
def test_what_another_user_has_written_is_not_believed(tmp_path: Path, link: bool) -> None:
    said: list[str] = []
    kept = CheckHistoryFile(tmp_path, said.append)
    kept.add(report("a"))
    if link:
        kept.path.rename(tmp_path / "other")
        kept.path.symlink_to(tmp_path / "other")
    os.chown(kept.path, 12345, 12345, follow_symlinks=False)
    assert kept.read().nodes == {}
    (line,) = said
    assert f"cannot read the checks before this one in {kept.path}: it " in line
    assert "12345" in line


def test_a_file_that_is_far_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(subject, "MAX_BYTES", 10)
    kept = CheckHistoryFile(tmp_path, said.append)
    kept.path.write_bytes(b"x" * 11)
    assert kept.read().nodes == {}
    assert "larger than 10 bytes" in said[0]


def test_a_folder_that_cannot_be_had_is_said_and_no_error(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").touch()
    kept = CheckHistoryFile(tmp_path / "file", said.append)
    kept.add(report("a"))
    assert any("cannot keep what the check found" in line for line in said)


def test_runs_that_end_a_check_together_all_leave_it(tmp_path: Path) -> None:
    said: list[str] = []
    names = [f"n{number}" for number in range(8)]
    adding = [
        threading.Thread(target=CheckHistoryFile(tmp_path, said.append).add, args=(report(name),))
        for name in names
    ]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert set(CheckHistoryFile(tmp_path, said.append).read().nodes) == set(names)
    assert said == []


def test_whoever_keeps_the_lock_for_ever_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "LOCK_S", 0.05)
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        kept = CheckHistoryFile(tmp_path, lambda _line: None)
        kept.add(report("a"))
        assert set(kept.read().nodes) == {"a"}
    finally:
        os.close(other)
