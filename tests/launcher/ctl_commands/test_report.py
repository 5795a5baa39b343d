"""`elasticctl report`: from an event log to the story of a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from elastic_driver.features.goodput.story import read_story
from launcher.ctl_commands.report import report


def log(folder: Path, *events: dict[str, object]) -> Path:
    """An event log with these lines, in the folder of a run."""
    path = folder / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_a_report_tells_of_the_last_run_in_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = {"worker": "a.0.1", "host": "a", "slot": 0}
    log(
        tmp_path,
        {"t": 1.0, "event": "job_started"},
        {"t": 100.0, "event": "job_started", "min_np": 1},
        {"t": 100.0, "event": "host_discovered", "host": "a", "slots": 1},
        {"t": 110.0, "event": "worker_ready", **worker},
        {"t": 110.0, "event": "round_completed", "size": 1},
        {"t": 120.0, "event": "state_synced", "first_step": 1, "seconds": 10.0, **worker},
        {"t": 190.0, "event": "round_closed", "step": 1500},
        {"t": 200.0, "event": "job_failed", "exit_code": 7, "reason": "it was enough"},
    )
    assert report([str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["exit_code"], found["step"]) == ("failed", 7, 1500)
    assert found["worlds"] == [{"t": 110.0, "size": 1}, {"t": 200.0, "size": 0}]
    assert report([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "1 min, failed: it was enough" in shown
    assert "1,500 steps" in shown
    assert "goodput 90.0% (starting 10.0%)" in shown


def test_a_log_that_is_not_there_or_is_none_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no event log"):
        report([str(tmp_path / "none")])
    with pytest.raises(UsageError, match="no events of a job"):
        report([str(log(tmp_path))])
    with pytest.raises(UsageError, match="no run below"):
        report(["--state-dir", str(tmp_path / "x")])
    assert read_story([b"\xff"]).ledger.began is None


def test_a_job_without_an_end_and_without_a_driver_is_told_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "lone"
    folder.mkdir()
    log(
        folder,
        {"t": 100.0, "event": "job_started", "min_np": 1},
        {"t": 110.0, "event": "round_closed", "step": 7},
    )
    assert report([str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "no end in the log: run lone is over" in shown
    assert "at least 7 steps; 0 worker failures" in shown
