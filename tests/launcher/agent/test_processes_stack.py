"""A look at a process from outside, with and without py-spy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.agent import processes as stacks
from launcher.agent.processes import Seen, seen_in, stack_of
from tests.support.job import eventually

FRAMES = [
    {"name": "acquire", "filename": "/lib/lock.py", "line": 9, "module": None},
    {"name": "train", "filename": "/srv/train.py", "line": 41, "module": None},
]
STACK = '  File "/srv/train.py", line 41, in train\n  File "/lib/lock.py", line 9, in acquire\n'


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def py_spy(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program of that name, found first."""
    program = folder / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(folder / "python"))  # a real one is looked for there


def at(process: subprocess.Popen[bytes]) -> Seen:
    return asyncio.run(stack_of(process.pid))


def test_py_spy_s_main_thread_is_shown_as_a_traceback_would() -> None:
    threads = [
        {"pid": 7, "thread_name": "pin", "os_thread_id": 8, "frames": FRAMES[:1]},
        {"pid": 7, "thread_name": None, "os_thread_id": 7, "frames": FRAMES},
    ]
    seen = Seen("outside of collectives, seen by py-spy", STACK)
    assert seen_in(json.dumps(threads).encode(), 7) == seen


def test_who_stands_in_torch_s_exchanges_is_seen_to_wait() -> None:
    inside = {"name": "all_reduce", "filename": "/lib/torch/distributed/c10d.py", "line": 3}
    threads = [{"thread_name": "MainThread", "frames": [inside, *FRAMES]}]
    seen = seen_in(json.dumps(threads).encode(), 7)
    assert seen is not None
    assert seen.where == "in a collective, seen by py-spy"


@pytest.mark.parametrize("output", [b"", b"Error: denied", b"[]", b'[{"frames": 3}]'])
def test_what_is_no_answer_of_py_spy_s_is_no_stack(output: bytes) -> None:
    assert seen_in(output, 7) is None


def test_with_py_spy_the_stack_is_seen(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = [{"thread_name": "MainThread", "frames": FRAMES}]
    py_spy(tmp_path, monkeypatch, f"echo '{json.dumps(threads)}'")
    assert at(process) == Seen("outside of collectives, seen by py-spy", STACK)


def test_a_py_spy_that_may_not_look_or_hangs_leaves_the_kernel_s_word(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    py_spy(tmp_path, monkeypatch, "echo denied >&2; exit 1")
    assert at(process).where.startswith("no answer; its process is ")
    monkeypatch.setattr(stacks, "PY_SPY_S", 0.2)
    py_spy(tmp_path, monkeypatch, "exec sleep 60")
    assert at(process).where.startswith("no answer; its process is ")


def test_a_stopped_process_is_said_to_be_stopped(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: stacks.state_of(process.pid) == "stopped", within=5, what="it is stopped")
    assert at(process) == Seen("no answer; its process is stopped")
