"""`elasticctl replay` and `explain` with the journal of a job that only the core lived."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_driver.features.shards.machine import DataSets
from elastic_driver.job.events import EventBatch, HostsDiscovered, ProgressReported
from elastic_driver.job.job import Job
from elastic_driver.runtime.journal.writer import Journal
from elastic_driver.settings import Settings
from elastic_driver.words import wire_events as ev
from launcher.ctl import main

A, B = "a.0.1", "b.0.1"
STORY: tuple[ev.Event | EventBatch, ...] = (
    HostsDiscovered((("a", 1), ("b", 1))),
    ev.AgentReady("a", 1, 7, "a", (5000, 5001)),
    ev.AgentReady("b", 1, 8, "b", (5000, 5001)),
    EventBatch((ev.WorkerStarted(A, 70), ev.WorkerStarted(B, 80))),
    EventBatch((ev.WorkerReady(A, 0, -1, True, ""), ev.WorkerReady(B, 0, -1, True, ""))),
    ev.WorkerStepped(A, 1, 1),
    ev.DrainRequested("b", "new disks"),
    ProgressReported(1, ()),
    EventBatch((ev.WorkerReady(A, 1, 3, True, ""), ev.WorkerReady(B, 1, 3, True, ""))),
    ev.WorkerExited(B, -15, ""),
)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "job7"
    folder.mkdir()
    job, journal = Job(Settings(start_np=2, min_np=1)), Journal(folder / "journal.db", "job7")
    journal.open()
    journal.snapshot(0, 100.0, {"job": job.snapshot(), "shards": DataSets().snapshot()})
    for n, event in enumerate(STORY, 1):
        journal.note(n, 100.0 + n, "job", event)
        job.handle(event, 100.0 + n)
        assert journal.settle() == []
        assert job.check() == []
    journal.close()
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(words) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_a_host_is_explained_with_every_cause(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "explain", "host", "b", "--state-dir", str(state_dir))
    lines = [line[13:] if line[2:3] == ":" else line for line in text.splitlines()]
    assert lines[0] == "run job7, host b"
    assert "event 1: there are the hosts a:1, b:1" in lines
    assert "    an agent is started on b: its slots are needed" in lines
    assert "event 3: the agent b.1 is up (after event 1)" in lines
    assert any(line.startswith("    round 1 begins with 2 workers") for line in lines)
    assert any(line.endswith("; rank 1 on b") for line in lines)
    assert "event 7: a drain of b was requested: new disks" in lines
    assert any(line.startswith("    b.0.1 is stopped: host b is drained") for line in lines)
    assert any(line.startswith("event 10: b.0.1 has ended with status -15") for line in lines)


def test_a_rank_is_explained_without_the_others(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "explain", "rank", "1", "--state-dir", str(state_dir), "--run-id", "job7")
    assert "b.0.1 has ended with status -15 (after event 9)" in text
    assert "rank 1 is b.0.1" in text
    assert "a.0.1 is started" not in text


def test_the_replay_stops_after_an_event_and_shows_the_job_as_it_was(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--state-dir", str(state_dir))
    text = said(capsys, "replay", "--at", "6", *where)
    assert "event 6 (job): a.0.1 has finished step 1" in text
    assert "event 7" not in text
    assert "round 1: 2 workers" in text
    whole = said(capsys, "replay", str(state_dir / "job7"), "--json")
    *steps, last = [json.loads(line) for line in whole.splitlines()]
    assert [step["n"] for step in steps] == list(range(1, len(STORY) + 1))
    assert steps[6]["event"]["type"] == "drain_requested"
    assert {d["cause"] for step in steps for d in step["decisions"]} <= set(range(1, 11))
    assert last["status"]["round"] == 2


def test_what_cannot_be_read_or_is_not_known_is_said_in_one_line(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--state-dir", str(state_dir))
    for words, text in (
        (("explain", "rank", "9", *where), "run job7: nothing is known of rank 9"),
        (("explain", "rank", "one", *where), "a rank is a number from 0, not 'one'"),
        (("explain", "host", "zz", *where), "run job7: nothing is known of host zz"),
        (("replay", "--run-id", "other", *where), "there is no journal"),
        (("replay", "--run-id", "../job7", *where), "is no name of a run"),
        (("replay", "--state-dir", "/nowhere"), "no run below /nowhere has a journal"),
    ):
        found = said(capsys, *words, code=64)
        assert text in found
        assert len(found.splitlines()) == 1
