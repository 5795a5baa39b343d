"""What the page shows of workers, after the events of a job."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).resolve().parents[1] / "page" / "src" / "model.js"
SCRIPT = """
const { Model } = await import(process.argv[1]);
const model = new Model();
model.takeEvents(JSON.parse(process.argv[2]));
const lane = model.lanes.get("a.0.1");
console.log(JSON.stringify([lane.state, lane.failures]));
"""

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")


def after(*events: dict[str, Any]) -> list[Any]:
    """Return the state and the times of failures of a worker that was ready at 1.0."""
    all_events = [{"event": "worker_ready"}, *events]
    told = [{"t": t, "worker": "a.0.1", **event} for t, event in enumerate(all_events, 1)]
    argv = ["node", "--input-type=module", "-e", SCRIPT, MODEL.as_uri(), json.dumps(told)]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    state_and_failures: list[Any] = json.loads(ran.stdout)
    return state_and_failures


HUNG = {"event": "worker_hung", "loss": True}
KILLED = {"event": "worker_exited", "loss": True}


def test_a_hang_is_a_failure_that_counts_once_though_its_exit_follows() -> None:
    assert after(HUNG) == ["lost", [2]]
    assert after(HUNG, KILLED) == [None, [2]]


def test_a_worker_that_left_is_ending_and_counts_once_if_it_failed() -> None:
    assert after({"event": "worker_left"}) == ["ending", []]
    assert after({"event": "worker_left"}, KILLED) == [None, [3]]
    assert after({"event": "worker_left", "loss": True}, KILLED) == [None, [2]]
