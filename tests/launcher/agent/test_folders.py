"""What a dead process left is told from what a live one uses, by the kernel."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from elastic_driver.runtime.run_dir import Holder, _start_of
from launcher.agent import remote
from launcher.agent.folders import (
    BEGINNING_S,
    held_folder,
    holder_of,
    scratch_folder,
    sweep,
    sweep_scratch,
    wait_for_holder,
)

HOLD = """
import sys
from pathlib import Path
from launcher.agent.folders import held_folder
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


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any agent."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("trick", ["owner", "mode", "file", "link", "fifo", "start", "nonsense"])
def test_a_lock_file_of_somebody_else_names_no_process_that_could_be_killed(
    trick: str,
    stranger: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = remote.folder_of("job.1")
    real = folder.with_name("elsewhere") if trick == "link" else folder
    real.mkdir(mode=0o700)
    lock = real / "keeper"
    started = 1 if trick == "start" else _start_of(stranger.pid)
    holder = msgspec.structs.replace(Holder.this_process(), pid=stranger.pid, started=started)
    if trick == "fifo":
        os.mkfifo(lock)
    else:
        lock.write_bytes(b"7" if trick == "nonsense" else msgspec.json.encode(holder))
    if trick == "link":
        folder.symlink_to(real)
    if trick == "mode":
        real.chmod(0o777)
    if trick in ("owner", "file"):
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(lock if trick == "file" else real, 65534, 65534)
    with open(lock, "rb" if trick != "fifo" else "r+b", buffering=0) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert holder_of(folder) is None
        assert remote.end("job.1") == 0
        wait_for_holder(folder)  # at once
    assert stranger.poll() is None


def test_a_live_holder_is_killed_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with hold(remote.folder_of("job.1")) as holder:
        assert remote.end("job.1") == 0
        assert holder.wait(30) == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


SCRATCH = """
from launcher.agent.folders import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    input()
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a short name, as temporary folders have."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_it_goes_with_all_that_is_in_it(temporary: Path) -> None:
    with scratch_folder() as folder:
        assert folder is not None
        Path(folder, "listener-abcdefgh").touch()
        assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert list(temporary.iterdir()) == []


def test_where_none_can_be_made_workers_make_their_own(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary / ("d" * 90)  # no socket's name would fit below it
    deep.mkdir()
    for folder in (deep, temporary / "missing"):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with scratch_folder() as made:
            assert made is None
    assert list(deep.iterdir()) == []


def test_what_a_killed_agent_left_is_swept_and_what_a_live_one_holds_is_not(
    temporary: Path,
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", SCRATCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        folder = Path(holder.stdout.readline().strip())
        sweep_scratch()
        assert folder.is_dir()
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    sweep_scratch()
    assert list(temporary.iterdir()) == []
