"""The lines about operations that the variables of Horovod ask for."""

import re

import pytest
import torch

import elastic_driver.horovod.torch as hvd
from elastic_driver.errors import UsageError
from elastic_driver.horovod.engine.operation_log import ERROR, WARNING, log_from_environment
from elastic_driver.worker import current


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a short script has written, in a world of one."""
    hvd.init()
    hvd.allreduce(torch.ones(2, 3), name="x")
    hvd.shutdown()
    current.forget()
    lines = capsys.readouterr().err.splitlines()
    return [line.removeprefix("elastic: ") for line in lines if "world of one" not in line]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("WARNING", []),
        ("info", ["rank 0 of 1 takes part", "rank 0 of 1 has left"]),
        (
            "TRACE",
            [
                "rank 0 of 1 takes part",
                "allreduce 'x' is called with float32 [2, 3]",
                "allreduce 'x' is done",
                "rank 0 of 1 has left",
            ],
        ),
    ],
)
def test_lines_below_the_level_are_left_out(
    level: str,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", level)
    found = said(capsys)
    assert len(found) == len(expected)
    for line, beginning in zip(found, expected, strict=True):
        assert line.startswith(beginning)


@pytest.mark.parametrize(("hidden", "with_time"), [("0", True), ("1", False), (None, False)])
def test_a_line_begins_with_the_time_where_that_is_wanted(
    hidden: str | None,
    with_time: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "INFO")
    if hidden is not None:
        monkeypatch.setenv("HOROVOD_LOG_HIDE_TIME", hidden)
    for line in said(capsys):
        assert bool(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6} rank ", line)) == with_time


def test_warnings_are_shown_unless_only_errors_are_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log_from_environment().warn("seen")
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "ERROR")
    log_from_environment().warn("not seen")
    assert capsys.readouterr().err == "elastic: seen\n"
    assert ERROR > WARNING


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "loud")
    with pytest.raises(UsageError, match="HOROVOD_LOG_LEVEL=loud: give one of TRACE, DEBUG, INFO"):
        log_from_environment()
