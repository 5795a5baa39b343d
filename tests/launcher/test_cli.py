"""The command as a user meets it: what is printed, where, and the exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher import cli

ROOT = Path(__file__).resolve().parents[2]


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = cli.main(argv)
    out, err = capsys.readouterr()
    return status, out, err


def test_help_version_and_build_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "--help")
    assert (status, err) == (0, "")
    assert out.startswith("usage: elasticrun")
    status, out, err = call(capsys, "--version")
    assert (status, err) == (0, "")
    assert out.startswith("elasticrun ")


def test_check_build_shows_the_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "--check-build")
    assert status == 0
    assert "[X] local" in out
    assert "gloo" in out


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--min-npp", "2", "x.py"),
        ("-H", "host:abc", "sh"),
        ("no-such-script.py",),
        ("no-such-command",),
        ("--host-discovery-script", "/no/such", "sh"),
        ("--config-file", "/no/such.yaml", "sh"),
        ("--min-np", "3", "--max-np", "2", "sh"),
        ("--run-id", "../../etc", "sh"),
    ],
)
def test_a_users_mistake_is_one_line_and_64(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call(capsys, *argv)
    assert (status, out) == (64, "")
    assert err.startswith("elasticrun: ")
    assert len(err.splitlines()) == 1


def test_a_working_folder_that_was_deleted_is_the_users_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    status, _, err = call(capsys, "--state-dir", "state", "true")
    monkeypatch.chdir(tmp_path)
    assert (status, len(err.splitlines())) == (64, 1)
    assert "the working folder has been deleted" in err


def test_a_node_whose_secret_cannot_be_read_waits_for_no_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, shared = tmp_path / "missing", tmp_path / "shared"
    shared.write_text("0123456789abcdef\n")
    shared.chmod(0o644)
    for path, said in ((missing, "does not exist"), (shared, "has mode 0644")):
        status, _, err = call(
            capsys, "--join", "127.0.0.1:1", "--token-file", str(path), "--start-timeout", "0.1"
        )
        assert (status, len(err.splitlines())) == (64, 1)
        assert said in err


def test_hosts_that_can_never_be_enough_are_75_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "-H", "localhost:1", "-np", "2", "sh", "-c", "true")
    assert status == 75
    assert err.startswith("elasticrun: need 2 slots, found 1")


def test_a_dry_run_shows_the_plan_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELASTICRUN_MAX_NP", "4")
    status, out, err = call(
        capsys,
        *("-v", "--dry-run", "--state-dir", "state", "--log-dir", "logs", "-np", "2"),
        *("sh", "-c", "true"),
    )
    assert (status, err) == (0, "")
    assert "command     sh -c true" in out
    assert "--max-np 4  (ELASTICRUN_MAX_NP)" in out
    assert list(tmp_path.iterdir()) == []


def test_a_bug_of_ours_is_70_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> int:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("launcher.run_job.run", broken)
    status, _, err = call(capsys, "x.py")
    assert status == 70
    assert "ZeroDivisionError: oops" in err
    assert "this is a bug of elasticrun, not of your script" in err.splitlines()[-1]


def test_a_reader_that_goes_away_is_no_error() -> None:
    script = f"{sys.executable} -m launcher.cli --help | head -n 1"
    ran = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
