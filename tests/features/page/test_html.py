"""`elasticctl report --html`: one file that loads nothing, and in which text stays text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launcher.ctl_commands.report import report

HOSTILE = "</script><script>alert(1)</script><!--"


def log_of(folder: Path) -> Path:
    events = [
        {"event": "job_started", "reason": ""},
        {"event": "worker_started", "worker": "a.0.1", "host": "a", "reason": "pid 7"},
        {"event": "round_completed", "round": 1, "size": 1, "hosts": 1, "reason": ""},
        {"event": "worker_lost", "worker": "a.0.1", "host": "a", "reason": HOSTILE},
        {"event": "job_failed", "exit_code": 1, "reason": HOSTILE},
    ]
    lines = [json.dumps({"n": n, "t": 1000.0 + n, **e}) for n, e in enumerate(events, start=1)]
    folder.mkdir()
    path = folder / "events.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_page_of_a_run_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_of(tmp_path / "the-run")
    monkeypatch.chdir(tmp_path)
    assert report(["--html", str(log)]) == 0
    assert capsys.readouterr().out == "the-run.html\n"
    text = (tmp_path / "the-run.html").read_text()
    assert "/assets/" not in text
    assert "alert(1)</script>" not in text, "the reason of an event cannot end the script"
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    data = re.search(r'id="report">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    found = json.loads(data[1])
    assert found["events"][3]["reason"] == HOSTILE
    assert found["job"]["run_id"] == "the-run"
    assert found["state"] == "failed"


def test_the_file_may_be_named(tmp_path: Path) -> None:
    log = log_of(tmp_path / "run")
    assert report(["--html", "-o", str(tmp_path / "page.html"), str(log)]) == 0
    assert (tmp_path / "page.html").stat().st_size > 50_000
