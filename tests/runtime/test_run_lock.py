"""One driver at a time uses a run's folder: on this machine, after a restart, and on another."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.runtime import run_dir as run_lock
from elastic_driver.runtime.run_dir import EXPIRES_S, Holder, RunDir

HOLD = """
import sys
from pathlib import Path
from elastic_driver.runtime.run_dir import RunDir
run_dir = RunDir(Path(sys.argv[1]), "run")
run_dir.create()
run_dir.write_endpoint("http://127.0.0.1:1", now=0.0)
run_dir.token_file.write_text("secret")
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def driver(state_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the run's folder as a driver does."""
    argv = [sys.executable, "-c", HOLD, str(state_dir)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def left_by(run_dir: RunDir, **changes: object) -> Holder:
    """Write the lock of a driver that has died, with these facts about it."""
    here = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    facts = {"host": os.uname().nodename, "boot_id": here, "pid": os.getpid(), "started": 1}
    holder = Holder(**{**facts, **changes})  # type: ignore[arg-type]
    run_dir.path.mkdir(parents=True, exist_ok=True)
    run_dir.lock.path.write_bytes(msgspec.json.encode(holder) + b"\n")
    run_dir.token_file.write_text("secret")
    return holder


def test_a_folder_is_refused_while_a_driver_lives_and_taken_when_it_was_killed(
    tmp_path: Path,
) -> None:
    run_dir = RunDir(tmp_path, "run")
    with driver(tmp_path) as other:
        with pytest.raises(
            UsageError, match=f"in use by process {other.pid} .http://127"
        ) as caught:
            run_dir.create()
        assert "\n" not in str(caught.value)
        assert run_dir.token_file.read_text() == "secret"  # nothing of the live driver is touched
        other.kill()
        other.wait()
    run_dir.create()
    assert run_dir.lock.former is not None
    assert run_dir.lock.former.pid == other.pid
    run_dir.close()
    assert list(run_dir.path.iterdir()) == []


def test_a_driver_that_is_stopped_still_holds_its_folder_and_the_line_says_what_to_do(
    tmp_path: Path,
) -> None:
    with driver(tmp_path) as other:
        other.send_signal(signal.SIGSTOP)
        while "State:\tT" not in Path(f"/proc/{other.pid}/status").read_text():
            time.sleep(0.01)
        with pytest.raises(UsageError, match=f"it is stopped: .*kill -CONT {other.pid}"):
            RunDir(tmp_path, "run").create()


def test_a_killed_driver_is_dead_though_its_parent_has_not_taken_note(tmp_path: Path) -> None:
    with driver(tmp_path) as process:
        first = RunDir(tmp_path, "run").lock.path.read_bytes().partition(b"\n")[0]
        holder = msgspec.json.decode(first, type=Holder)
        assert holder.lives
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not holder.lives


def test_two_drivers_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path, "run"), RunDir(tmp_path, "run")
    first.create()
    first.create()
    with pytest.raises(UsageError, match=f"in use by process {os.getpid()}"):
        second.create()
    first.close()
    second.create()
    second.close()


def test_after_a_restart_of_the_machine_a_process_of_the_same_number_is_no_driver(
    tmp_path: Path,
) -> None:
    run_dir = RunDir(tmp_path, "run")
    left_by(run_dir, boot_id="an earlier boot", pid=1)
    run_dir.create()
    run_dir.close()


def test_a_driver_on_another_machine_keeps_its_folder_and_its_token_while_it_renews_its_lock(
    tmp_path: Path,
) -> None:
    run_dir = RunDir(tmp_path, "run")
    left_by(run_dir, host="far", boot_id="of far", pid=77)
    with pytest.raises(ClusterError, match=r"process 77 of host far.* if far is gone for good"):
        run_dir.create()
    assert run_dir.token_file.exists()
    long_ago = time.time() - EXPIRES_S - 1
    os.utime(run_dir.lock.path, (long_ago, long_ago))
    run_dir.create()
    assert not run_dir.token_file.exists()
    run_dir.close()


def test_a_lock_whose_time_is_in_the_future_is_counted_from_now(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "run")
    left_by(run_dir, host="far", boot_id="of far", pid=77)
    tomorrow = time.time() + 86400
    os.utime(run_dir.lock.path, (tomorrow, tomorrow))
    with pytest.raises(ClusterError, match=f"try again in {EXPIRES_S:.0f} s"):
        run_dir.create()
    assert run_dir.lock.path.stat().st_mtime < tomorrow - 3600


def test_a_driver_that_could_not_go_on_leaves_the_name_of_the_one_before_it(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "run")
    former = left_by(run_dir, pid=77)
    for _attempt in range(2):
        run_dir.take()
        assert run_dir.lock.former == former
        run_dir.leave()


def test_the_holder_renews_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "RENEW_S", 0.01)
    run_dir = RunDir(tmp_path, "run")
    run_dir.create()
    os.utime(run_dir.lock.path, (0, 0))
    deadline = time.monotonic() + 20
    while run_dir.lock.path.stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run_dir.close()


def test_a_driver_whose_lock_was_taken_hears_of_it_and_leaves_the_files_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "RENEW_S", 0.01)
    run_dir, heard, told = RunDir(tmp_path, "run"), threading.Event(), []
    run_dir.lock.on_lost = lambda reason: (told.append(reason), heard.set())[0]
    run_dir.create()
    left_by(run_dir, host="far", pid=77)
    assert heard.wait(20)
    assert "process 77 of host far is the driver of run run now" in told[0]
    run_dir.close()
    assert sorted(path.name for path in run_dir.path.iterdir()) == ["lock", "token"]


@pytest.mark.parametrize("content", [b"", b"{half", b"[1]\n"])
def test_a_damaged_lock_stops_nobody(tmp_path: Path, content: bytes) -> None:
    run_dir = RunDir(tmp_path, "run")
    run_dir.path.mkdir()
    run_dir.lock.path.write_bytes(content)
    run_dir.create()
    run_dir.close()
