"""What a dead process left is told from what a live one uses, by the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from launcher.agent.host.held_folder import BEGINNING_S, held_folder, holder_of, sweep

HOLD = """
import sys
from pathlib import Path
from launcher.agent.host.held_folder import held_folder
with held_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the folder until its stdin closes."""
    argv = [sys.executable, "-c", HOLD, str(folder)]
    holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_folder_is_this_users_alone_and_gone_in_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    with held_folder(folder):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_only_what_a_killed_process_left_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    used, left, fresh = (tmp_path / f"x-{name}" for name in ("used", "left", "fresh"))
    fresh.mkdir()  # whose holder has not come to lock it yet
    with hold(used) as living, hold(left) as killed:
        assert (holder_of(used), holder_of(left)) == (living.pid, killed.pid)
        killed.kill()
        killed.wait()
        sweep("x-")
        assert sorted(os.listdir(tmp_path)) == ["x-fresh", "x-used"]
        assert holder_of(used) == living.pid
        living.communicate("")
    assert sorted(os.listdir(tmp_path)) == ["x-fresh"]


def test_a_folder_that_is_just_being_made_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    enough = threading.Event()

    def look_for_leftovers() -> None:
        while not enough.is_set():
            sweep("x-")

    others = [threading.Thread(target=look_for_leftovers) for _ in range(2)]
    for other in others:
        other.start()
    try:
        for number in range(100):
            with held_folder(tmp_path / f"x-{number}"):
                assert (tmp_path / f"x-{number}").is_dir(), f"swept, after {number} that were not"
    finally:
        enough.set()
        for other in others:
            other.join()
    assert not os.listdir(tmp_path)


def test_a_folder_whose_process_was_killed_before_it_could_hold_it_is_swept_when_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("x-empty", "x-begun", "x-full"):
        (tmp_path / name).mkdir()
    (tmp_path / "x-begun" / "keeper.begun").touch()
    (tmp_path / "x-full" / "something").touch()
    long_ago = time.time() - 2 * BEGINNING_S
    for folder in tmp_path.iterdir():
        os.utime(folder, (long_ago, long_ago))
    sweep("x-")
    assert os.listdir(tmp_path) == ["x-full"]  # no way to know whose that is
