"""The main stories, word for word; and the same events give the same decisions, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_driver.job.decisions import Decision
from elastic_driver.job.events import HostsDiscovered
from elastic_driver.job.job import Job
from elastic_driver.kernel.machine import kinds
from elastic_driver.settings import Settings
from elastic_driver.words import wire_events as ev
from tests.job import conversation
from tests.job.conversation import FOLDER, render, replay

STORIES = sorted(FOLDER.glob("*.txt"))
REPLAY = """
import hashlib
from tests.job.conversation import FOLDER, replay
from tests.sim import runner
from tests.sim.cluster import Cluster
told, note = [], Cluster.note
Cluster.note = lambda self, mark, what: told.append((mark, str(what)))
for path in sorted(FOLDER.glob("*.txt")):
    told.append(("", replay(path.read_text(encoding="utf-8"))))
for seed in range(12):
    runner.run_seed(seed)
print(hashlib.sha256(repr(told).encode()).hexdigest())
"""


def test_the_stories_tell_of_every_decision_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: set[type[Decision]] = set()

    def seen(decision: Decision) -> str:
        decided.add(type(decision))
        return render(decision)

    monkeypatch.setattr(conversation, "render", seen)
    for path in STORIES:
        replay(path.read_text(encoding="utf-8"))
    assert decided == set(kinds(Decision))
    assert len(STORIES) >= 27


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_the_job_answers_as_it_is_written(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert replay(text) == text, f"if this is meant: python -m tests.job.conversation {path}"


def test_the_same_events_at_the_same_times_give_the_same_decisions() -> None:
    found = set()
    for seed in ("0", "1"):  # sets of strings come in another order
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", REPLAY], env=env, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def test_two_jobs_that_heard_the_same_have_the_same_snapshot() -> None:
    def told(*events: ev.Event) -> bytes:
        job = Job(Settings(start_np=2))
        for event in events:
            job.handle(event, 5.0)
        return job.snapshot()

    hosts = HostsDiscovered((("a", 1), ("b", 1)))
    assert told(hosts) == told(hosts)
    assert told(hosts) != told(HostsDiscovered((("a", 1), ("b", 2))))
    assert b"\xa1h" in told(HostsDiscovered((("h", 1),)))
