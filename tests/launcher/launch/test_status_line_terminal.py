"""The line at the bottom of a terminal, on the screen of an emulator."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import threading
import time
from typing import Any

import pytest

from launcher.launch import submit
from launcher.launch.status_line import BottomLine, has_room_for_line
from launcher.options.table import LaunchOptions
from tests.support.job import eventually
from tests.support.terminal import Terminal


def write_lines(terminal: Terminal, first: int, last: int) -> list[str]:
    """Write numbered lines as another process does; return what they are."""
    lines = [f"[0]<stdout>:line {n} {'x' * 40}" for n in range(first, last)]
    for line in lines:
        os.write(terminal.slave, f"{line}\n".encode())
    return lines


def never(error: Exception) -> None:
    raise AssertionError(error)


def last_row(terminal: Terminal, text: str) -> None:
    eventually(
        lambda: terminal.rows()[-1] == text,
        within=30.0,
        what=f"{text!r} is the last row",
        context=lambda: "\n".join(terminal.rows()),
    )


def until_shown(terminal: Terminal, line: str) -> None:
    eventually(lambda: line in terminal.rows(), within=30.0, what=f"{line!r} is shown")


@pytest.mark.parametrize("plain", [True, False], ids=["no color", "color"])
def test_lines_of_others_scroll_above_it_and_the_terminal_is_left_as_it_was(plain: bool) -> None:
    text = "3 workers | step 1"
    with Terminal(columns=70, rows=12) as terminal:
        lines, before = write_lines(terminal, 0, 5), terminal.state()
        line = BottomLine(terminal.slave, lambda _: text, never, plain=plain, first=0.0, look=0.005)
        with line:
            last_row(terminal, text)
            lines += write_lines(terminal, 5, 200)
            text = "3 workers | step 2"
            last_row(terminal, text)
            lines += write_lines(terminal, 200, 400)
            until_shown(terminal, lines[-1])
            assert terminal.rows()[-1] == text
        eventually(
            lambda: [row for row in terminal.lines() if row] == lines,
            within=30.0,
            what="all lines are there, and nothing else is",
            context=lambda: "\n".join(terminal.rows()),
        )
        assert terminal.state()[1:] == before[1:]
        assert terminal.state()[0] in (None, (0, 11)), "everybody may write in all rows"


def test_it_follows_the_size_of_the_window() -> None:
    with Terminal(columns=70, rows=24) as terminal:
        shown: list[int] = []

        def text(columns: int) -> str:
            shown.append(columns)
            return f"{columns} columns {'y' * columns}"

        with BottomLine(terminal.slave, text, never, first=0.0, look=0.005):
            for columns, rows in ((70, 24), (100, 30), (60, 20), (60, 8)):
                terminal.resize(columns, rows)
                last_row(terminal, f"{columns} columns {'y' * columns}"[:columns])
                lines = write_lines(terminal, 0, 40)
                until_shown(terminal, lines[-1])
                old = [row for row in terminal.rows()[:-1] if "columns" in row]
                assert old == []
            terminal.resize(10, 3)
            before = len(shown)
            eventually(lambda: terminal.rows()[-1][:4] != "60 c", within=30.0, what="it is gone")
            assert len(shown) == before, "there is no room for it"


def test_a_terminal_that_takes_nothing_holds_nobody_up() -> None:
    master, slave = os.openpty()
    os.set_blocking(slave, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(slave, b"x" * 100):
            pass
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    began = time.monotonic()
    asked = threading.Event()

    def text(_columns: int) -> str:
        asked.set()
        return "never seen"

    with BottomLine(slave, text, never, first=0.0, look=0.005):
        assert asked.wait(30.0)
    assert time.monotonic() - began < 20.0
    os.close(slave)
    os.close(master)


def test_a_thread_that_fails_gives_the_terminal_back() -> None:
    problem, said = "", []

    def text(_columns: int) -> str:
        if problem:
            raise ValueError(problem)
        return "3 workers"

    with Terminal() as terminal:
        before = terminal.state()
        with BottomLine(terminal.slave, text, said.append, first=0.0, look=0.005):
            last_row(terminal, "3 workers")
            problem = "a bug"
            last_row(terminal, "")
            eventually(lambda: said, within=30.0, what="it is told")
            assert terminal.state()[0] in (None, (0, 23)), "everybody may write in all rows"
            lines = write_lines(terminal, 0, 40)
            until_shown(terminal, lines[-1])
        assert [str(error) for error in said] == ["a bug"]
        assert terminal.state()[1:] == before[1:]


def test_a_thread_that_does_not_end_keeps_no_row_of_the_terminal() -> None:
    hold, held = threading.Event(), threading.Event()

    def text(_columns: int) -> str:
        if hold.is_set():
            held.wait(60.0)
        return "3 workers"

    with Terminal() as terminal:
        with BottomLine(terminal.slave, text, never, first=0.0, look=0.005):
            last_row(terminal, "3 workers")
            drawing = next(t for t in threading.enumerate() if t.name == "bottom-line")
            hold.set()
        eventually(
            lambda: terminal.state()[0] in (None, (0, 23)), within=30.0, what="all rows are free"
        )
        held.set()
        drawing.join(30.0)
        last_row(terminal, "")
        assert terminal.state()[0] in (None, (0, 23)), "the line is not drawn again"


def test_the_user_hears_of_a_line_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "has_room_for_line", lambda _environ: True)
    said: list[str] = []

    def now() -> None:
        raise KeyError("secret")

    with Terminal() as terminal:
        monkeypatch.setattr(
            submit, "BottomLine", lambda _fd, *args, **_: BottomLine(terminal.slave, *args, first=0)
        )
        with submit.bottom_line(now, LaunchOptions(), said.append):
            eventually(lambda: said, within=30.0, what="it is told")
    assert said[0].startswith(
        "the status line is gone (a bug of ours: KeyError at test_status_line"
    )
    assert said[0].endswith("; the job goes on")


def test_a_job_in_the_background_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    front = os.getpgrp()
    monkeypatch.setattr(os, "tcgetpgrp", lambda _fd: front)
    with (
        Terminal() as terminal,
        BottomLine(terminal.slave, lambda _: "here", never, first=0.0, look=0.005),
    ):
        last_row(terminal, "here")
        front = 1  # the user has stopped the job, and lets it go on with `bg`
        last_row(terminal, "")
        front = os.getpgrp()
        last_row(terminal, "here")


@pytest.mark.parametrize("term", ["xterm-256color", "dumb", None])
def test_a_line_needs_a_terminal_and_no_program_that_reads_the_output(
    monkeypatch: pytest.MonkeyPatch, term: str | None
) -> None:
    environ = {} if term is None else {"TERM": term}
    monkeypatch.setattr(os, "isatty", lambda fd: fd == 2)
    reading, writing = os.pipe()
    with Terminal() as terminal:
        for stdout, wanted in ((terminal.slave, True), (writing, False)):
            real = os.fstat(stdout)
            monkeypatch.setattr(os, "fstat", lambda _fd, real=real: real)
            assert has_room_for_line(environ) is (wanted and term == "xterm-256color")
            monkeypatch.undo()
            monkeypatch.setattr(os, "isatty", lambda fd: fd == 2)
    monkeypatch.setattr(os, "isatty", lambda _fd: False)
    assert not has_room_for_line({"TERM": "xterm"})
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("unwanted", ["quiet", "no_progress", "log_format"])
def test_nobody_gets_a_line_that_was_not_wanted(
    monkeypatch: pytest.MonkeyPatch, unwanted: str
) -> None:
    monkeypatch.setattr(submit, "has_room_for_line", lambda _environ: True)
    values: dict[str, Any] = {unwanted: "json" if unwanted == "log_format" else True}
    options = LaunchOptions(**values)
    assert isinstance(submit.bottom_line(lambda: None, options, print), contextlib.nullcontext)
    assert isinstance(submit.bottom_line(lambda: None, LaunchOptions(), print), BottomLine)
