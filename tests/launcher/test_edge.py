"""What ends a command becomes its exit status, and a line that bears the command's name."""

from __future__ import annotations

import signal

import pytest

from elastic_driver.errors import UsageError
from launcher.edge import handled, run_command


def fails_with(error: BaseException) -> int:
    def act() -> int:
        raise error

    return run_command("elasticctl", act)


def test_what_is_done_says_the_status() -> None:
    assert run_command("elasticctl", lambda: 3) == 3


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails_with(UsageError("no such option")) == 64
    assert capsys.readouterr().err == "elasticctl: no such option\n"


def test_an_interruption_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails_with(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_a_bug_shows_where_and_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails_with(ZeroDivisionError("oops")) == 70
    err = capsys.readouterr().err
    assert "ZeroDivisionError: oops" in err
    assert "this is a bug of elasticctl" in err.splitlines()[-1]


def test_signals_are_ours_for_a_while_but_for_those_that_are_ignored() -> None:
    heard: list[int] = []
    first, second = signal.SIGUSR1, signal.SIGUSR2
    before = signal.getsignal(first), signal.signal(second, signal.SIG_IGN)
    try:
        with handled((first, second), heard.append):
            signal.raise_signal(first)
            signal.raise_signal(second)
        assert heard == [first]
        assert signal.getsignal(first) == before[0]
        assert signal.getsignal(second) is signal.SIG_IGN
    finally:
        signal.signal(second, before[1])
