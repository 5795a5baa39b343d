"""The event log: numbered lines in a file and in memory; its loss never costs the job anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_driver.runtime.event_log import EventLog


def no_trouble(line: str) -> None:
    raise AssertionError(line)


def make_log(path: Path | None, ring: int = 100) -> EventLog:
    clock = lambda: 1718000000.25  # noqa: E731
    log = EventLog(path, clock=clock, on_broken=no_trouble, ring=ring, patience=30.0)
    log.open()
    return log


def test_each_event_is_one_json_line_with_the_nine_facts_that_all_have(tmp_path: Path) -> None:
    log = make_log(tmp_path / "events.jsonl")
    log.append("worker_exited", host="a", slot=0, rank=None, reason="killed\nby SIGKILL", n=99)
    log.append("round_closed", round=2, size=3, worker=None)
    log.close()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "n": 1,
            "t": 1718000000.25,
            "event": "worker_exited",
            "round": None,
            "host": "a",
            "slot": 0,
            "rank": None,
            "pid": None,
            "reason": "killed\nby SIGKILL",
        },
        {
            "n": 2,
            "t": 1718000000.25,
            "event": "round_closed",
            "round": 2,
            "host": None,
            "slot": None,
            "rank": None,
            "pid": None,
            "reason": "",
            "size": 3,
        },
    ]


def test_an_event_is_in_the_file_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log = make_log(tmp_path / "events.jsonl")
    log.append("job_started")
    assert b"job_started" in (tmp_path / "events.jsonl").read_bytes()
    log.close()


def test_memory_keeps_the_newest_events_only() -> None:
    log = make_log(None, ring=3)
    for number in range(10):
        log.append("worker_started", slot=number)
    assert [logged.n for logged in log.since(0)] == [8, 9, 10]
    assert [logged.n for logged in log.since(9)] == [10]
    assert log.since(10) == []


def test_numbering_goes_on_in_an_existing_file_and_a_cut_off_line_is_dropped(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"n":1,"event":"a"}\n{"n":7,"event":"b"}\n{"n":8,"eve')
    log = make_log(path)
    log.append("driver_resumed")
    log.close()
    assert [json.loads(line)["n"] for line in path.read_bytes().splitlines()] == [1, 7, 8]


def test_a_full_disk_is_said_once_and_events_go_on_in_memory() -> None:
    said: list[str] = []
    log = EventLog(Path("/dev/full"), clock=lambda: 0.0, on_broken=said.append)
    log.open()
    for _ in range(3):
        log.append("worker_ready")
    log.close()
    assert len(log.since(0)) == 3
    assert len(said) == 1
    assert "/dev/full" in said[0]
    assert "\n" not in said[0]


def test_events_that_a_full_disk_has_refused_are_in_the_file_once_it_has_room(
    tmp_path: Path,
) -> None:
    """The disk is a real one of 64 KiB, in a mount namespace of its own."""
    script = f"""
mount -t tmpfs -o size=64k tmpfs {tmp_path} && exec {sys.executable} -c '
import json
from pathlib import Path
from elastic_driver.runtime.event_log import EventLog
folder, said = Path("{tmp_path}"), []
log = EventLog(folder / "events.jsonl", clock=lambda: 0.0, on_broken=said.append, patience=30.0)
log.open()
log.append("worker_started")
filler = folder / "filler"
with filler.open("wb", buffering=0) as file:
    while file.write(bytes(1000)) == 1000:
        pass
for number in range(20):
    log.append("worker_ready", reason="x" * 1000)
filler.unlink()
assert log._writer.flush(30.0)
log.append("job_ended")
log.close()
events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
print([event["n"] for event in events] == list(range(1, 23)), said)
'"""
    command = ["unshare", "-Urm", "bash", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0 and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip("no mount namespaces here")
    assert done.stderr == ""
    assert done.stdout.startswith("True ['event log ")
    assert done.stdout.count("No space left on device") == 1


def test_a_folder_that_is_missing_is_an_error_at_opening(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "no" / "events.jsonl", clock=lambda: 0.0, on_broken=no_trouble)
    with pytest.raises(FileNotFoundError):
        log.open()


def test_listeners_hear_of_events_and_of_the_end_until_they_leave() -> None:
    log = make_log(None)
    heard: list[bool] = []
    with log.listening(lambda: heard.append(log.closed)):
        log.append("job_started")
        log.close()
    log.append("job_failed")
    assert heard == [False, True]


def test_a_disk_that_hangs_holds_nobody_up_and_has_the_events_once_it_works(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)  # a file that takes 64 KiB, and then hangs until somebody reads
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = EventLog(path, clock=lambda: 0.0, on_broken=no_trouble)
    log.open()
    began = time.monotonic()
    for number in range(2000):
        log.append("worker_started", slot=number, reason="x" * 200)
    assert time.monotonic() - began < 20.0
    assert len(log.since(0)) == 2000
    numbers: list[int] = []
    with open(reading, "rb") as file:
        os.set_blocking(reading, True)
        numbers += [json.loads(file.readline())["n"] for _ in range(2000)]
        log.close()
    assert numbers == list(range(1, 2001))


def test_events_that_are_logged_together_are_in_the_file_at_the_end(tmp_path: Path) -> None:
    log = make_log(tmp_path / "events.jsonl")
    with log.together():
        for _ in range(3):
            log.append("worker_started")
    assert len((tmp_path / "events.jsonl").read_bytes().splitlines()) == 3
    log.close()


def test_the_numbers_go_on_after_the_file_was_moved(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = make_log(path)
    for _ in range(3):
        log.append("round_opened")
    log.close()
    path.rename(tmp_path / "events.jsonl-20260101")
    (tmp_path / "events.jsonl.2.gz").write_bytes(b"\x1f\x8b packed")
    again = make_log(path)
    assert again.append("round_opened").n == 4
    again.close()
    assert json.loads(path.read_text())["n"] == 4
