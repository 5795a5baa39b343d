"""Discovery with real scripts and files: what changes is told, what fails changes nothing."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_driver.errors import ElasticError, UsageError
from elastic_driver.job.events import DiscoveryFailed, HostsDiscovered
from elastic_driver.runtime.discovery import (
    FAILURES_AT_ONCE,
    DiscoveryError,
    DiscoveryThread,
    FixedDiscovery,
    HostDiscovery,
    HostfileDiscovery,
    HostListError,
    Hosts,
    ScriptDiscovery,
)
from tests.runtime.waiting import until

Posted = HostsDiscovered | DiscoveryFailed


def write_script(path: Path, body: str) -> Path:
    """Replace the script in one step, as a careful user would."""
    draft = path.with_suffix(".draft")
    draft.write_text(f"#!/bin/sh\n{body}\n")
    draft.chmod(0o755)
    draft.replace(path)
    return path


@contextmanager
def running(source: HostDiscovery, interval: float = 0.01) -> Iterator[queue.Queue[Posted]]:
    posted: queue.Queue[Posted] = queue.Queue()
    thread = DiscoveryThread(source, interval=interval, post=posted.put)
    thread.start()
    try:
        yield posted
    finally:
        thread.stop()
        assert not any(t.name == "discovery" for t in threading.enumerate())


class Scripted:
    """A source that is told what to answer and counts how often it was asked."""

    def __init__(self, answer: Hosts | Exception) -> None:
        self.answer = answer
        self.asked = 0

    def find(self) -> Hosts:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cancel(self) -> None:
        pass

    def wait_for_another_answer(self) -> None:
        seen = self.asked
        until(lambda: self.asked >= seen + 2, "the source is asked again")


# ---- scripts -----------------------------------------------------------------------------


def test_a_script_names_hosts_with_slots_or_the_default(tmp_path: Path) -> None:
    path = write_script(tmp_path / "hosts.sh", "echo '# mine'; echo a:4; echo; echo b")
    found = ScriptDiscovery(path, timeout=10.0, default_slots=2).find()
    assert found == (("a", 4), ("b", 2))


def test_ten_thousand_hosts_from_a_script(tmp_path: Path) -> None:
    path = write_script(tmp_path / "hosts.sh", "seq -f 'node%.0f:8' 10000")
    hosts = ScriptDiscovery(path, timeout=30.0).find()
    assert len(hosts) == 10_000
    assert hosts[-1] == ("node10000", 8)


def test_a_script_that_is_missing_or_not_executable_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        ScriptDiscovery(tmp_path / "no.sh", timeout=1.0)
    (tmp_path / "plain.txt").write_text("a:1\n")
    with pytest.raises(UsageError, match="chmod"):
        ScriptDiscovery(tmp_path / "plain.txt", timeout=1.0)
    with pytest.raises(UsageError, match="not a file"):
        ScriptDiscovery(tmp_path, timeout=1.0)


def test_a_script_s_garbage_is_refused_whole_by_line_and_text(tmp_path: Path) -> None:
    path = write_script(tmp_path / "hosts.sh", "echo a:1; echo 'b: two'")
    with pytest.raises(HostListError, match=r"line 2: 'b: two'"):
        ScriptDiscovery(path, timeout=10.0).find()
    write_script(path, "head -c 100 /dev/urandom")
    with pytest.raises(HostListError):
        ScriptDiscovery(path, timeout=10.0).find()


def test_a_script_that_fails_or_vanishes_later_is_a_discovery_error(tmp_path: Path) -> None:
    path = write_script(tmp_path / "hosts.sh", "echo a; exit 7")
    source = ScriptDiscovery(path, timeout=10.0)
    with pytest.raises(DiscoveryError, match="status 7"):
        source.find()
    path.unlink()
    with pytest.raises(DiscoveryError, match="No such file"):
        source.find()


def test_the_script_s_path_survives_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_script(tmp_path / "hosts.sh", "echo a")
    monkeypatch.chdir(tmp_path)
    source = ScriptDiscovery(Path("hosts.sh"), timeout=10.0)
    monkeypatch.chdir("/")
    assert source.find() == (("a", 1),)


# ---- files -------------------------------------------------------------------------------


def test_a_hostfile_is_read_anew_each_time_even_within_one_clock_tick(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a:1\n")
    source = HostfileDiscovery(path, default_slots=3)
    stamp = path.stat().st_mtime_ns
    path.write_text("b:1\n")  # same size; give it the same time stamp too
    os.utime(path, ns=(stamp, stamp))
    assert source.find() == (("b", 1),)
    path.write_text("c\n")
    assert source.find() == (("c", 3),)


def test_a_hostfile_that_is_being_written_is_read_when_it_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    hosts = "".join(f"node{i}:2\n" for i in range(200))
    path.write_text(hosts)
    source = HostfileDiscovery(path)
    writing = threading.Event()

    def rewrite() -> None:
        with path.open("w") as file:  # truncates first, like every shell's >
            writing.set()
            for line in hosts.splitlines(keepends=True):
                file.write(line)
                file.flush()
                time.sleep(0.0005)

    writer = threading.Thread(target=rewrite)
    writer.start()
    writing.wait(5.0)
    found = source.find()
    writer.join(10.0)
    assert len(found) == 200


def test_a_hostfile_must_be_there_and_right_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        HostfileDiscovery(tmp_path / "none")
    with pytest.raises(UsageError, match="directory"):
        HostfileDiscovery(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="not a regular file"):
        HostfileDiscovery(tmp_path / "fifo")
    (tmp_path / "bad").write_text("a:1\nb:x\n")
    with pytest.raises(UsageError, match="bad, line 2: 'b:x'"):
        HostfileDiscovery(tmp_path / "bad")


def test_a_hostfile_that_vanishes_later_is_a_discovery_error(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a\n")
    source = HostfileDiscovery(path)
    path.unlink()
    with pytest.raises(ElasticError, match="No such file"):
        source.find()


def answers(source: ScriptDiscovery | HostfileDiscovery, lists: list[str], file: Path) -> list[str]:
    """What is made of these host lists, one after the other: names, or the error."""
    found = []
    for text in lists:
        file.write_text(text)
        try:
            found.append(" ".join(host for host, _slots in source.find()) or "none")
        except DiscoveryError as error:
            found.append(str(error).removeprefix(f"hostfile {file} "))
    return found


@pytest.mark.parametrize("kind", ["script", "file"])
def test_no_hosts_count_once_a_second_answer_agrees(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "hosts"
    file.write_text("a\n")
    script = write_script(tmp_path / "hosts.sh", f"cat {file}")
    source = HostfileDiscovery(file) if kind == "file" else ScriptDiscovery(script, timeout=10.0)
    again = "names no host; it is asked again before that counts"
    lists = ["a\n", "", "a\n", "", "", "", "b\n", "\n# none\n", ""]
    found = [text[-len(again) :] for text in answers(source, lists, file)]
    assert found == ["a", again, "a", again, "none", "none", "b", again, "none"]


# ---- the thread --------------------------------------------------------------------------


def test_the_first_answer_is_posted_and_then_only_changes() -> None:
    source = Scripted((("a", 1),))
    with running(source) as posted:
        assert posted.get(timeout=10) == HostsDiscovered((("a", 1),))
        source.wait_for_another_answer()
        assert posted.empty()
        source.answer = (("a", 1), ("b", 2))
        assert posted.get(timeout=10) == HostsDiscovered((("a", 1), ("b", 2)))


def test_an_empty_first_answer_is_posted_too() -> None:
    with running(Scripted(())) as posted:
        assert posted.get(timeout=10) == HostsDiscovered(())


def test_a_failure_is_told_once_for_each_reason_and_the_hosts_stay() -> None:
    source = Scripted((("a", 1),))
    with running(source) as posted:
        assert posted.get(timeout=10) == HostsDiscovered((("a", 1),))
        source.answer = DiscoveryError("script exited with status 1")
        assert posted.get(timeout=10) == DiscoveryFailed("script exited with status 1")
        source.wait_for_another_answer()
        assert posted.empty()
        source.answer = RuntimeError("a bug of the user's")
        assert posted.get(timeout=10) == DiscoveryFailed(
            "Scripted: RuntimeError: a bug of the user's"
        )
        source.answer = (("a", 1),)
        source.wait_for_another_answer()
        assert posted.empty()  # the same hosts as before the failures: no news
        source.answer = DiscoveryError("script exited with status 1")
        assert posted.get(timeout=10) == DiscoveryFailed("script exited with status 1")


def test_a_script_that_fails_anew_each_time_fills_neither_terminal_nor_log() -> None:
    source = Scripted(())
    with running(source) as posted:
        assert posted.get(timeout=10) == HostsDiscovered(())
        for number in range(FAILURES_AT_ONCE + 5):
            source.answer = DiscoveryError(f"exited with status 1: failed at {number}")
            source.wait_for_another_answer()
            source.answer = ()
            source.wait_for_another_answer()
        told = [posted.get_nowait() for _ in range(posted.qsize())]
        assert told == [
            DiscoveryFailed(f"exited with status 1: failed at {number}")
            for number in range(FAILURES_AT_ONCE)
        ]
        source.answer = (("a", 1),)
        assert posted.get(timeout=10) == HostsDiscovered((("a", 1),)), "changes are news"


def test_two_changes_within_one_second_are_two_events(tmp_path: Path) -> None:
    path = write_script(tmp_path / "hosts.sh", "echo a")
    with running(ScriptDiscovery(path, timeout=10.0)) as posted:
        for name in ("a", "b", "c"):
            write_script(path, f"echo {name}")
            expected = HostsDiscovered(((name, 1),))
            until(lambda expected=expected: posted.get(timeout=10) == expected, f"{name} is seen")


def test_stopping_does_not_wait_for_a_script_that_hangs(tmp_path: Path) -> None:
    path = write_script(tmp_path / "hosts.sh", f"touch {tmp_path}/running; sleep 300")
    thread = DiscoveryThread(
        ScriptDiscovery(path, timeout=300.0), interval=1.0, post=lambda _: None
    )
    thread.start()
    until((tmp_path / "running").exists, "the script runs")
    began = time.monotonic()
    thread.stop()
    thread.stop()
    assert time.monotonic() - began < 4.0
    assert not any(t.name == "discovery" for t in threading.enumerate())


def test_a_thread_that_was_never_started_can_be_stopped() -> None:
    DiscoveryThread(FixedDiscovery(()), interval=1.0, post=lambda _: None).stop()
