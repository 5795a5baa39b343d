"""What `elasticctl` says before an order that the job cannot carry."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
from collections.abc import Iterator

import pytest

from elastic_driver.errors import UsageError
from launcher.ctl_commands import orders as caution
from tests.job.scenario import Scenario
from tests.launcher.ctl_commands.test_job_text import document

HOSTS = {"a": 2, "b": 1}


def test_a_host_that_the_job_can_do_without_is_drained_without_a_word() -> None:
    job = document(Scenario(start_np=3, min_np=2).training(**HOSTS))
    assert caution.cost_of_drain(job, "b") is None
    assert caution.cost_of_drain(job, "unknown") is None, "the driver refuses it"
    told = caution.cost_of_drain(job, "a")
    assert told is not None
    assert told.startswith("without a 1 slot is left, fewer than the 2 of --min-np: it will wait")


def test_the_last_host_is_called_so() -> None:
    job = document(Scenario(start_np=2, min_np=1).training(a=2))
    told = caution.cost_of_drain(job, "a")
    assert told is not None
    assert told.startswith("a is the last usable host of the job")
    assert "its state is lost" in told


def test_more_workers_than_slots_are_told() -> None:
    job = document(Scenario(start_np=3, min_np=1).training(**HOSTS))
    assert caution.cost_of_scale(job, 3) is None
    assert "have 3 slots now, fewer than 4" in (caution.cost_of_scale(job, 4) or "")


@contextlib.contextmanager
def terminal() -> Iterator[int]:
    """A terminal as our stdin and stderr; yields the end at which a person sits."""
    person, ours = pty.openpty()
    with (
        pytest.MonkeyPatch.context() as patch,
        open(ours, encoding="utf-8") as stdin,
        open(ours, "w", encoding="utf-8", closefd=False) as stderr,
        open(person, "rb", buffering=0),
    ):
        patch.setattr(sys, "stdin", stdin)
        patch.setattr(sys, "stderr", stderr)
        yield person


@pytest.mark.parametrize("answer", [b"y\n", b"YES\n"])
def test_on_a_terminal_one_is_asked_and_may_say_yes(answer: bytes) -> None:
    with terminal() as person:
        os.write(person, answer)
        caution.confirm("it will end", yes=False)
        seen = b""
        while b"Go on? [y/N]" not in seen:
            seen += os.read(person, 4096)
        assert b"elasticctl: it will end" in seen


@pytest.mark.parametrize("answer", [b"\n", b"no\n", b"\x04"])
def test_any_other_answer_changes_nothing(answer: bytes) -> None:
    with terminal() as person:
        os.write(person, answer)
        with pytest.raises(UsageError, match="nothing was changed"):
            caution.confirm("it will end", yes=False)
        caution.confirm("it will end", yes=True)
        caution.confirm(None, yes=False)


def test_a_script_is_told_and_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    caution.confirm("it will end", yes=False)
    assert capsys.readouterr().err == "elasticctl: it will end\n"
