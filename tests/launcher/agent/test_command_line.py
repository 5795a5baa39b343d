"""What an agent that waits for its host is told, over a real pipe."""

from __future__ import annotations

import os
import subprocess
import sys

from launcher.agent.command_line import SPARE_FLAG, receive_arguments, send_arguments
from tests.launcher.agent.harness import ROOT


def test_words_of_every_kind_arrive_as_they_were_told() -> None:
    words = ["--host", "näme with spaces", "", "two\nlines", "\udcff", "x" * 10_000]
    reading, writing = os.pipe()
    try:
        send_arguments(writing, words)
        assert receive_arguments(reading) == words
    finally:
        os.close(reading)
        os.close(writing)


def test_an_agent_that_is_needed_no_more_ends_without_a_word() -> None:
    argv = [sys.executable, "-m", "launcher.agent", SPARE_FLAG]
    done = subprocess.run(
        argv, check=False, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_what_it_is_told_is_read_like_a_command_line() -> None:
    argv = [sys.executable, "-m", "launcher.agent", SPARE_FLAG]
    told = b'["--host", "a"]\n'
    done = subprocess.run(argv, check=False, cwd=ROOT, input=told, capture_output=True, timeout=30)
    assert done.returncode == 64
    assert b"--endpoint" in done.stderr
