"""What `elasticctl` says of its words: help, mistakes, and the options of a job."""

from __future__ import annotations

import re

import pytest

from launcher import ctl


def say(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What `elasticctl WORDS…` says: stdout, or stderr where it is to fail."""
    assert ctl.main(words) == code
    said = capsys.readouterr()
    return said.err if code else said.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "is no command"),
        (["scale", "many"], "argument N: needs a whole number of at least 1 or auto, got 'many'"),
        (["scale", "0"], "argument N: needs a whole number of at least 1 or auto, got '0'"),
        (["drain"], "required: HOST"),
        (["status", "--nonsense"], "--nonsense"),
        (["events", "--since", "-1"], "--since"),
        (["config"], "config show"),
    ],
)
def test_wrong_words_are_one_line_and_64(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = say(capsys, *words, code=64)
    assert said in told
    assert len(told.splitlines()) == 1


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^  ([a-z]+) ", say(capsys, "--help"), re.MULTILINE)
    assert {"status", "events", "hosts", "scale", "drain", "stop", "check", "config"} <= set(
        commands
    )
    for command in commands:
        assert "usage: elasticctl" in say(capsys, command, "--help")


def test_config_show_says_who_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    lines = say(capsys, "config", "show", "-np", "2").splitlines()
    assert lines[1].split() == ["--num-proc", "2", "command", "line"]
    assert any(line.split() == ["--stop-grace", "30", "default"] for line in lines)
