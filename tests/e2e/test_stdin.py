"""What workers read: the stdin of `elasticrun`, as those of torchrun do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job import JOBS, RunningJob, elasticrun, eventually
from tests.support.terminal import Terminal

READ = """
import os, sys
IMPORT
line = sys.stdin.buffer.raw.read(7).decode()  # no more, which is for the other rank
print("rank", os.environ["RANK"], "read", repr(line), "of a terminal:", sys.stdin.isatty())
"""
ASK = """
import os
if os.environ["RANK"] == "0":
    name = input("your name? ")
    print("hello", name)
    breakpoint()
    print("over", flush=True)
"""


def script(folder: Path, text: str, *, torch: bool = False) -> str:
    """A script; one that imports torch is forked from a warm parent."""
    path = folder / "script.py"
    path.write_text(text.replace("IMPORT", "import torch" if torch else ""))
    return str(path)


def given(folder: Path, text: str) -> tuple[str, ...]:
    """A command that gives the command that follows this stdin."""
    path = folder / "given"
    path.write_text(text)
    return ("sh", "-c", f'exec "$@" <{path}', "sh")


def read(job: RunningJob) -> list[tuple[str, str]]:
    """Return what each rank has read, and whether that was a terminal."""
    return sorted(re.findall(r"rank \d read '(.*)' of a terminal: (True|False)", job.stdout))


@pytest.mark.parametrize("torch", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize("hosts", ["localhost:1", "localhost:1,127.0.0.2:1"])
def test_the_workers_of_this_machine_read_the_stdin_of_elasticrun(
    tmp_path: Path, hosts: str, torch: bool
) -> None:
    lines = [f"line {n}" for n in range(hosts.count(":"))]
    args = ("-H", hosts, "-np", str(len(lines)), "--", script(tmp_path, READ, torch=torch))
    with elasticrun(*args, inside=given(tmp_path, "\n".join([*lines, ""]))) as job:
        assert job.wait() == 0, job.describe()
        assert read(job) == [(rf"{line}\n", "False") for line in lines]
        job.assert_nothing_left()


def test_a_worker_reads_nothing_where_stdin_is_closed(tmp_path: Path) -> None:
    inside = ("sh", "-c", 'exec "$@" <&-', "sh")
    with elasticrun("-np", "1", "--", script(tmp_path, READ), inside=inside) as job:
        assert job.wait() == 0, job.describe()
        assert read(job) == [("", "False")]


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with Terminal(columns=100, rows=30) as terminal:
        yield terminal


def until_shown(terminal: Terminal, pattern: str, context: RunningJob) -> None:
    eventually(
        lambda: any(re.search(pattern, row) for row in terminal.rows()),
        within=60.0,
        what=f"{pattern!r} is shown",
        context=lambda: "\n".join(terminal.rows()) + context.describe(),
    )


def test_questions_and_breakpoints_are_answered_on_the_terminal(
    tmp_path: Path, terminal: Terminal
) -> None:
    args, env = ("-np", "2", "--", script(tmp_path, ASK)), {"TERM": "xterm"}
    with elasticrun(*args, env=env, inside=terminal.inside) as job:
        until_shown(terminal, r"\[0\]<stdout>:your name\?$", job)
        terminal.press(b"Ann\n")
        until_shown(terminal, r"\[0\]<stdout>:hello Ann$", job)
        until_shown(terminal, r"\[0\]<stdout>:\(Pdb\)$", job)
        terminal.press(b"p name * 2\n")
        until_shown(terminal, r"\[0\]<stdout>:'AnnAnn'$", job)
        terminal.press(b"c\n")
        assert job.wait() == 0, job.describe()
        until_shown(terminal, r"\[0\]<stdout>:(\(Pdb\) )?over$", job)


def test_ctrl_c_ends_a_worker_that_waits_for_an_answer(tmp_path: Path, terminal: Terminal) -> None:
    args, env = ("-np", "2", "--", script(tmp_path, ASK)), {"TERM": "xterm"}
    with elasticrun(*args, env=env, inside=terminal.inside) as job:
        until_shown(terminal, r"your name\?$", job)
        terminal.press(b"\x03")
        assert job.wait() == 130, job.describe()
        job.assert_nothing_left()


def test_a_job_behind_a_shell_leaves_the_terminal_to_it(tmp_path: Path, terminal: Terminal) -> None:
    inside = (*terminal.inside, "bash", "-mc", '"$@" & wait $!', "bash")
    with elasticrun("-np", "1", "--", script(tmp_path, READ), inside=inside) as job:
        until_shown(terminal, r"rank 0 read '' of a terminal: False$", job)
        assert job.wait() == 0, job.describe()


def test_workers_that_the_next_driver_starts_leave_the_terminal_of_the_first_one_alone(
    tmp_path: Path,
) -> None:
    args = ("-np", "2", "--", str(JOBS / "train.py"))
    env = {"STEPS": "100000", "STEP_MS": "10"}
    with elasticrun(*args, env=env, inside=given(tmp_path, "one\n")) as job:
        before = job.until_size(2, within=120.0)
        reads = {Path(f"/proc/{pid}/fd/0").readlink() for pid in before}
        assert reads == {tmp_path / "given"}
        job.kill_driver()
        job.start("--resume")
        job.until(lambda: job.events("driver_resumed"), "the next driver is there")
        killed = next(iter(before))
        job.kill(killed)
        after = job.until(lambda: set(job.live()) - set(before), "another worker", 120.0)
        assert {Path(f"/proc/{pid}/fd/0").readlink() for pid in after} == {Path("/dev/null")}
