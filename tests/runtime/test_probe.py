"""Running a user's program: bounded in time and output, and nothing of it stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from elastic_driver.runtime.probe import ProbeError, ScriptProbe
from launcher.agent import processes
from tests.runtime.waiting import until
from tests.support.processes import is_running


def script(folder: Path, text: str, name: str = "probe.sh") -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def probe(path: Path, timeout: float = 10.0, max_output: int = 1 << 20) -> ScriptProbe:
    return ScriptProbe(path, timeout=timeout, max_output=max_output)


def test_it_returns_what_the_program_printed(tmp_path: Path) -> None:
    path = script(tmp_path, "#!/bin/sh\necho a:1; echo noise >&2; printf 'b:2'\n")
    assert probe(path).run() == b"a:1\nb:2"


def test_large_output_is_read_whole_and_too_large_output_is_an_error(tmp_path: Path) -> None:
    path = script(tmp_path, "#!/bin/sh\nhead -c 500000 /dev/zero\n")
    assert len(probe(path).run()) == 500_000
    with pytest.raises(ProbeError, match="more than 1000 bytes"):
        probe(path, max_output=1000).run()


def test_endless_output_ends_with_the_program_killed(tmp_path: Path) -> None:
    path = script(tmp_path, f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec cat /dev/zero\n")
    with pytest.raises(ProbeError, match="printed more than"):
        probe(path).run()
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_program_that_hangs_is_killed_at_its_deadline_with_its_children(tmp_path: Path) -> None:
    path = script(
        tmp_path, f"#!/bin/sh\nsleep 300 &\necho $! > {tmp_path}/child\ntrap '' TERM\nwait\n"
    )
    began = time.monotonic()
    with pytest.raises(ProbeError, match=r"within 0\.5 s.*--discovery-timeout"):
        probe(path, timeout=0.5).run()
    assert time.monotonic() - began < 5.0
    child = int((tmp_path / "child").read_text())
    until(lambda: not is_running(child), "the script's child is gone")


def test_a_child_that_keeps_the_pipe_open_delays_no_answer_and_is_killed(tmp_path: Path) -> None:
    path = script(tmp_path, f"#!/bin/sh\nsleep 300 &\necho $! > {tmp_path}/child\necho a:1\n")
    began = time.monotonic()
    assert probe(path, timeout=60.0).run() == b"a:1\n"
    assert time.monotonic() - began < 5.0
    child = int((tmp_path / "child").read_text())
    until(lambda: not is_running(child), "the script's child is gone")


def test_helpers_in_sessions_of_their_own_are_killed_and_reaped(tmp_path: Path) -> None:
    text = f"#!/bin/sh\n(setsid sleep 300 & echo $! > {tmp_path}/child)\necho a:1\n"
    path = script(tmp_path, text)
    children = set(psutil.Process().children())
    processes.become_subreaper()  # as the local backend makes the driver one
    try:
        assert probe(path, timeout=60.0).run() == b"a:1\n"
        assert set(psutil.Process().children()) <= children, "no zombie is left either"
    finally:
        processes.become_subreaper(False)
    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "child").read_text()))


DRIVER = """
import sys
from pathlib import Path
from elastic_driver.runtime.probe import ScriptProbe
ScriptProbe(Path(sys.argv[1]), timeout=300.0, max_output=100).run()
"""


def test_a_program_that_hangs_dies_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    text = f"#!/bin/sh\ntrap '' HUP TERM\nsleep 300 & echo $! > {tmp_path}/child\n"
    path = script(tmp_path, text + f"echo $$ > {tmp_path}/pid\nwait\n")
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(path)]) as driver:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "it runs")
        driver.kill()
    for name in ("pid", "child"):
        pid = int((tmp_path / name).read_text())
        until(lambda pid=pid: not is_running(pid), f"the {name} is gone")  # type: ignore[misc]


def test_a_failing_program_is_described_with_its_last_words(tmp_path: Path) -> None:
    path = script(tmp_path, "#!/bin/sh\necho first >&2\necho 'no such cluster' >&2\nexit 3\n")
    with pytest.raises(ProbeError, match="exited with status 3: 'no such cluster'"):
        probe(path).run()
    path = script(tmp_path, "#!/bin/sh\nkill -SEGV $$\n")
    with pytest.raises(ProbeError, match="killed by SIGSEGV"):
        probe(path).run()


def test_its_words_cannot_control_the_terminal(tmp_path: Path) -> None:
    path = script(tmp_path, "#!/bin/sh\nprintf '\\033[2Jgone\\n' >&2\nexit 1\n")
    with pytest.raises(ProbeError) as caught:
        probe(path).run()
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("echo no interpreter line\n", "#!/bin/sh"), ("#!/nowhere/sh\n", "No such file")],
)
def test_a_file_that_cannot_be_run_says_why(tmp_path: Path, text: str, problem: str) -> None:
    path = script(tmp_path, text)
    if "interpreter" in text:
        path.write_bytes(b"\x00\x01\x02\x03")
    with pytest.raises(ProbeError, match=problem):
        probe(path).run()


def test_cancelling_kills_what_runs_and_forbids_more(tmp_path: Path) -> None:
    path = script(tmp_path, f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 300\n")
    subject = probe(path, timeout=300.0)
    caught: list[BaseException] = []

    def run() -> None:
        try:
            subject.run()
        except ProbeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "it runs")
    subject.cancel()
    thread.join(5.0)
    assert not thread.is_alive()
    assert len(caught) == 1
    assert not is_running(int((tmp_path / "pid").read_text()))
    with pytest.raises(ProbeError, match="was cancelled"):
        subject.run()


def test_many_runs_leak_no_descriptor_and_no_zombie(tmp_path: Path) -> None:
    path = script(tmp_path, "#!/bin/sh\necho a\n")
    subject = probe(path)
    subject.run()
    before = len(os.listdir("/proc/self/fd"))
    children = set(psutil.Process().children())
    for _ in range(20):
        subject.run()
    assert len(os.listdir("/proc/self/fd")) == before
    assert set(psutil.Process().children()) <= children
